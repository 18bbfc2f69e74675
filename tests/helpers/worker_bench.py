"""A rank worker over transports that do what a test says."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvbridge.core.ids import IndexSpace, MemoryKind, PageTable
from kvbridge.core.plan.operations import Operations, Section
from kvbridge.core.wire.codec import pack_rank
from kvbridge.core.wire.messages import RankDescription, TransportEndpoint, WireTable, to_wire
from kvbridge.core.wire.worker_messages import ConnectPeer, OpenRoom, PeerConnected, RoomClosed, Send, Sent
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Endpoint, Peer, Transfer, TransferState, TransferStatus, Transport
from kvbridge.transport.threads import Call
from kvbridge.worker.loop import RankWorker
from kvbridge.worker.rank import RankIdentity, WorkerLimits
from kvbridge.worker.transports import Background
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import DECODE, GEOMETRY, PAGE, manifest

TOKENS = 2 * PAGE
OTHER = "dddd00000000000f"
ACTIVE, DONE = TransferState.ACTIVE, TransferState.DONE
QUIET, NOT_QUIET = TransferState.FAILED_QUIET, TransferState.FAILED_NOT_QUIET


class FakePeer(Peer):
    transport_name = "fake"

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.transfers: list[FakeTransfer] = []

    @property
    def busy(self) -> bool:
        return any(not transfer.state.terminal for transfer in self.transfers)


class FakeTransfer(Transfer):
    def __init__(self, operations: Operations) -> None:
        self.operations = operations
        self.state = ACTIVE
        self.aborted = ""
        self.in_transit = False
        self.unconfirmed: tuple[slice, ...] = (slice(None),)

    def poll(self) -> TransferStatus:
        error = "" if self.state in {ACTIVE, DONE} else "cable"
        return TransferStatus(self.state, error, self.in_transit, self.unconfirmed)

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason


class FakeConnection(Call[Peer]):
    def __init__(self, transport: FakeTransport, data: bytes) -> None:
        self.transport, self.data = transport, data

    def poll(self) -> Peer | None:
        transport = self.transport
        if self.data in transport.silent:
            return None
        if transport.refuse is not None:
            raise transport.refuse
        assert not transport.closed
        assert not any(peer.data == self.data for peer in transport.peers), "the old connection is still there"
        peer = FakePeer(self.data)
        transport.peers.append(peer)
        return peer

    def cancel(self) -> None:
        self.transport.given_up.append(self.data)


class FakeTransport(Transport):
    def __init__(self, name: str, log: list[str], epoch: int = 0) -> None:
        self.name = name
        self.log = log
        self.epoch = epoch
        self.writers_before = 0
        """Endpoints of epochs before this one are in use by somebody."""
        self.peers: list[FakePeer] = []
        self.transfers: list[FakeTransfer] = []
        self.refuse: Exception | None = None
        self.silent: set[bytes] = set()
        """Peers, by what their endpoints say, that do not answer."""
        self.given_up: list[bytes] = []
        self.refuse_submit: Exception | None = None
        self.closed = False

    @property
    def max_operation_bytes(self) -> int:
        return 1 << 20

    def register(self, memory) -> None:
        self.log.append(f"register {self.name}")

    def endpoint(self) -> Endpoint:
        return Endpoint(transport=self.name, data=b"me" if self.epoch == 0 else b"me, epoch %d" % self.epoch)

    def connect(self, endpoint: Endpoint) -> Call[Peer]:
        return FakeConnection(self, endpoint.data)

    def disconnect(self, peer: Peer) -> None:
        assert isinstance(peer, FakePeer)
        assert not peer.busy, "disconnected while a transfer is active"
        assert not self.closed, "disconnected from a transport that has been closed"
        self.peers.remove(peer)

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        if self.refuse_submit is not None:
            raise self.refuse_submit
        assert isinstance(peer, FakePeer)
        assert peer in self.peers, "submitted to a peer that is not connected"
        transfer = FakeTransfer(operations)
        peer.transfers.append(transfer)
        self.transfers.append(transfer)
        return transfer

    def revoked(self, before_epoch: int) -> bool:
        return before_epoch > self.writers_before

    def close(self) -> None:
        assert not self.closed, "closed twice"
        for peer in self.peers:
            assert not any(transfer.state is ACTIVE for transfer in peer.transfers), "closed under an active transfer"
        self.closed = True
        self.log.append(f"close {self.name}")


class Link:
    def __init__(self) -> None:
        self.inbox: deque[object] = deque()
        self.said: list[object] = []
        self.waits: list[float] = []

    def send(self, message) -> None:
        self.said.append(message)

    def receive(self, timeout_s: float):
        self.waits.append(timeout_s)
        return self.inbox.popleft() if self.inbox else None

    def take(self, kind):
        found = [message for message in self.said if isinstance(message, kind)]
        self.said = [message for message in self.said if not isinstance(message, kind)]
        return found


def node_ranks(*transports: str, count: int = 1, data: bytes = b"peer") -> tuple[bytes, ...]:
    return tuple(
        pack_rank(
            RankDescription(
                manifest=manifest(base=(2 + number) << 40),
                endpoints=tuple(
                    TransportEndpoint(transport=name, data=data + bytes([48 + number]))
                    for name in transports or ("one",)
                ),
            )
        )
        for number in range(count)
    )


def tables(*ids: int) -> tuple[WireTable, ...]:
    return to_wire({IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32))})


def at_once(work: Callable[[], Any], _name: str) -> Future[Any]:
    """Do the work of other threads here and now."""
    outcome: Future[Any] = Future()
    try:
        outcome.set_result(work())
    except Exception as error:  # noqa: BLE001 - whoever asks for the outcome raises it
        outcome.set_exception(error)
    return outcome


class Bench:
    tokens = TOKENS

    def __init__(
        self,
        *transports: str,
        kind: MemoryKind = MemoryKind.DRAM,
        background: Background = at_once,
        identity: RankIdentity | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.link = Link()
        self.log: list[str] = []
        self.built: dict[str, list[FakeTransport]] = {}
        self.names = transports or ("one",)
        self.refuse_build: Exception | None = None
        memory = tuple(Extent(address=address, length_bytes=1 << 20, kind=kind) for address in (1 << 30, 1 << 31))
        self.worker = RankWorker(
            identity or RankIdentity(GEOMETRY, manifest(), memory, self.names),
            self.link,
            self.create,
            WorkerLimits(transfer_s=5.0, close_s=20.0),
            clock=self.clock,
            background=background,
        )
        for name in self.names:
            self.worker._transports.build(name)
        self.orders = 0

    def create(self, name: str, epoch: int = 0) -> FakeTransport:
        if self.refuse_build is not None:
            raise self.refuse_build
        transport = FakeTransport(name, self.log, epoch)
        self.built.setdefault(name, []).append(transport)
        return transport

    def transport(self, name: str = "one") -> FakeTransport:
        return self.built[name][-1]

    def say(self, *messages, steps: int = 1) -> None:
        self.link.inbox.extend(messages)
        for _ in range(steps):
            self.worker.step()

    def connect(self, peer: str = DECODE, ranks=None, **more) -> None:
        self.say(ConnectPeer(peer=peer, ranks=ranks or node_ranks(), **more))

    def open(self, room: int = 1, peer: str = DECODE, **more) -> None:
        facts = {"prompt_tokens": self.tokens, "prefix_tokens": 0, "source": tables(1, 2), "destination": tables(3, 4)}
        self.say(OpenRoom(room=room, generation=1, peer=peer, **(facts | more)))

    def order(self, room: int = 1, steps: int = 1, **more) -> int:
        self.orders += 1
        section = Section(prompt_tokens=self.tokens, start_token=0, stop_token=self.tokens)
        self.say(Send(room=room, generation=1, order=self.orders, section=section, **more), steps=steps)
        return self.orders

    def end(self, state: TransferState, name: str = "one", which: int = -1) -> None:
        self.transport(name).transfers[which].state = state
        self.worker.step()

    def sent(self) -> list[Sent]:
        return self.link.take(Sent)

    @property
    def closed(self) -> list[int]:
        return [message.room for message in self.link.take(RoomClosed)]


def ready_bench(*transports: str) -> Bench:
    bench = Bench(*transports)
    bench.connect(ranks=node_ranks(*transports) if transports else None)
    bench.open()
    assert bench.link.take(PeerConnected)[0].error_code == ""
    return bench

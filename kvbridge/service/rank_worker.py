"""One rank at work: it owns a device's memory registrations and its transport agents, and executes orders.

Owns: transports, pairings with the ranks of peers, orders in flight. Decides nothing: which room, which tokens,
whether and when is the node's business. Everything here runs on one thread, since one submitting thread an agent is
what both libraries bear best.

Life: hello, setup (map, register, report), then a loop that takes messages from the node and pushes transfers
forward. When a transfer ends without being quiet, the transport that did it is torn down and built again, which ends
everything it might still have been doing; only then is the order reported, and it is quiet by then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, ConflictError, NotReadyError, TransportError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import Rank, Tables
from kvbridge.core.plan.operations import Amounts, Operations, add_amounts
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import plan
from kvbridge.core.wire.messages import (
    CloseRoom,
    ConnectPeer,
    DisconnectPeer,
    Heartbeat,
    NodeToWorker,
    OpenRoom,
    PeerConnected,
    RankDescription,
    RoomClosed,
    Send,
    Sent,
    Shutdown,
    TransportEndpoint,
    WorkerProgress,
    WorkerReady,
    WorkerToNode,
    from_wire,
)
from kvbridge.transport.base import Endpoint, Memory, Peer, Transfer, TransferState, Transport

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 0.05
"""How long the loop waits for a message while nothing is in flight."""
BUSY_PAUSE_S = 0.0001
"""How long it sleeps when transfers are in flight and none moved; sleeping beats spinning on few cores."""
PROGRESS_INTERVAL_S = 0.2
HEARTBEAT_INTERVAL_S = 1.0
ACTIVE_ORDERS = 16
"""Orders in flight at once; the others wait, so that a burst of rooms cannot fill a library's queue."""


class NodeLink(Protocol):
    """The worker's end of the connection to its node."""

    def send(self, message: WorkerToNode) -> None:
        """Queue a message to the node."""

    def receive(self, timeout_s: float) -> NodeToWorker | None:
        """Return the next message, or None after `timeout_s`."""


class TransportFactory(Protocol):
    """Builds one transport by its name; called again when one has to be replaced."""

    def __call__(self, name: str) -> Transport:
        """Raises TransportError with cause and fix when it cannot run here."""


@dataclass(frozen=True)
class RankIdentity:
    """What a worker serves."""

    geometry: ModelGeometry
    manifest: RankManifest
    memory: tuple[Memory, ...]
    transports: tuple[str, ...]
    """Transport names in order of preference."""

    @property
    def rank(self) -> Rank:
        """The worker's place in its instance."""
        return self.manifest.rank


@dataclass
class _Target:
    """One rank of a connected peer."""

    pairing: Pairing
    transport: Transport
    peer: Peer


@dataclass
class _ConnectedPeer:
    name: str
    ranks: tuple[RankDescription, ...]
    targets: list[_Target] = field(default_factory=list)


@dataclass
class _Room:
    opening: OpenRoom
    source: Tables
    destination: Tables
    closing: bool = False


@dataclass
class _Order:
    request: Send
    received_s: float
    amounts: Amounts = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    waiting: list[tuple[_Target, Operations]] = field(default_factory=list)
    transfers: list[tuple[Transport, Transfer]] = field(default_factory=list)
    error_code: str = ""
    error: str = ""

    @property
    def key(self) -> tuple[int, int]:
        return self.request.room, self.request.generation

    def fail(self, code: str, text: str) -> None:
        """Keep the first cause."""
        if not self.error_code:
            self.error_code, self.error = code, text


class RankWorker:
    """Executes the node's orders for one rank. Not thread-safe; everything happens in `run` or `step`."""

    def __init__(
        self,
        identity: RankIdentity,
        link: NodeLink,
        create_transport: TransportFactory,
        *,
        transfer_timeout_s: float,
        pid: int,
        clock: Clock = monotonic,
    ) -> None:
        self._identity = identity
        self._link = link
        self._create = create_transport
        self._transfer_timeout_s = transfer_timeout_s
        self._pid = pid
        self._clock = clock
        self._transports: dict[str, Transport] = {}
        self._peers: dict[str, _ConnectedPeer] = {}
        self._rooms: dict[tuple[int, int], _Room] = {}
        self._queued: deque[_Order] = deque()
        self._active: list[_Order] = []
        self._stopping = False
        self._beaten_s = clock()

    # ------------------------------------------------------------------ life

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Build the transports, report ready and serve until told to shut down, or until `stopped()`."""
        try:
            for name in self._identity.transports:
                self._build(name)
            self._report_ready()
            while not self._stopping and not stopped():
                self.step()
        finally:
            self.close()

    def step(self) -> None:
        """Take what the node sent, push every transfer forward once, and rest if nothing moved."""
        self._beat()
        busy = bool(self._active or self._queued)
        message = self._link.receive(0.0 if busy else IDLE_WAIT_S)
        while message is not None:
            self._handle(message)
            message = None if self._stopping else self._link.receive(0.0)
        if not self._advance() and self._active:
            time.sleep(BUSY_PAUSE_S)

    def _beat(self) -> None:
        now_s = self._clock()
        if now_s - self._beaten_s >= HEARTBEAT_INTERVAL_S:
            self._beaten_s = now_s
            self._link.send(Heartbeat())

    def close(self) -> None:
        """Tear every transport down; nothing of this worker moves a byte afterwards."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()

    def __repr__(self) -> str:
        return (
            f"<RankWorker {self._identity.rank}: {len(self._peers)} peers, {len(self._rooms)} rooms, "
            f"{len(self._active)} orders active, {len(self._queued)} queued>"
        )

    def _build(self, name: str) -> None:
        transport = self._create(name)
        self._transports[name] = transport
        pieces = self._identity.memory
        total_bytes = sum(piece.length_bytes for piece in pieces)
        done_bytes = 0
        reported_s = self._clock()
        for piece in pieces:
            transport.register([piece])
            done_bytes += piece.length_bytes
            if self._clock() - reported_s >= PROGRESS_INTERVAL_S or done_bytes == total_bytes:
                reported_s = self._clock()
                self._link.send(
                    WorkerProgress(rank=self._identity.rank, done_bytes=done_bytes, total_bytes=total_bytes)
                )

    def _report_ready(self) -> None:
        endpoints = tuple(
            TransportEndpoint(transport=endpoint.transport, data=endpoint.data)
            for endpoint in (transport.endpoint() for transport in self._transports.values())
        )
        description = RankDescription(manifest=self._identity.manifest, endpoints=endpoints)
        self._link.send(WorkerReady(rank=self._identity.rank, pid=self._pid, description=description))

    # ------------------------------------------------------------------ messages

    def _handle(self, message: NodeToWorker) -> None:
        match message:
            case ConnectPeer():
                self._connect(message)
            case DisconnectPeer():
                self._disconnect(message.peer)
            case OpenRoom():
                self._rooms[message.room, message.generation] = _Room(
                    message, from_wire(message.source), from_wire(message.destination)
                )
            case Send():
                self._queued.append(_Order(message, self._clock()))
            case CloseRoom():
                self._close_room(message.room, message.generation)
            case Shutdown():
                self._stopping = True
            case _:
                pass

    def _connect(self, message: ConnectPeer) -> None:
        self._disconnect(message.peer)
        peer = _ConnectedPeer(message.peer, message.ranks)
        try:
            for ordinal, description in enumerate(message.ranks):
                peer.targets.append(self._target(description, ordinal, len(message.ranks)))
        except BridgeError as error:
            self._drop_targets(peer)
            self._link.send(
                PeerConnected(rank=self._identity.rank, peer=message.peer, error_code=error.code, error=str(error))
            )
            return
        self._peers[message.peer] = peer
        names = tuple(target.transport.name for target in peer.targets)
        self._link.send(PeerConnected(rank=self._identity.rank, peer=message.peer, transports=names))

    def _target(self, description: RankDescription, ordinal: int, count: int) -> _Target:
        pairing = Pairing.create(
            self._identity.geometry,
            self._identity.manifest,
            description.manifest,
            destination_ordinal=ordinal,
            destination_count=count,
        )
        offered = {endpoint.transport: endpoint.data for endpoint in description.endpoints}
        failures = []
        for name in self._identity.transports:
            if name not in offered:
                failures.append(f"{name}: the peer does not offer it")
                continue
            transport = self._transports[name]
            try:
                connected = transport.connect(Endpoint(transport=name, data=offered[name]))
            except TransportError as error:
                failures.append(f"{name}: {error}")
                continue
            return _Target(pairing, transport, connected)
        raise TransportError(
            f"rank {self._identity.rank} found no transport to rank {description.manifest.rank} of the peer "
            f"({'; '.join(failures)}); give both sides a common one in `transports.order`"
        )

    def _disconnect(self, name: str) -> None:
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        for order in [*self._active, *self._queued]:
            room = self._rooms.get(order.key)
            if room is not None and room.opening.peer == name:
                self._abort_order(order, "peer_failed", "the peer was disconnected")
        self._drop_targets(peer)

    @staticmethod
    def _drop_targets(peer: _ConnectedPeer) -> None:
        for target in peer.targets:
            target.transport.disconnect(target.peer)

    def _close_room(self, room: int, generation: int) -> None:
        known = self._rooms.get((room, generation))
        if known is not None:
            known.closing = True
            for order in [*self._active, *self._queued]:
                if order.key == (room, generation):
                    self._abort_order(order, "aborted", "the room was closed")
        self._confirm_closed(room, generation)

    def _confirm_closed(self, room: int, generation: int) -> None:
        """Answer RoomClosed once no order of the room is left."""
        if any(order.key == (room, generation) for order in [*self._active, *self._queued]):
            return
        self._rooms.pop((room, generation), None)
        self._link.send(RoomClosed(room=room, generation=generation, rank=self._identity.rank, quiet=True))

    @staticmethod
    def _abort_order(order: _Order, code: str, reason: str) -> None:
        order.fail(code, reason)
        order.waiting.clear()
        for _, transfer in order.transfers:
            transfer.abort(reason)

    # ------------------------------------------------------------------ orders

    def _advance(self) -> bool:
        """Start queued orders, poll active ones, report what ended. Returns whether anything changed."""
        moved = False
        while self._queued and len(self._active) < ACTIVE_ORDERS:
            order = self._queued.popleft()
            self._start(order)
            self._active.append(order)
            moved = True
        ended = [order for order in list(self._active) if self._poll(order)]
        for order in ended:
            if order in self._active:  # a rebuilt transport may have ended it already
                self._report(order)
                moved = True
        return moved

    def _start(self, order: _Order) -> None:
        """Plan an order and submit it to every rank of the peer."""
        if order.error_code:
            return
        try:
            room = self._rooms.get(order.key)
            if room is None or room.closing:
                raise ConflictError(f"room {order.request.room} is not open on rank {self._identity.rank}")
            peer = self._peers.get(room.opening.peer)
            if peer is None:
                raise NotReadyError(f"rank {self._identity.rank} is not connected to peer {room.opening.peer}")
            self._plan(order, room, peer)
            self._submit(order)
        except BridgeError as error:
            self._abort_order(order, error.code, str(error))

    def _plan(self, order: _Order, room: _Room, peer: _ConnectedPeer) -> None:
        begun_s = self._clock()
        for target in peer.targets:
            planned = plan(
                target.pairing,
                order.request.section,
                room.source,
                room.destination,
                max_operation_bytes=target.transport.capabilities.max_operation_bytes,
            )
            order.amounts = add_amounts(order.amounts, planned.amounts)
            if len(planned.operations):
                order.waiting.append((target, planned.operations))
        order.seconds["plan"] = self._clock() - begun_s

    def _submit(self, order: _Order) -> None:
        for target, operations in order.waiting:
            transfer = target.transport.submit(target.peer, operations, deadline_s=self._transfer_timeout_s)
            order.transfers.append((target.transport, transfer))
        order.waiting.clear()
        order.seconds["first_byte"] = self._clock() - order.received_s

    def _poll(self, order: _Order) -> bool:
        """Push the order's transfers forward; returns whether all of them are terminal and quiet.

        A rebuild reports the order itself unless other transports still work on it; those are polled the next time.
        """
        loud: set[str] = set()
        ended = True
        for transport, transfer in order.transfers:
            status = transfer.poll()
            if not status.state.terminal:
                ended = False
            elif status.state is not TransferState.DONE:
                if not order.error_code:
                    self._abort_order(order, TransportError.code, f"{transport.name}: {status.error}")
                if status.state is TransferState.FAILED_NOT_QUIET:
                    loud.add(transport.name)
        for name in loud:
            self._rebuild(name)
        return ended and not loud

    def _report(self, order: _Order) -> None:
        self._active.remove(order)
        request = order.request
        order.seconds["move"] = self._clock() - order.received_s - order.seconds.get("first_byte", 0.0)
        self._link.send(
            Sent(
                room=request.room,
                generation=request.generation,
                rank=self._identity.rank,
                order=request.order,
                amounts={} if order.error_code else order.amounts,
                seconds=order.seconds,
                error_code=order.error_code,
                error=order.error,
            )
        )
        room = self._rooms.get(order.key)
        if room is not None and room.closing:
            self._confirm_closed(request.room, request.generation)

    def _rebuild(self, name: str) -> None:
        """Tear a transport down that would not go quiet, and build it again with new endpoints.

        Every order that used it ends here. Peers that were reached through it have to be connected again: they
        stay known, and are connected at once.
        """
        log.warning(
            "transport_rebuilt",
            rank=str(self._identity.rank),
            transport=name,
            why="a failed transfer did not become quiet",
        )
        broken = self._transports[name]
        broken.close()
        for order in list(self._active):
            if any(transport is broken for transport, _ in order.transfers):
                order.fail(TransportError.code, f"{name}: torn down because another transfer would not become quiet")
                order.transfers = [
                    (transport, transfer) for transport, transfer in order.transfers if transport is not broken
                ]
                for _, transfer in order.transfers:
                    transfer.abort(order.error)
                if not order.transfers:
                    self._report(order)
        self._build(name)
        for peer in list(self._peers.values()):
            if any(target.transport is broken for target in peer.targets):
                del self._peers[peer.name]
                self._connect(ConnectPeer(peer=peer.name, ranks=peer.ranks))
        self._report_ready()

"""The transport over mooncake-transfer-engine: RDMA in production, TCP on a laptop and in CI.

The library does the following, and does not do other things (0.3.13, measured); with the consequences for this module:

- `initialize` answers success for a protocol that it cannot provide and then uses TCP: RDMA without an adapter is refused here.
- A rejected remote address closes one of the peer's four connections, and with the fourth the next valid write fails and the one
  after waits a second. Therefore an endpoint carries the peer's registered extents, and a write outside of them is refused before
  submission.
- On TCP an unregistered source is accepted; it is refused here.
- A batch's failure leaves the rest of it running, and the calls that wait for a batch spin a core. Over TCP every operation is
  therefore submitted by itself in a window and polled, and a failed transfer waits until each one is terminal. Over RDMA they go in
  batches, and a transfer that failed with one is not quiet: see `mooncake.writes`. Only the destruction of the engine stops an
  operation; `close` does that, in 0.2 to 1.0 s, whatever is under way, and holds the interpreter for all of that time.
- A frozen peer fails an operation after `progress_timeout_s`, a few at a time: windows of 8, 16 and 32 operations were quiet after
  3, 7 and 14 times that. Where `quiet_timeout_s` is shorter the transfer ends not quiet.
- A call that asks a peer something waits for it for 60 s and more, if the peer is frozen or means to be silent. A probe does so
  without disturbing anybody. The first write to a peer fetches the peer's description under a lock that every other write of the
  engine needs. Therefore `connect` probes, and then has the description fetched by an empty write, both on a thread of their own
  and ended from outside (`mooncake.library`): the probe after `connect_timeout_s`, the write, which holds up transfers to other
  peers, after `metadata_timeout_s`. Over RDMA nothing can be written before the description is known; there the first operation
  fetches it, and nothing bounds that.
- A peer that died fails at once, and is not tried again by the library for a second. First contact takes 1 to 11 ms.
- The library reads its environment once a process, listens on 0.0.0.0 whatever `host` says and authenticates nobody: whoever
  reaches its ports (15000 to 17000 and an ephemeral data port) can write registered memory. Fence it by the network.
- A session is host:port. The library caches what it knows of one for good, so a peer that comes back must come back on another
  port, which it does (they are drawn at random) but for an unlikely accident; the probe in `connect` does not find that.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field

from kvbridge.config.transports import MooncakeProtocol, MooncakeSettings
from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.core.ids import FrozenModel, MemoryKind, Positive
from kvbridge.core.plan.operations import Operations
from kvbridge.core.process import Clock, monotonic
from kvbridge.pool.memory.layout import Extent
from kvbridge.transport.base import Backend, Endpoint, Extents, Peer, Transfer, labels, read_endpoint
from kvbridge.transport.mooncake.library import (
    GRACE_S,
    Engine,
    PeerCall,
    create_library,
    interface_address,
    why_no_device_memory,
)
from kvbridge.transport.mooncake.writes import BatchWrites, SingleWrites, Waiter
from kvbridge.transport.threads import Call
from kvbridge.transport.windowed import Progress, Submitter, Window, WindowedTransfer, WindowLimits

NAME = "mooncake"

ASK_EVERY_S = 0.0005
"""Between two questions whether the empty write of a connection has ended."""


class MooncakeEndpoint(FrozenModel):
    """A transport's description of itself for peers, as JSON in `Endpoint.data`."""

    session: Annotated[str, Field(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}$", max_length=300)]
    protocol: MooncakeProtocol
    extents: tuple[tuple[Positive, Positive], ...]
    """(address, bytes) of each registration."""


@dataclass(slots=True, eq=False)
class MooncakePeer:
    """A connected peer: its session, its memory as announced, and the window of what is in flight to it."""

    label: str
    session: str
    extents: Extents
    window: Window
    waiter: Waiter


def _silent(session: str, settings: MooncakeSettings) -> str:
    return (
        f"mooncake peer {session} gave no answer in {settings.connect_timeout_s} s (transports.mooncake.connect_timeout_s); its "
        "process hangs or a firewall drops what is sent to it"
    )


def _limits(settings: MooncakeSettings) -> WindowLimits:
    window_bytes, quiet_s = settings.window_bytes, settings.quiet_timeout_s
    if settings.protocol is MooncakeProtocol.TCP:  # a quarter of the window at a time: three are under way meanwhile
        operations = settings.window_operations
        return WindowLimits(operations, window_bytes, quiet_s, max(1, operations // 4), window_bytes // 4)
    operations = settings.window_operations * settings.batch_operations
    return WindowLimits(operations, window_bytes, quiet_s, settings.batch_operations, settings.batch_bytes)


class MooncakeTransport(Backend[MooncakePeer]):
    """One engine. The module's docstring says what the library cannot be trusted with."""

    name: ClassVar[str] = NAME

    def __init__(self, settings: MooncakeSettings, *, clock: Clock = monotonic) -> None:
        super().__init__(clock, max_operation_bytes=settings.max_operation_bytes)
        self.operation_cost_bytes = settings.dead_bytes
        self._settings = settings
        self._limits = _limits(settings)
        self._calls: weakref.WeakSet[PeerCall | Waiter] = weakref.WeakSet()
        """Calls and threads that may keep the engine alive until they have ended."""
        host = interface_address(settings.host) or settings.host
        self._engine = Engine(create_library(settings.model_copy(update={"host": host})))
        host = f"[{host}]" if ":" in host else host
        self._session = f"{host}:{self._engine.library.get_rpc_port()}"

    def _require_open(self) -> None:
        _ = self._engine.library

    def _out_of_reach(self, part: Extent) -> str:
        return why_no_device_memory(self._settings.protocol) if part.kind is MemoryKind.VRAM else ""

    def _register(self, memory: Sequence[Extent]) -> None:
        if not memory:
            return
        library = self._engine.library
        addresses, lengths = [part.address for part in memory], [part.length_bytes for part in memory]
        answer = library.batch_register_memory(addresses, lengths)
        if answer != 0:
            library.batch_unregister_memory(addresses)
            raise RegistrationError(
                f"mooncake could not register {sum(lengths)} bytes ({labels(memory)}): it answered "
                f"{answer}. With rdma raise the locked-memory limit (ulimit -l unlimited) and check the adapter"
            )

    def endpoint(self) -> Endpoint:
        self._require_open()
        extents = tuple(stretch[:2] for stretch in self._memory.stretches)
        content = MooncakeEndpoint(session=self._session, protocol=self._settings.protocol, extents=extents)
        return Endpoint(transport=NAME, data=content.model_dump_json().encode())

    def connect(self, endpoint: Endpoint) -> Call[Peer]:
        content = read_endpoint(endpoint, NAME, MooncakeEndpoint)
        if content.protocol is not self._settings.protocol:
            raise TransportError(
                f"peer {content.session} speaks mooncake over {content.protocol}, this process over "
                f"{self._settings.protocol}; set transports.mooncake.protocol alike on both"
            )
        asked = PeerCall(content.session)
        self._calls.add(asked)
        return Call(
            functools.partial(self._connected, content, asked),
            name=f"connect mooncake peer {content.session}",
            timeout_s=2 * self._settings.connect_timeout_s + self._settings.metadata_timeout_s + GRACE_S,
            late=_silent(content.session, self._settings),
            clock=self._clock,
            then=self._take,
            given_up=asked.cancel,
        )

    def _connected(self, content: MooncakeEndpoint, asked: PeerCall) -> MooncakePeer:
        self._probe(content.session, asked)
        if self._settings.protocol is MooncakeProtocol.TCP and content.extents:
            self._fetch(content, asked)
        self._require_open()
        whose = f"peer {content.session}"
        waiter = Waiter(self._engine, f"batches to {whose}")
        return MooncakePeer(whose, content.session, Extents(whose, content.extents), Window(self._limits), waiter)

    def _probe(self, session: str, asked: PeerCall) -> None:
        answer = asked.ask(
            lambda: self._engine.library.send_probe(session),
            timeout_s=self._settings.connect_timeout_s,
            name=f"ask mooncake peer {session}",
            late=_silent(session, self._settings),
        )
        if answer != 0:
            raise TransportError(
                f"mooncake cannot reach peer {session} (probe answered {answer}); check that it runs, and that ports 15000 "
                "to 17000 and the ephemeral ports of its host are open from here"
            )

    def _fetch(self, content: MooncakeEndpoint, asked: PeerCall) -> None:
        """Have the library fetch a peer's description, by an empty write, so that no submission has to wait for it."""
        timeout_s = self._settings.metadata_timeout_s
        address, _ = content.extents[0]
        nothing = Operations(*(np.array([number], dtype=np.uint64) for number in (address, address, 0)))
        writes = SingleWrites(self._engine, content.session, nothing)
        handle = asked.ask(
            functools.partial(writes.start, 0, 1),
            timeout_s=timeout_s,
            name=f"ask mooncake peer {content.session}",
            late=f"mooncake peer {content.session} answers, but did not describe its memory in {timeout_s:g} s "
            "(transports.mooncake.metadata_timeout_s)",
        )
        ends_at_s = self._clock() + self._settings.connect_timeout_s
        check = writes.check(handle)
        while check.progress is Progress.PENDING and self._clock() < ends_at_s:
            time.sleep(ASK_EVERY_S)
            check = writes.check(handle)
        if check.progress is not Progress.DONE:
            raise TransportError(
                f"mooncake reached peer {content.session} but cannot write to it ({check.reason or 'no answer'}); "
                "check that its ephemeral data port is open from here"
            )

    def _take(self, known: MooncakePeer) -> Peer:
        self._calls.add(known.waiter)
        return super()._take(known)

    def submit(self, peer: Peer, operations: Operations, *, deadline_s: float) -> Transfer:
        known = self._checked(peer, operations)
        writes: Submitter[Any]
        if self._settings.protocol is MooncakeProtocol.TCP:
            writes = SingleWrites(self._engine, known.session, operations)
        else:
            writes = BatchWrites(self._engine, known.session, operations, known.waiter)
        transfer: WindowedTransfer[Any] = WindowedTransfer(
            operations, writes, known.window, peer=known.label, deadline_s=deadline_s, clock=self._clock
        )
        self._transfers[transfer] = peer
        return transfer

    def close(self) -> None:
        """Takes about a second. Harmless when closed already.

        Raises TransportError when the library does not return from a call, because the engine then lives on.
        """
        timeout_s = self._settings.connect_timeout_s
        until_s = self._clock() + timeout_s
        calls = list(self._calls)
        for call in calls:  # all are cut off before one is waited for
            call.end(0.0)
        returned = [call.end(max(0.0, until_s - self._clock())) for call in calls]
        self._engine.destroy()
        if not all(returned):
            raise TransportError(
                f"the mooncake library did not return within {timeout_s} s (transports.mooncake.connect_timeout_s), so its engine "
                "cannot be torn down; pages of its transfers must not be used again before this process has ended"
            )
        for transfer in list(self._transfers):
            assert isinstance(transfer, WindowedTransfer)
            transfer.cut_off("the transport was closed")
        self._peers.clear()

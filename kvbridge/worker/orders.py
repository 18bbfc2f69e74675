"""The orders of one rank: each waits for its peer, becomes transfers, and is reported when none of them is in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.pages import joined_tables, tables_from_wire
from kvbridge.core.ids import Rank, Tables
from kvbridge.core.plan.digests import DigestKind, PageDigests, sent_groups
from kvbridge.core.plan.operations import Amounts, Operations, add_amounts
from kvbridge.core.plan.planner import plan
from kvbridge.core.process import Clock
from kvbridge.core.wire.messages import REASON_CHARS, WireTable
from kvbridge.core.wire.worker_messages import Digested, OpenRoom, Send, Sent
from kvbridge.transport.base import Transfer, TransferState, TransferStatus, Transport
from kvbridge.worker.digests import DigestWork
from kvbridge.worker.peers import ConnectedPeer, Target
from kvbridge.worker.rank import contained, logged

log = structlog.get_logger(__name__)

RoomKey = tuple[int, int]
"""A room and its generation."""


@dataclass(frozen=True, eq=False)
class OpenedRoom:
    """The two ends of a room."""

    opening: OpenRoom
    source: Tables
    destination: Tables
    error: BridgeError | None = None
    """Why the room cannot be sent; None unless its tables were malformed."""

    @classmethod
    def of(cls, opening: OpenRoom) -> OpenedRoom:
        """Read the tables of a room. Malformed tables fail each of its orders."""
        try:
            return cls(opening, tables_from_wire(opening.source), tables_from_wire(opening.destination))
        except BridgeError as error:
            log.error("room_not_opened", room=opening.room, code=error.code, reason=str(error))
            return cls(opening, {}, {}, error)

    @property
    def key(self) -> RoomKey:
        """The room and its generation."""
        return self.opening.room, self.opening.generation

    def grown(self, more: tuple[WireTable, ...]) -> OpenedRoom:
        """Return the same room with further source pages. Orders that have begun keep the pages that they know."""
        try:
            return replace(self, source=joined_tables(self.source, tables_from_wire(more)))
        except BridgeError as error:
            return replace(self, error=error)


@dataclass(eq=False)
class Part:
    """The operations that go to one rank of the peer by one path."""

    ordinal: int
    target: Target
    operations: Operations
    transfer: Transfer
    ended: bool = False
    failure: TransferStatus | None = None
    """How the transfer failed, until the operations that were not confirmed are sent again by another path."""


@dataclass(eq=False)
class Order:
    """One `Send`. It is over when none of its transfers is in flight."""

    request: Send
    received_s: float
    to: str = ""
    """The name of the peer that it waits for; empty for an order of a room that is not open."""
    peer: ConnectedPeer | None = None
    """The peer, once the order has been started."""
    amounts: Amounts = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """The errors of paths that others have replaced."""
    error_code: str = ""
    error: str = ""
    in_transit: bool = False
    """Whether something was sent whose arrival was never confirmed."""
    not_quiet: set[Transport] = field(default_factory=set)
    """Transports that failed it and may still read or send until they are closed."""
    digests: DigestWork | None = None
    """Digests of the sent rows that are still to be computed."""
    digest_parts: tuple[tuple[PageDigests, ...], ...] = ()
    """Computed digests, each tuple for one message."""
    reported: bool = False

    @property
    def key(self) -> RoomKey:
        """The room and generation that it belongs to."""
        return self.request.room, self.request.generation

    @property
    def losses(self) -> list[tuple[Part, TransferStatus]]:
        """Parts that have failed, and how. They are to be sent again by another path; without one they fail the order."""
        return [(part, part.failure) for part in self.parts if part.failure is not None]

    @contextmanager
    def guarded(self, work: str) -> Iterator[None]:
        """Fail the order, and nothing else, with any error of some work."""
        try:
            with self._contained(work):
                yield
        except BridgeError as error:
            self.fail(error.code, str(error))

    def _contained(self, work: str) -> AbstractContextManager[None]:
        return contained(work, room=self.request.room, order=self.request.order)

    def fail(self, code: str, reason: str) -> None:
        """Keep the first cause and submit nothing further. Transfers in flight are aborted; the order waits for their end."""
        if not self.error_code:
            self.error_code, self.error = code, reason[:REASON_CHARS]
        self.digests = None
        for part in self.parts:
            part.failure = None
            work = f"{part.target.transport.name}: aborting a transfer"
            with logged("transfer_not_aborted", work, room=self.request.room, order=self.request.order):
                part.transfer.abort(reason)

    def start(self, room: OpenedRoom, peer: ConnectedPeer, *, timeout_s: float, clock: Clock) -> None:
        """Plan and submit to every rank of the peer. A failure of either fails this order alone."""
        self.peer = peer
        begun_s = clock()
        if room.error is not None:
            self.fail(room.error.code, f"the room cannot be opened: {room.error}")
            return
        with self.guarded("planning"):
            planned = self._plan(room, peer)
            planned_s = clock()
            self.seconds["plan"] = planned_s - begun_s
            for ordinal, target, operations in planned:
                self._submit(ordinal, target, operations, timeout_s)
            self.seconds["submit"] = clock() - planned_s
        self.seconds["first_byte"] = clock() - self.received_s

    def _plan(self, room: OpenedRoom, peer: ConnectedPeer) -> list[tuple[int, Target, Operations]]:
        """Plan for every rank before anything is submitted, so that bad tables move no byte."""
        planned = []
        for ordinal in sorted(peer.paths):
            target = peer.target(ordinal)
            part = plan(
                target.pairing,
                self.request.section,
                room.source,
                room.destination,
                max_operation_bytes=target.transport.max_operation_bytes,
                operation_cost_bytes=target.transport.operation_cost_bytes,
            )
            self.amounts = add_amounts(self.amounts, part.amounts)
            if len(part.operations):
                planned.append((ordinal, target, part.operations))
        return planned

    def _submit(self, ordinal: int, target: Target, operations: Operations, timeout_s: float) -> None:
        """Begin to send. A defect leaves unknown whether something was sent, so the transport then counts as not quiet."""
        try:
            transfer = target.transport.submit(target.peer, operations, deadline_s=timeout_s)
        except BridgeError:
            raise
        except Exception:
            self.in_transit = True
            self.not_quiet.add(target.transport)
            with self._contained(f"{target.transport.name}: submitting"):
                raise
        self.parts.append(Part(ordinal, target, operations, transfer))

    def poll(self) -> None:
        """Push the transfers forward, and note how those that have failed did so."""
        for part in self.parts:
            if part.ended:
                continue
            transport = part.target.transport
            try:
                with self._contained(f"{transport.name}: a transfer"):
                    status = part.transfer.poll()
            except BridgeError as error:
                # A transfer that cannot be asked may do anything until its transport is closed.
                status = TransferStatus(TransferState.FAILED_NOT_QUIET, str(error), in_transit=True)
            part.ended = status.state.terminal
            if not part.ended or status.state is TransferState.DONE:
                continue
            if status.state is TransferState.FAILED_NOT_QUIET:
                self.not_quiet.add(transport)
                status = replace(status, in_transit=True)
            self.in_transit = self.in_transit or status.in_transit
            part.failure = status

    def send_again(self, part: Part, failure: TransferStatus, target: Target, *, timeout_s: float) -> None:
        """Send unconfirmed operations by another path: the same bytes into the same pages, which stay leased until the end."""
        part.failure = None
        self.lost.append(f"{part.target.transport.name}: {failure.error}")
        with self.guarded(f"{target.transport.name}: sending again"):
            operations = part.operations.taken(failure.unconfirmed).cut(target.transport.max_operation_bytes)
            self._submit(part.ordinal, target, operations, timeout_s)

    def fail_by(self, part: Part, failure: TransferStatus) -> None:
        """Fail because no path is left for unconfirmed operations."""
        before = "".join(f"; before that, {error}" for error in reversed(self.lost))
        self.fail(TransportError.code, f"{part.target.transport.name}: {failure.error}{before}")

    def begin_digests(self, geometry: ModelGeometry, room: OpenedRoom) -> None:
        """Prepare the digests that the room asks for, now that its bytes are on their way."""
        if self.error_code or self.peer is None or room.opening.digest is DigestKind.NONE:
            return
        section = self.request.section
        with self.guarded("the digest"):
            groups = sent_groups([target.pairing for target in self.peer.targets], section.layers)
            self.digests = DigestWork(geometry, groups, section, room.source, room.destination)

    def digest_some(self, work: DigestWork, clock: Clock) -> None:
        """Compute one slice of the digests. A failure fails the order."""
        begun_s = clock()
        with self.guarded("the digest"):
            if work.step():
                self.digest_parts, self.digests = tuple(work.sums.parts()), None
        self.seconds["digest"] = self.seconds.get("digest", 0.0) + clock() - begun_s

    def uses(self, used: Transport | Target | ConnectedPeer) -> bool:
        """Whether a transport or a path still works on it, or a peer may. A transfer that would not become quiet does not count."""
        if used is self.peer:
            return True
        return any(used in {part.target, part.target.transport} and not part.ended for part in self.parts)

    def lose(self, transport: Transport) -> None:
        """Note that a transport that had failed it has been closed, and so neither reads nor sends any more."""
        self.parts = [part for part in self.parts if part.target.transport is not transport]
        self.not_quiet.discard(transport)

    def report(self, rank: Rank) -> list[Digested | Sent]:
        """Return the messages to the node about its end: digests first."""
        (room, generation), number = self.key, self.request.order
        digests = [
            Digested(room=room, generation=generation, rank=rank, order=number, digests=part)
            for part in self.digest_parts
        ]
        sent = Sent(
            room=room,
            generation=generation,
            rank=rank,
            order=number,
            amounts={} if self.error_code else self.amounts,
            seconds=self.seconds,
            error_code=self.error_code,
            error=self.error,
            quiet=not self.not_quiet,
            in_transit=self.in_transit,
        )
        return [*digests, sent]


class OrderBook:
    """The orders of a rank that have not ended: each waits, then is active. Used by one thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Order, None]] = {}
        """By peer, in the order in which they came; without empty ones."""
        self._active: dict[Order, None] = {}
        self._active_to: Counter[str] = Counter()
        self._of_room: dict[RoomKey, dict[Order, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._active or self._waiting)

    @property
    def active(self) -> Collection[Order]:
        """The orders that have begun, the first one first."""
        return self._active.keys()

    def of_room(self, key: RoomKey) -> Collection[Order]:
        """Return the orders of a room."""
        return self._of_room.get(key, {}).keys()

    def waiting_for(self, peer: str) -> Collection[Order]:
        """Return the orders that wait for a peer."""
        return self._waiting.get(peer, {}).keys()

    def add(self, order: Order) -> None:
        """Let an order wait for its peer."""
        self._of_room.setdefault(order.key, {})[order] = None
        self._waiting.setdefault(order.to, {})[order] = None

    def fail(self, order: Order, code: str, reason: str) -> None:
        """Fail an order. A waiting order becomes active at once and ends with the next step, since it has nothing in flight."""
        order.fail(code, reason)
        if order not in self._active:
            self._begin(order)

    def begin(self, most: int, *, is_ready: Callable[[str], bool], is_written: Callable[[Order], bool]) -> list[Order]:
        """Return the orders that begin now, in the order in which they came: at most `most` to a peer are active.

        An order whose memory `is_written` overtakes orders to the same peer whose memory is not yet.
        """
        found: list[Order] = []
        for peer, waiting in self._waiting.items():
            free = most - self._active_to[peer]
            if free > 0 and is_ready(peer):
                found += islice(filter(is_written, waiting), free)
        for order in found:
            self._begin(order)
        return found

    def _begin(self, order: Order) -> None:
        waiting = self._waiting[order.to]
        del waiting[order]
        if not waiting:
            del self._waiting[order.to]
        self._active[order] = None
        self._active_to[order.to] += 1

    def end(self, order: Order) -> None:
        """Forget an active order."""
        del self._active[order]
        self._active_to[order.to] -= 1
        if not self._active_to[order.to]:
            del self._active_to[order.to]
        of_room = self._of_room[order.key]
        del of_room[order]
        if not of_room:
            del self._of_room[order.key]

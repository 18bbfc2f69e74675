"""The orders of one rank: each waits for its peer, becomes transfers, and is answered when nothing of it is in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

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
from kvbridge.worker.paths import Target
from kvbridge.worker.peers import ConnectedPeer
from kvbridge.worker.rank import contained

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
    """Why nothing of it can be sent, when its tables were malformed."""

    @classmethod
    def of(cls, opening: OpenRoom) -> OpenedRoom:
        """Read the tables of a room; when they are malformed, each of its orders fails with that."""
        try:
            return cls(opening, tables_from_wire(opening.source), tables_from_wire(opening.destination))
        except BridgeError as error:
            log.error("room_not_opened", room=opening.room, code=error.code, reason=str(error))
            return cls(opening, {}, {}, error)

    @property
    def key(self) -> RoomKey:
        """The attempt that it is."""
        return self.opening.room, self.opening.generation

    def grown(self, more: tuple[WireTable, ...]) -> OpenedRoom:
        """Return the same room with further source pages. Those of orders that have begun stay as they are."""
        try:
            return replace(self, source=joined_tables(self.source, tables_from_wire(more)))
        except BridgeError as error:
            return replace(self, error=error)


@dataclass(eq=False)
class Part:
    """What goes to one rank of the peer by one path."""

    ordinal: int
    target: Target
    operations: Operations
    transfer: Transfer
    ended: bool = False


@dataclass(frozen=True, eq=False)
class Loss:
    """What a path has not confirmed of a part, and why it failed."""

    part: Part
    operations: Operations
    in_transit: bool
    error: str


@dataclass(eq=False)
class Order:
    """One `Send`. It is over when nothing of it is in flight."""

    request: Send
    received_s: float
    peer: ConnectedPeer | None = None
    """Where it goes, once it has been started."""
    amounts: Amounts = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    """What is to be sent again by another path, or to fail the order."""
    lost: list[str] = field(default_factory=list)
    """Why paths were left that others have taken the place of."""
    error_code: str = ""
    error: str = ""
    in_transit: bool = False
    """Something was sent whose arrival was never confirmed."""
    not_quiet: set[Transport] = field(default_factory=set)
    """Transports that failed it and may still read or send until they are closed."""
    digests: DigestWork | None = None
    """What is still to be computed over what it sends."""
    digest_parts: tuple[tuple[PageDigests, ...], ...] = ()
    """What has been computed, in messages' sizes."""
    reported: bool = False

    @property
    def key(self) -> RoomKey:
        """The attempt that it belongs to."""
        return self.request.room, self.request.generation

    def fail(self, code: str, reason: str) -> None:
        """Keep the first cause and submit nothing further; what is in flight ends as after a failure."""
        if not self.error_code:
            self.error_code, self.error = code, reason[:REASON_CHARS]
        self.digests = None
        self.losses.clear()
        for part in self.parts:
            self._abort(part, reason)

    def _abort(self, part: Part, reason: str) -> None:
        """Stop a transfer. One that does not take the word goes on, and the order waits for its end."""
        try:
            with self._contained(f"{part.target.transport.name}: aborting a transfer"):
                part.transfer.abort(reason)
        except BridgeError as error:
            log.error("transfer_not_aborted", room=self.request.room, order=self.request.order, reason=str(error))

    def start(self, room: OpenedRoom, peer: ConnectedPeer, *, timeout_s: float, clock: Clock) -> None:
        """Plan and submit to every rank of the peer. A failure of either is the order's, and nobody else's."""
        self.peer = peer
        begun_s = clock()
        if room.error is not None:
            self.fail(room.error.code, f"the room cannot be opened: {room.error}")
            return
        try:
            with self._contained("planning"):
                planned = self._plan(room, peer)
            planned_s = clock()
            self.seconds["plan"] = planned_s - begun_s
            for ordinal, target, operations in planned:
                self._submit(ordinal, target, operations, timeout_s)
            self.seconds["submit"] = clock() - planned_s
        except BridgeError as error:
            self.fail(error.code, str(error))
        self.seconds["first_byte"] = clock() - self.received_s

    def _contained(self, work: str) -> AbstractContextManager[None]:
        return contained(work, room=self.request.room, order=self.request.order)

    def _submit(self, ordinal: int, target: Target, operations: Operations, timeout_s: float) -> None:
        """Begin to send. After a defect there nobody knows whether something was sent, so the transport does not count as quiet."""
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

    def send_again(self, loss: Loss, target: Target, *, timeout_s: float) -> None:
        """Send by another path what one has not confirmed: the same bytes into the same pages, leased until all is over."""
        self.losses.remove(loss)
        self.lost.append(f"{loss.part.target.transport.name}: {loss.error}")
        try:
            operations = loss.operations.cut(target.transport.max_operation_bytes)
            self._submit(loss.part.ordinal, target, operations, timeout_s)
        except BridgeError as error:
            self.fail(error.code, str(error))

    def _plan(self, room: OpenedRoom, peer: ConnectedPeer) -> list[tuple[int, Target, Operations]]:
        """Plan for every rank before anything is submitted, so that bad tables move nothing at all."""
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

    def begin_digests(self, geometry: ModelGeometry, room: OpenedRoom) -> None:
        """Get ready to compute the digests that the room asks for, now that its bytes are on their way."""
        if self.error_code or self.peer is None or room.opening.digest is DigestKind.NONE:
            return
        section = self.request.section
        try:
            with self._contained("the digest"):
                groups = sent_groups([target.pairing for target in self.peer.targets], section.layers)
                self.digests = DigestWork(geometry, groups, section, room.source, room.destination)
        except BridgeError as error:
            self.fail(error.code, str(error))

    def digest_some(self, clock: Clock) -> None:
        """Compute one slice of the digests. A failure is the order's."""
        if self.digests is None:
            return
        begun_s = clock()
        try:
            with self._contained("the digest"):
                if self.digests.step():
                    self.digest_parts, self.digests = tuple(self.digests.sums.parts()), None
        except BridgeError as error:
            self.fail(error.code, str(error))
            return
        self.seconds["digest"] = self.seconds.get("digest", 0.0) + clock() - begun_s

    def poll(self) -> None:
        """Push the transfers forward. See `losses` for what those that have ended did not bring over."""
        for part in self.parts:
            if part.ended:
                continue
            status = self._status(part)
            part.ended = status.state.terminal
            if part.ended and status.state is not TransferState.DONE:
                self._note_loss(part, status)

    def _status(self, part: Part) -> TransferStatus:
        """How a transfer stands. One that cannot be asked may do anything until its transport is closed."""
        try:
            with self._contained(f"{part.target.transport.name}: a transfer"):
                return part.transfer.poll()
        except BridgeError as error:
            return TransferStatus(TransferState.FAILED_NOT_QUIET, str(error), in_transit=True)

    def _note_loss(self, part: Part, status: TransferStatus) -> None:
        not_quiet = status.state is TransferState.FAILED_NOT_QUIET
        in_transit = status.in_transit or not_quiet
        self.in_transit = self.in_transit or in_transit
        if not_quiet:
            self.not_quiet.add(part.target.transport)
        self.losses.append(Loss(part, part.operations.taken(status.unconfirmed), in_transit, status.error))

    def fail_by(self, loss: Loss) -> None:
        """There is no path left for what has not been confirmed."""
        before = "".join(f"; before that, {error}" for error in reversed(self.lost))
        self.fail(TransportError.code, f"{loss.part.target.transport.name}: {loss.error}{before}")

    def uses(self, used: Transport | Target | ConnectedPeer) -> bool:
        """Whether a transport or a path still works on it, or a peer may; what would not become quiet does not count."""
        if used is self.peer:
            return True
        return any(used in {part.target, part.target.transport} and not part.ended for part in self.parts)

    def lose(self, transport: Transport) -> None:
        """A transport that had failed it has been closed: nothing of it reads or sends any more."""
        self.parts = [part for part in self.parts if part.target.transport is not transport]
        self.not_quiet.discard(transport)

    def report(self, rank: Rank) -> list[Digested | Sent]:
        """What the node is told of how it ended: digests first."""
        request = self.request
        room, generation, number = request.room, request.generation, request.order
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
    """Each order waits, then is active, then has ended. Used by one thread."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[Order, None]] = {}
        """By peer, in the order in which they came; no peer without one."""
        self._active: dict[Order, None] = {}
        self._active_to: Counter[str] = Counter()
        self._peer_of: dict[Order, str] = {}
        self._of_room: dict[RoomKey, dict[Order, None]] = {}

    def __len__(self) -> int:
        return len(self._peer_of)

    @property
    def waiting(self) -> int:
        """Count the orders that wait."""
        return len(self._peer_of) - len(self._active)

    @property
    def active(self) -> Collection[Order]:
        """Return the orders that have begun, the first one first."""
        return self._active.keys()

    def of_room(self, key: RoomKey) -> Collection[Order]:
        """Return the orders of a room."""
        return self._of_room.get(key, {}).keys()

    def waiting_for(self, peer: str) -> Collection[Order]:
        """Return the orders that wait for a peer."""
        return self._waiting.get(peer, {}).keys()

    def add(self, order: Order, peer: str) -> None:
        """Let an order wait for its peer."""
        self._peer_of[order] = peer
        self._of_room.setdefault(order.key, {})[order] = None
        self._waiting.setdefault(peer, {})[order] = None

    def fail(self, order: Order, code: str, reason: str) -> None:
        """Fail an order. One that waits is active at once: nothing is in flight of it, so it ends with the next look."""
        order.fail(code, reason)
        if order not in self._active:
            self._begin(order)

    def begin(self, most: int, *, is_ready: Callable[[str], bool], is_written: Callable[[Order], bool]) -> list[Order]:
        """Return the orders that begin now: at most `most` to a peer are active, in the order in which they came.

        Orders of one peer whose memory `is_written` overtake those whose memory is not yet.
        """
        found: list[Order] = []
        for peer, waiting in self._waiting.items():
            free = most - self._active_to[peer]
            if free <= 0 or not is_ready(peer):
                continue
            chosen = []
            for order in waiting:
                if is_written(order):
                    chosen.append(order)
                    if len(chosen) == free:
                        break
            found += chosen
        for order in found:
            self._begin(order)
        return found

    def _begin(self, order: Order) -> None:
        peer = self._peer_of[order]
        del self._waiting[peer][order]
        if not self._waiting[peer]:
            del self._waiting[peer]
        self._active[order] = None
        self._active_to[peer] += 1

    def end(self, order: Order) -> None:
        """Forget an active order."""
        del self._active[order]
        peer = self._peer_of.pop(order)
        self._active_to[peer] -= 1
        if not self._active_to[peer]:
            del self._active_to[peer]
        of_room = self._of_room[order.key]
        del of_room[order]
        if not of_room:
            del self._of_room[order.key]

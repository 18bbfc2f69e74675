"""One order of the node: from the section to the transfers that move it, to how it ended.

Owns: an order's facts, planning and submitting it, asking after its transfers. Must not know: the link to the node,
which orders run when, how a transport is rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.ids import Rank, Tables
from kvbridge.core.plan.digests import DigestKind, PageDigests, sent_groups
from kvbridge.core.plan.operations import Amounts, Operations, add_amounts
from kvbridge.core.plan.planner import plan
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.core.wire.worker_messages import Digested, OpenRoom, Send, Sent
from kvbridge.transport.base import Transfer, TransferState, Transport
from kvbridge.worker.digests import DigestWork
from kvbridge.worker.peers import ConnectedPeer, Target

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


@dataclass(eq=False)
class Order:
    """One `Send`. It is over when nothing of it is in flight."""

    request: Send
    received_s: float
    peer: ConnectedPeer | None = None
    """Where it goes, once it has been started."""
    amounts: Amounts = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    transfers: list[tuple[Transport, Transfer]] = field(default_factory=list)
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
        for _, transfer in self.transfers:
            transfer.abort(reason)

    def start(self, room: OpenedRoom, peer: ConnectedPeer, *, timeout_s: float, clock: Clock) -> None:
        """Plan and submit to every rank of the peer. A failure of either is the order's, and nobody else's."""
        self.peer = peer
        begun_s = clock()
        try:
            planned = self._plan(room, peer)
            planned_s = clock()
            self.seconds["plan"] = planned_s - begun_s
            for target, operations in planned:
                transfer = target.transport.submit(target.peer, operations, deadline_s=timeout_s)
                self.transfers.append((target.transport, transfer))
            self.seconds["submit"] = clock() - planned_s
        except BridgeError as error:
            self.fail(error.code, str(error))
        self.seconds["first_byte"] = clock() - self.received_s

    def _plan(self, room: OpenedRoom, peer: ConnectedPeer) -> list[tuple[Target, Operations]]:
        """Plan for every rank before anything is submitted, so that bad tables move nothing at all."""
        planned = []
        try:
            for target in peer.targets:
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
                    planned.append((target, part.operations))
        except BridgeError:
            raise
        except Exception as error:  # planning is pure: one room's defect must not end the rank's other rooms
            log.exception("planning_failed", room=self.request.room, order=self.request.order)
            raise BridgeError(f"planning failed with {type(error).__name__}: {error}; please report it") from error
        return planned

    def begin_digests(self, geometry: ModelGeometry, room: OpenedRoom) -> None:
        """Get ready to compute the digests that the room asks for, now that its bytes are on their way."""
        if self.error_code or self.peer is None or room.opening.digest is DigestKind.NONE:
            return
        section = self.request.section
        groups = sent_groups([target.pairing for target in self.peer.targets], section.layers)
        self.digests = DigestWork(geometry, groups, section, room.source, room.destination)

    def digest_some(self, clock: Clock) -> None:
        """Compute one slice of the digests. A failure is the order's."""
        if self.digests is None:
            return
        begun_s = clock()
        try:
            done = self.digests.step()
        except BridgeError as error:
            self.fail(error.code, str(error))
            return
        self.seconds["digest"] = self.seconds.get("digest", 0.0) + clock() - begun_s
        if done:
            self.digest_parts, self.digests = tuple(self.digests.sums.parts()), None

    def poll(self) -> bool:
        """Push the transfers forward; whether all of them are terminal. See `not_quiet` for those that are not quiet."""
        ended = True
        for transport, transfer in self.transfers:
            status = transfer.poll()
            if not status.state.terminal:
                ended = False
            elif status.state is not TransferState.DONE:
                self.fail(TransportError.code, f"{transport.name}: {status.error}")
                self.in_transit = self.in_transit or status.in_transit
                if status.state is TransferState.FAILED_NOT_QUIET:
                    self.in_transit = True
                    self.not_quiet.add(transport)
        return ended

    def uses(self, transport: Transport) -> bool:
        """Whether a transport still works on it; one that would not become quiet does not count."""
        return any(used is transport and not transfer.poll().state.terminal for used, transfer in self.transfers)

    def lose(self, transport: Transport) -> None:
        """A transport that had failed it has been closed: nothing of it reads or sends any more."""
        self.transfers = [(used, transfer) for used, transfer in self.transfers if used is not transport]
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

"""The fence of a decode node: it shuts out writers that give no proof of having stopped.

Bytes that a writer has sent may still lie in a buffer on the way, the kernel of this machine included, and no library can take them
back: they end where the endpoint that they go to is closed. A round is:

    renewing    every rank builds new endpoints beside the old ones; peers are told of them
    waiting     rooms that were offered before write on by the old ones and end in peace, up to `timeouts.fence_s`
    revoking    every rank closes what belonged to the old endpoints, and says when nobody can write by them any more

A room whose writers have failed asks for all endpoints (`ask`). A room that goes on over another transport asks for those of the
lost one (`ask_path`), and a round for such rooms alone leaves the other transports as they are.

A room that asks during a round waits for the next one: its writer may already use the new endpoints. Exception: the round shuts
the very endpoint that the room has lost. A round waits for each rank without a limit of its own: the node ends a rank worker that
hangs, and its successor answers in its place. A round does not wait for a rank without a worker, which has nothing to close: an
engine may have closed that worker for good.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import structlog

from kvbridge.api.status import FenceStatus
from kvbridge.core.ids import Rank
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.worker_messages import RenewEndpoints, RevokeEndpoints
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.book import Owner
from kvbridge.telemetry.facts import EventStream, FenceBegan, WritersShutOut

if TYPE_CHECKING:
    from kvbridge.node.decode.writers import WrittenRooms

log = structlog.get_logger(__name__)

ALL: frozenset[str] = frozenset()
"""Every transport."""


class FencePhase(StrEnum):
    """The phase of a round."""

    IDLE = "idle"
    RENEWING = "renewing"
    WAITING = "waiting"
    REVOKING = "revoking"


class Fence:
    """The rounds of one decode node, one at a time. Called from the event loop's thread only."""

    rooms: WrittenRooms
    """Set before a room asks."""

    def __init__(self, workers: WorkerSet, events: EventStream, *, fence_s: float, clock: Clock = monotonic) -> None:
        """`fence_s`: `timeouts.fence_s`."""
        self._workers, self._events, self._fence_s, self._clock = workers, events, fence_s, clock
        self.epoch = 0
        """The epoch of the endpoints that rank workers are to give out."""
        self.phase = FencePhase.IDLE
        self._next: dict[Owner, frozenset[str]] = {}
        """The rooms of the next round, and the transports that each wants shut: `ALL`, or some."""
        self._served: dict[Owner, frozenset[str]] = {}
        self._transports = ALL
        """The transports of the present round."""
        self._shut: dict[str, int] = {}
        """For each transport, the epoch before which its endpoints are shut; under "", for all transports."""
        self._missing: set[Rank] = set()
        """Ranks that have not answered in this phase."""
        self._earlier: set[Owner] = set()
        """Rooms that are written by the old endpoints until they end or `_until_s` has come."""
        self._until_s = 0.0

    def ask(self, owner: Owner) -> None:
        """Shut out all writers of a room. Harmless when it has been asked for."""
        if self._served.get(owner) == ALL:
            return
        self._next[owner] = ALL
        if self.phase is FencePhase.IDLE:
            self._begin()

    def ask_path(self, owner: Owner, transport: str, epoch: int) -> bool:
        """Shut the endpoint, of this epoch, of a transport that a writer of a room has lost; return whether it was still open."""
        if epoch < max(self._shut.get(transport, 0), self._shut.get("", 0)):
            return False
        under_way = self.phase is not FencePhase.IDLE and epoch < self.epoch
        if under_way and (self._transports == ALL or transport in self._transports):
            self._served[owner] = _joined(self._served.get(owner), transport)
            self._earlier -= self._left_by()
            return True
        self._next[owner] = _joined(self._next.get(owner), transport)
        if self.phase is FencePhase.IDLE:
            self._begin()
        return True

    def ready(self, rank: Rank, epoch: int) -> None:
        """Note that a rank worker gives out endpoints of `epoch`; a successor of a worker says so too."""
        if epoch < self.epoch:
            return
        if self.phase is FencePhase.RENEWING:
            self._missing.discard(rank)
            self._all_said()
        elif self.phase is FencePhase.REVOKING and rank in self._missing:
            self._workers.send(rank, self._revocation())

    def revoked(self, rank: Rank, before_epoch: int) -> None:
        """Note that a rank has closed its endpoints of epochs earlier than `before_epoch`."""
        if self.phase is not FencePhase.REVOKING or before_epoch < self.epoch:
            return
        self._missing.discard(rank)
        self._all_said()

    def tick(self) -> None:
        """Go on without ranks that are gone, and when rooms that are written by the old endpoints have ended or had their time."""
        self._missing = {rank for rank in self._missing if self._workers.has_endpoints(rank)}
        if self.phase is FencePhase.WAITING:
            self._earlier &= self.rooms.open_offers()
            is_late = self._clock() >= self._until_s
            if self._earlier and is_late:
                log.warning("fence_cuts_rooms_off", rooms=len(self._earlier), limit="timeouts.fence_s")
            if is_late or not self._earlier:
                self._enter(FencePhase.REVOKING, self._revocation())
        else:
            self._all_said()

    def _all_said(self) -> None:
        """Go on to the next phase when no rank's answer is missing any more."""
        if self._missing:
            return
        if self.phase is FencePhase.RENEWING:
            self.phase, self._earlier = FencePhase.WAITING, self.rooms.open_offers() - self._left_by()
            self._until_s = self._clock() + self._fence_s
            self.tick()
        elif self.phase is FencePhase.REVOKING:
            self._end()

    def status(self) -> FenceStatus:
        """Return the phase and the rooms, for `/status`."""
        return FenceStatus(
            epoch=self.epoch,
            phase=self.phase,
            rooms=tuple(map(str, sorted(self._served.keys() | self._next.keys()))),
            waits_for_rooms=len(self._earlier),
            waits_for_ranks=tuple(sorted(map(str, self._missing))),
            transports=tuple(sorted(self._transports)),
        )

    def _left_by(self) -> set[Owner]:
        """Return the rooms that go on over transports which the round leaves alone."""
        if self._transports == ALL:
            return set()
        return {owner for owner, lost in self._served.items() if lost >= self._transports}

    def _revocation(self) -> RevokeEndpoints:
        return RevokeEndpoints(before_epoch=self.epoch, transports=tuple(sorted(self._transports)))

    def _begin(self) -> None:
        self._served, self._next = self._next, {}
        wanted = self._served.values()
        self._transports = ALL if ALL in wanted else frozenset().union(*wanted)
        self.epoch += 1
        self._events.emit(FenceBegan(epoch=self.epoch, rooms=len(self._served)))
        renewal = RenewEndpoints(epoch=self.epoch, transports=tuple(sorted(self._transports)))
        self._enter(FencePhase.RENEWING, renewal)

    def _enter(self, phase: FencePhase, order: RenewEndpoints | RevokeEndpoints) -> None:
        self.phase, self._missing, self._earlier = phase, set(self._workers.layers), set()
        for rank in self._workers.layers:
            self._workers.send(rank, order)

    def _end(self) -> None:
        served, self._served, self.phase = self._served, {}, FencePhase.IDLE
        self._shut |= dict.fromkeys(self._transports or {""}, self.epoch)
        self._transports = ALL
        self._events.emit(WritersShutOut(epoch=self.epoch, rooms=len(served)))
        self.rooms.shut({owner: lost for owner, lost in served.items() if owner not in self._next})
        if self._next and self.phase is FencePhase.IDLE:
            self._begin()


def _joined(wanted: frozenset[str] | None, transport: str) -> frozenset[str]:
    return ALL if wanted == ALL else (wanted or frozenset()) | {transport}

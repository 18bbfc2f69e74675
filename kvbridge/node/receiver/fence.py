"""How a decode node shuts out writers that give no proof of having stopped.

Owns: the epoch of the node's endpoints, and the rounds that end an epoch. Must not know: rooms (they ask, and are told),
transports, time but by its clock.

What a writer has sent may still lie in a buffer on the way, the kernel of this machine included, and no library can take it back:
it ends where the endpoint that it goes to is closed. A round is:

    renewing    every rank builds new endpoints beside the old ones; peers are told of them
    waiting     rooms that were offered before write on by the old ones and end in peace, up to `timeouts.fence_s`
    revoking    every rank closes what belonged to the old endpoints, and says when nobody can write by them any more

Rooms that ask while a round is under way are served by the next one, since what they fear may use the new endpoints. A
round waits for each rank without a limit of its own: a rank worker that hangs is ended by its node, and its successor
answers in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum
from typing import Protocol

import structlog

from kvbridge.api.status import FenceStatus
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.ids import Rank
from kvbridge.core.wire.worker_messages import NodeToWorker, RenewEndpoints, RevokeEndpoints
from kvbridge.pool.accounts.page_states import Owner
from kvbridge.telemetry.events import FenceBegan, WritersShutOut
from kvbridge.telemetry.stream import EventStream

log = structlog.get_logger(__name__)


class FencePhase(StrEnum):
    """Where a round stands."""

    IDLE = "idle"
    RENEWING = "renewing"
    WAITING = "waiting"
    REVOKING = "revoking"


class FencedRooms(Protocol):
    """The rooms of the node, as the fence needs them."""

    def open_offers(self) -> set[Owner]:
        """Rooms that are being written to."""

    def shut(self, owners: Collection[Owner]) -> None:
        """A round has ended: whoever wrote to these rooms cannot reach this node any more."""


class Fence:
    """The rounds of one decode node, one at a time. Called from the event loop's thread only."""

    def __init__(
        self,
        ranks: Iterable[Rank],
        *,
        send: Callable[[Rank, NodeToWorker], None],
        events: EventStream,
        fence_s: float,
        clock: Clock = monotonic,
    ) -> None:
        self._ranks = frozenset(ranks)
        self._send = send
        self._rooms: FencedRooms
        self._events = events
        self._fence_s = fence_s
        self._clock = clock
        self.epoch = 0
        """Of the endpoints that rank workers are to give out."""
        self.phase = FencePhase.IDLE
        self._next: set[Owner] = set()
        self._served: set[Owner] = set()
        self._missing: set[Rank] = set()
        """Ranks that have not answered in this phase."""
        self._earlier: set[Owner] = set()
        """Rooms that may write by the old endpoints until they end or `_until_s` has come."""
        self._until_s = 0.0

    def __repr__(self) -> str:
        return f"<Fence epoch {self.epoch}: {self.phase}, {len(self._served)} rooms served, {len(self._next)} wait>"

    def watch(self, rooms: FencedRooms) -> None:
        """Say whose writers are shut out; before anybody asks."""
        self._rooms = rooms

    def ask(self, owner: Owner) -> None:
        """Shut out whoever wrote to a room. Harmless when it has been asked for."""
        if owner in self._served:
            return
        self._next.add(owner)
        if self.phase is FencePhase.IDLE:
            self._begin()

    def ready(self, rank: Rank, epoch: int) -> None:
        """A rank worker gives out endpoints of `epoch`; a worker that took another's place says so too."""
        if epoch < self.epoch:
            return
        if self.phase is FencePhase.RENEWING:
            self._missing.discard(rank)
            if not self._missing:
                self._wait()
        elif self.phase is FencePhase.REVOKING and rank in self._missing:
            self._send(rank, RevokeEndpoints(before_epoch=self.epoch))

    def revoked(self, rank: Rank, before_epoch: int) -> None:
        """Nobody can write to a rank any more by an endpoint of an epoch earlier than `before_epoch`."""
        if self.phase is not FencePhase.REVOKING or before_epoch < self.epoch:
            return
        self._missing.discard(rank)
        if not self._missing:
            self._end()

    def tick(self) -> None:
        """Look whether the rooms that write by the old endpoints have ended, or had their time."""
        if self.phase is not FencePhase.WAITING:
            return
        self._earlier &= self._rooms.open_offers()
        if self._earlier and self._clock() < self._until_s:
            return
        if self._earlier:
            log.warning("fence_cuts_rooms_off", rooms=len(self._earlier), limit="timeouts.fence_s")
        self._revoke()

    def status(self) -> FenceStatus:
        """For `/status`."""
        return FenceStatus(
            epoch=self.epoch,
            phase=self.phase,
            rooms=tuple(map(str, sorted(self._served | self._next))),
            waits_for_rooms=len(self._earlier),
            waits_for_ranks=tuple(sorted(map(str, self._missing))),
        )

    def _begin(self) -> None:
        self._served, self._next = self._next, set()
        self.epoch += 1
        self._events.emit(FenceBegan(epoch=self.epoch, rooms=len(self._served)))
        self.phase, self._missing = FencePhase.RENEWING, set(self._ranks)
        for rank in self._ranks:
            self._send(rank, RenewEndpoints(epoch=self.epoch))

    def _wait(self) -> None:
        self.phase, self._earlier = FencePhase.WAITING, self._rooms.open_offers()
        self._until_s = self._clock() + self._fence_s
        self.tick()

    def _revoke(self) -> None:
        self.phase, self._missing, self._earlier = FencePhase.REVOKING, set(self._ranks), set()
        for rank in self._ranks:
            self._send(rank, RevokeEndpoints(before_epoch=self.epoch))

    def _end(self) -> None:
        served, self._served, self.phase = self._served, set(), FencePhase.IDLE
        self._events.emit(WritersShutOut(epoch=self.epoch, rooms=len(served)))
        self._rooms.shut(served)
        if self._next and self.phase is FencePhase.IDLE:
            self._begin()

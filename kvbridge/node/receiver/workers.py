"""What the rank workers of a decode node say about its rooms: what they find in their memory, and that they are gone."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, CapacityError, DigestMismatchError
from kvbridge.core.ids import Rank
from kvbridge.core.session.receiver import ReceiverEvent, ReceiverState
from kvbridge.core.wire.worker_messages import Digested, Verified
from kvbridge.node.driver import WORKER_GONE, RoomDriver
from kvbridge.node.hearing import RoomHearing
from kvbridge.node.receiver.peers import RoomWriters
from kvbridge.node.receiver.prefix_checks import PrefixChecks
from kvbridge.node.receiver.room import ARRIVED, BEFORE_COMMIT, ReceiverRoom
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.room import slowest
from kvbridge.node.room_book import RoomBook
from kvbridge.telemetry.events import PagesDiffer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ReceiverWorkers:
    """Called from the event loop's thread only."""

    rooms: RoomBook[ReceiverRoom]
    driver: RoomDriver[ReceiverRoom]
    hearing: RoomHearing[ReceiverRoom]
    writers: RoomWriters
    checks: PrefixChecks
    clock: Clock

    def digested(self, message: Digested) -> None:
        """A rank of this node has found this in its memory."""
        if message.order:
            self.checks.digested(message)
            return
        room, verification = self._verifying(message)
        if room is None or verification is None:
            return
        try:
            verification.find(message)
        except BridgeError as error:
            why = f"rank worker {message.rank} reports what the room does not have: {error}"
            self.driver.fail(room, error.code, why)

    def verified(self, message: Verified) -> None:
        """A rank of this node has looked at everything, or could not. When all have, the room goes on or fails."""
        if message.order:
            self._looked(message)
            return
        room, verification = self._verifying(message)
        if room is None or verification is None:
            return
        if message.error_code:
            why = f"rank worker {message.rank} could not verify what has arrived: {message.error}"
            self.driver.fail(room, message.error_code, why)
            return
        slowest(room.phases_s, message.seconds)
        if not verification.answered(message.rank):
            return
        differing, why = verification.differences(room.tables)
        if not differing:
            self.driver.advance(room, ReceiverEvent.VERIFIED)
            return
        for kind, pages in differing.items():
            self.driver.facts.events.emit(PagesDiffer(**room.identity, component=kind, pages=pages))
        self.driver.fail(room, DigestMismatchError.code, why)

    def _looked(self, message: Verified) -> None:
        """Ranks have looked at cached pages: a room that waited for it goes on with those that are as they were."""
        look = self.checks.verified(message)
        if look is None:
            return
        room, why = look.room, f"rank worker {message.rank} could not verify cached pages: {message.error}"
        waits = look.on_hit and room.state is ReceiverState.RESERVED
        try:
            whole = self.checks.judge(look) if not message.error_code else 0
            if waits and not message.error_code:
                self._share(room, whole)
            elif waits:
                self.driver.fail(room, message.error_code, why)
            elif message.error_code:
                log.warning("cached_pages_not_verified", **room.identity, reason=why)
        finally:
            self.checks.end(look)

    def _share(self, room: ReceiverRoom, whole: int) -> None:
        """A room that waited shares so many pages, and is sent the others."""
        pages = self.checks.pages
        if whole < room.pages_in_place:
            try:
                pages.give_up_prefix(room, whole)
            except CapacityError as error:
                why = f"cached pages of its prompt have changed in memory, and there are no others for them: {error}"
                self.driver.fail(room, error.code, why)
                return
        room.unchecked = False
        room.wait_until(self.clock() + pages.settings.limits.handshake_s, "timeouts.handshake_s")
        self.writers.find(room)

    def _verifying(self, message: Digested | Verified) -> tuple[ReceiverRoom | None, Verification | None]:
        """The room that a rank speaks of, unless there is nothing to be done about it."""
        room, meaning = self.hearing.look_up("", message, kind=message.type)
        if room is None or meaning is None:
            return None, None
        return room, room.verification

    def gone(self, rank: Rank, reason: str, *, memory_lost: bool = False) -> None:
        """A rank worker of this node died: nothing can arrive through it, so rooms under way fail.

        `memory_lost`: the device memory was its own, so rooms that have arrived fail as well.
        """
        self.checks.gone(rank)
        failing = BEFORE_COMMIT | ARRIVED if memory_lost else BEFORE_COMMIT
        for room in self.rooms:
            if room.state in failing:
                why = f"rank worker {rank} of the decode node died: {reason}"
                self.driver.fail(room, WORKER_GONE, why)

"""What the rank workers of a decode node say about its rooms: what they find in their memory, and that they are gone."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.errors import BridgeError, DigestMismatchError
from kvbridge.core.ids import Rank
from kvbridge.core.session.receiver import ReceiverEvent
from kvbridge.core.wire.worker_messages import Digested, Verified
from kvbridge.node.driver import WORKER_GONE, RoomDriver
from kvbridge.node.hearing import RoomHearing
from kvbridge.node.receiver.room import ARRIVED, BEFORE_COMMIT, ReceiverRoom
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.room import slowest
from kvbridge.node.room_book import RoomBook
from kvbridge.telemetry.events import PagesDiffer


@dataclass(frozen=True, slots=True)
class ReceiverWorkers:
    """Called from the event loop's thread only."""

    rooms: RoomBook[ReceiverRoom]
    driver: RoomDriver[ReceiverRoom]
    hearing: RoomHearing[ReceiverRoom]

    def digested(self, message: Digested) -> None:
        """A rank of this node has found this in its memory."""
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
        failing = BEFORE_COMMIT | ARRIVED if memory_lost else BEFORE_COMMIT
        for room in self.rooms:
            if room.state in failing:
                why = f"rank worker {rank} of the decode node died: {reason}"
                self.driver.fail(room, WORKER_GONE, why)

"""What a prefill node makes of its table: the actions are carried out here, the facts amount to events here.

Source pages go back when two things are true: the table says that nothing of the room is in flight (FREE_SOURCE), and
no engine that has begun the room still writes pages of ours (it said finish or abort, or its process has ended).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvbridge.core.clock import Clock
from kvbridge.core.session.sender import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from kvbridge.core.wire.messages import Drained, Failed, PeerMessage
from kvbridge.node.driver import RoomDriver
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.room import Quarantine
from kvbridge.node.room_facts import RoomFacts
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.sender.checkpoints import RoomCheckpoints
from kvbridge.node.sender.orders import Orders
from kvbridge.node.sender.room import SenderRoom

ENGINE_WORDS = {
    SenderState.COMPLETED: "completed",
    SenderState.ABORTED: "aborted",
    SenderState.FAILED: "failed",
}
"""What engines are told, by the state that the room is in."""


@dataclass(slots=True)
class SenderRules:
    """Implements RoomRules."""

    table = SENDER_TABLE
    ABORT, FAULT, OTHER_PROMPT = SenderEvent.ABORT, SenderEvent.FAULT, SenderEvent.FAULT
    facts: RoomFacts
    pages: RoomPages
    orders: Orders
    checkpoints: RoomCheckpoints
    nodes: DecodeNodes
    clock: Clock

    @staticmethod
    def next_event(room: SenderRoom) -> SenderEvent | None:
        """Look at the facts."""
        if room.state is SenderState.SENDING and room.ranks and all(work.done for work in room.ranks.values()):
            return SenderEvent.ALL_SENT
        if room.stopping and not room.open_ranks:  # every worker has proved that nothing of it is in flight
            return SenderEvent.DRAINED
        return None

    def entered(self, room: SenderRoom) -> None:
        """Begin the wait of a new state."""
        now_s, limits = self.clock(), self.pages.settings.limits
        if room.state not in {SenderState.AWAITED, SenderState.SENDING}:
            room.begin_by_s = None
        match room.state:
            case SenderState.SENDING:
                room.wait_until(now_s + limits.room_s, "timeouts.room_s")
            case SenderState.ABORTING | SenderState.FAILING:
                room.wait_until(now_s + limits.drain_s, "timeouts.drain_s")
                self.pages.expect_free(room)
            case SenderState.COMPLETED:
                room.wait_until(None)
                room.phases_s["offer_to_sent"] = now_s - room.offered_s
                self.facts.phases_ended(room, room.phases_s)
                if not any(work.after for work in room.ranks.values()):
                    room.writing.clear()  # every point that was published has been reached, or nothing would have been sent
                    for work in room.ranks.values():
                        work.written = True
            case _:
                room.wait_until(None)

    def act(self, room: SenderRoom, action: StrEnum) -> None:
        """Carry an action of the table out."""
        match action:
            case SenderAction.OPEN_ROOM:
                self.orders.open(room)
            case SenderAction.CLOSE_ROOM:
                self.orders.close(room)
            case SenderAction.TELL_FAILED:
                self._tell(
                    room,
                    Failed(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason),
                )
            case SenderAction.TELL_DRAINED:
                self._tell(room, Drained(room=room.room, generation=room.generation, in_transit=room.in_transit))
            case SenderAction.TELL_ENGINE:
                self.facts.tell_engine(room)
            case SenderAction.FREE_SOURCE:
                room.free_wanted = True

    def _tell(self, room: SenderRoom, message: PeerMessage) -> None:
        if room.peer:
            self.nodes.send(room.peer, message)

    def at_rest(self, room: SenderRoom) -> None:
        """Give the pages back once the table and every engine have let go of them; happens once."""
        if not room.free_wanted or room.concluded:
            return
        if room.writing:
            if room.deadline_s is None:
                room.wait_until(self.clock() + self.pages.settings.limits.drain_s, "timeouts.drain_s")
            return
        room.concluded = True
        room.wait_until(None)
        try:
            self.checkpoints.keep(room)
        finally:
            self.pages.give_back(room)
            room.forget_details()
            self.facts.rooms.ended(room)

    def late(self, driver: RoomDriver[SenderRoom], room: SenderRoom, limit: str) -> None:
        """The pages of a room that is being stopped stay away from everybody, and that shows."""
        if room.over:
            self.pages.quarantine_used(room, limit)
            return
        if not room.stopping:
            driver.miss(room, limit)
            return
        active = ", ".join(map(str, room.open_ranks))
        why = f"rank workers {active} have not said that they are quiet (limit: {limit})"
        self.pages.quarantine(room, Quarantine.NOT_QUIET, why)

"""What happens to one room on a prefill node once something has happened to it.

Owns: feeding `SENDER_TABLE`, carrying its actions out, and what follows from the facts alone (orders for what was
published, Done for a rank that has sent everything, the end once every worker is quiet). Must not know: who raised
the event.

Source pages go back when two things are true: the table says that nothing of the room is in flight (FREE_SOURCE), and
no engine that has begun the room still writes pages of ours (it said finish or abort, or its process has ended).
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.ids import Rank, Role
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.session.sender import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from kvbridge.core.wire.messages import Digests, Done, Drained, Failed, PeerMessage, to_wire
from kvbridge.core.wire.worker_messages import CloseRoom, OpenRoom, Send, Sent
from kvbridge.node.room import Quarantine, give_back, slowest
from kvbridge.node.rooms import Rooms, RoomSettings
from kvbridge.node.sender.room import RankWork, SenderPorts, SenderRoom, user_state
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.telemetry.events import OrderBegan, OrderEnded, RoomRejected

NOT_FINISHED = "not_finished"
"""Code of orders that ended because their room or their worker did."""


class SenderDriver(Rooms[SenderRoom]):
    """Moves the rooms of one node forward."""

    _ports: SenderPorts
    role = Role.PREFILL
    room_type = SenderRoom
    table = SENDER_TABLE
    ABORT, FAULT = SenderEvent.ABORT, SenderEvent.FAULT
    engine_words: ClassVar = {
        SenderState.COMPLETED: "completed",
        SenderState.ABORTED: "aborted",
        SenderState.FAILED: "failed",
    }

    def __init__(self, ports: SenderPorts, settings: RoomSettings, *, clock: Clock = monotonic) -> None:
        super().__init__(ports, settings, clock=clock)
        self._orders = 0

    _user_state = staticmethod(user_state)

    @staticmethod
    def _next_event(room: SenderRoom) -> SenderEvent | None:
        if room.state is SenderState.SENDING and room.ranks and all(work.done for work in room.ranks.values()):
            return SenderEvent.ALL_SENT
        if room.stopping and not room.open_ranks:  # every worker has proved that nothing of it is in flight
            return SenderEvent.DRAINED
        return None

    def _entered(self, room: SenderRoom) -> None:
        now_s = self._clock()
        if room.state is not SenderState.SENDING:
            room.begin_by_s = None
        match room.state:
            case SenderState.SENDING:
                room.wait_until(now_s + self._limits.room_s, "timeouts.room_s")
            case SenderState.ABORTING | SenderState.FAILING:
                room.wait_until(now_s + self._limits.drain_s, "timeouts.drain_s")
                if room.owner in self._ports.book:
                    self._ports.book.expect_free(room.owner)
            case SenderState.COMPLETED:
                room.wait_until(None)
                room.phases_s["offer_to_sent"] = now_s - room.offered_s
                self.phases_ended(room, room.phases_s)
                if not any(work.after for work in room.ranks.values()):
                    room.writing.clear()  # every point that was published has been reached, or nothing would have been sent
            case _:
                room.wait_until(None)

    def _act(self, room: SenderRoom, action: StrEnum) -> None:
        match action:
            case SenderAction.OPEN_ROOM:
                self._open_room(room)
            case SenderAction.CLOSE_ROOM:
                for rank in room.open_ranks:
                    self._ports.workers.send(rank, CloseRoom(room=room.room, generation=room.generation))
            case SenderAction.TELL_FAILED:
                self._tell(
                    room,
                    Failed(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason),
                )
            case SenderAction.TELL_DRAINED:
                self._tell(room, Drained(room=room.room, generation=room.generation, in_transit=room.in_transit))
            case SenderAction.TELL_ENGINE:
                self.tell_engine(room)
            case SenderAction.FREE_SOURCE:
                room.free_wanted = True

    def _tell(self, room: SenderRoom, message: PeerMessage) -> None:
        if room.peer:
            self._ports.nodes.send(room.peer, message)

    # ------------------------------------------------------------------ what follows from the facts

    def _open_room(self, room: SenderRoom) -> None:
        """Tell the workers both ends, once both are known, and order what has been published."""
        if room.state is not SenderState.SENDING or not room.tables:
            return
        if not room.open_ranks:
            opening = OpenRoom(
                room=room.room,
                generation=room.generation,
                peer=room.peer,
                prompt_tokens=room.prompt_tokens,
                prefix_tokens=room.prefix_tokens,
                source=to_wire(room.tables),
                destination=room.destination,
                digest=room.digest,
            )
            self._ports.book.move(room.owner, PageState.HELD, PageState.LEASED)
            for rank, work in room.ranks.items():
                self._ports.workers.send(rank, opening)
                work.open = True
        self.flush(room)

    def flush(self, room: SenderRoom) -> None:
        """Order what has been published and not been ordered yet."""
        if room.state is not SenderState.SENDING or not room.open_ranks:
            return
        for rank, work in room.ranks.items():
            sections = work.progress.next_sections(room.prefix_tokens)
            after = tuple(work.after)
            if sections:  # else a later order waits for them
                work.after.clear()
            for section in sections:
                self._orders += 1
                transport = self._ports.nodes.transport(room.peer, rank)
                work.order_began(self._orders, transport, self._clock())
                work.phases_s.setdefault("offer_to_order", self._clock() - room.offered_s)
                order = Send(
                    room=room.room, generation=room.generation, order=self._orders, section=section, after=after
                )
                self._ports.events.emit(OrderBegan(**room.identity, rank=rank, order=self._orders, transport=transport))
                self._ports.workers.send(rank, order)

    def order_ended(self, room: SenderRoom, rank: Rank, order: int, sent: Sent | None) -> bool:
        """An order has ended as its worker says, or with its room or its worker (None); whether it was under way."""
        transport = room.ranks[rank].order_ended(order, self._clock())
        if transport is None:
            return False
        self._ports.events.emit(
            OrderEnded(
                **room.identity,
                rank=rank,
                order=order,
                transport=transport,
                amounts=sent.amounts if sent is not None else {},
                seconds=sent.seconds if sent is not None else {},
                code=sent.error_code if sent is not None else NOT_FINISHED,
            )
        )
        return True

    def closed(self, room: SenderRoom, rank: Rank) -> None:
        """Nothing of the room is in flight on a rank, whose worker has proved it or has ended."""
        work = room.ranks[rank]
        for order in tuple(work.outstanding):
            self.order_ended(room, rank, order, None)
        work.open = False

    def settle(self, room: SenderRoom) -> None:
        """Say Done for every rank that has nothing left to do; when all have, the room is complete."""
        if room.state is not SenderState.SENDING or not room.open_ranks:
            return
        for rank, work in room.ranks.items():
            if not work.finished or work.done or work.outstanding:
                continue
            work.done = True
            room.amounts = add_amounts(room.amounts, work.amounts)
            slowest(room.phases_s, work.phases_s)
            done = Done(
                room=room.room,
                generation=room.generation,
                writer=rank,
                amounts=work.amounts,
                phases_s=work.phases_s,
                metadata=work.metadata,
                digest_parts=self._tell_digests(room, rank, work),
                transport=work.transport,
                under_way_ago_s=work.under_way_ago_s(self._clock()),
            )
            self._tell(room, done)
        self.advance(room)

    def _tell_digests(self, room: SenderRoom, rank: Rank, work: RankWork) -> int:
        """Say what a rank has sent, ahead of its Done; returns in how many parts."""
        parts = list(work.digests.parts()) if work.digests is not None else []
        for number, part in enumerate(parts):
            message = Digests(room=room.room, generation=room.generation, writer=rank, part=number, digests=part)
            self._tell(room, message)
        return len(parts)

    def rejected(self, room: SenderRoom, code: str, reason: str) -> None:
        """Keep why the decode side could not use what was sent."""
        room.blame(code, reason)
        self._ports.events.emit(RoomRejected(**room.identity, code=code, reason=room.reason))

    def _at_rest(self, room: SenderRoom) -> None:
        """Give the pages back once the table and every engine have let go of them; happens once."""
        if not room.free_wanted or room.concluded:
            return
        if room.writing:
            if room.deadline_s is None:
                room.wait_until(self._clock() + self._limits.drain_s, "timeouts.drain_s")
            return
        room.concluded = True
        room.wait_until(None)
        give_back(self._ports.book, room)
        room.forget_details()
        self.rooms.ended(room)

    def late(self, room: SenderRoom, limit: str) -> None:
        """See Rooms. The pages of a room that is being stopped stay away from everybody, and that shows."""
        if room.over:
            self.quarantine_used(room, limit)
            return
        if not room.stopping:
            self.miss(room, limit)
            return
        active = ", ".join(map(str, room.open_ranks))
        why = f"rank workers {active} have not said that they are quiet (limit: {limit})"
        self.quarantine(room, Quarantine.NOT_QUIET, why)

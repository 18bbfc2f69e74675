"""What happens to one room on a prefill node once something has happened to it.

Owns: feeding `SENDER_TABLE`, carrying its actions out, and what follows from the facts alone (orders for what was
published, Done for a rank that has sent everything, the end once every worker is quiet). Must not know: who raised
the event.

Source pages go back when two things are true: the table says that nothing of the room is in flight (FREE_SOURCE), and
no engine that has begun the room still writes pages of ours (it said finish or abort, or its process has ended).
"""

from __future__ import annotations

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.ids import Rank, Role
from kvbridge.core.plan.operations import add_amounts
from kvbridge.core.session.sender import SENDER_TABLE, SenderAction, SenderEvent, SenderState
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import Digests, Done, Drained, Failed, PeerMessage, to_wire
from kvbridge.core.wire.worker_messages import CloseRoom, OpenRoom, Send
from kvbridge.node.rooms import Quarantine, RoomBook, give_back, quarantine, quarantine_used
from kvbridge.node.sender.room import RankWork, SenderLimits, SenderPorts, SenderRoom
from kvbridge.pool.accounts.book import PageState

log = structlog.get_logger(__name__)

_BY_OTHERS = frozenset({SenderEvent.ABORT, SenderEvent.FAULT})
_EVENT_KINDS = {
    SenderState.COMPLETED: "completed",
    SenderState.ABORTED: "aborted",
    SenderState.FAILED: "failed",
}


class SenderDriver:
    """Moves the rooms of one node forward."""

    def __init__(self, ports: SenderPorts, rooms: RoomBook[SenderRoom], limits: SenderLimits, *, clock: Clock) -> None:
        self._ports = ports
        self._rooms = rooms
        self._limits = limits
        self._clock = clock
        self._orders = 0

    def raise_event(self, room: SenderRoom, event: SenderEvent, code: str = "", reason: str = "") -> None:
        """Feed the table and carry its actions out. `code` and `reason` say why, for ABORT and FAULT."""
        state, actions = SENDER_TABLE.step(room.state, event)
        entered = state is not room.state
        if entered and event in _BY_OTHERS:
            room.blame(code, reason)
            log.warning("room_ends", room=room.room, peer=room.peer, state=state, code=code, reason=room.reason)
        room.state = state
        if entered:
            self._begin_wait(room)
        for action in actions:
            self._act(room, action)
        self.show(room)
        self.end_if_quiet(room)

    def _begin_wait(self, room: SenderRoom) -> None:
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
            case _:
                room.wait_until(None)

    def _act(self, room: SenderRoom, action: SenderAction) -> None:
        match action:
            case SenderAction.OPEN_ROOM:
                self.open(room)
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
                self._tell_engine(room)
            case SenderAction.FREE_SOURCE:
                room.free_wanted = True
                self.conclude_if_unused(room)

    def show(self, room: SenderRoom) -> None:
        """Wake who waits for the room, and count a state that users see for the first time."""
        state = self._rooms.changed(room)
        if state is not None:
            self._ports.observer.room(Role.PREFILL, state, room.reason_code)

    def _tell(self, room: SenderRoom, message: PeerMessage) -> None:
        if room.peer:
            self._ports.peers.send(room.peer, message)

    def _tell_engine(self, room: SenderRoom) -> None:
        event = RoomEvent(
            room=room.room,
            generation=room.generation,
            kind=_EVENT_KINDS[room.state],
            prompt_tokens=room.prompt_tokens,
            code=room.reason_code,
            reason=room.reason,
        )
        self._ports.engines.push(event)

    # ------------------------------------------------------------------ what follows from the facts

    def open(self, room: SenderRoom) -> None:
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
                work.outstanding.add(self._orders)
                work.phases_s.setdefault("offer_to_order", self._clock() - room.offered_s)
                order = Send(
                    room=room.room, generation=room.generation, order=self._orders, section=section, after=after
                )
                self._ports.workers.send(rank, order)

    def settle(self, room: SenderRoom) -> None:
        """Say Done for every rank that has nothing left to do, and end the room when all have."""
        if room.state is not SenderState.SENDING or not room.open_ranks:
            return
        for rank, work in room.ranks.items():
            if not work.finished or work.done or work.outstanding:
                continue
            work.done = True
            room.amounts = add_amounts(room.amounts, work.amounts)
            self._ports.observer.sent(work.amounts, work.phases_s)
            done = Done(
                room=room.room,
                generation=room.generation,
                writer=rank,
                amounts=work.amounts,
                phases_s=work.phases_s,
                metadata=work.metadata,
                digest_parts=self._tell_digests(room, rank, work),
            )
            self._tell(room, done)
        if all(work.done for work in room.ranks.values()):
            room.phases_s["offer_to_sent"] = self._clock() - room.offered_s
            if not any(work.after for work in room.ranks.values()):
                room.writing.clear()  # every point that was published has been reached, or nothing would have been sent
            self.raise_event(room, SenderEvent.ALL_SENT)

    def _tell_digests(self, room: SenderRoom, rank: Rank, work: RankWork) -> int:
        """Say what a rank has sent, ahead of its Done; returns in how many parts."""
        parts = list(work.digests.parts()) if work.digests is not None else []
        for number, part in enumerate(parts):
            message = Digests(room=room.room, generation=room.generation, writer=rank, part=number, digests=part)
            self._tell(room, message)
        return len(parts)

    @staticmethod
    def rejected(room: SenderRoom, code: str, reason: str) -> None:
        """Keep why the decode side could not use what was sent."""
        room.blame(code, reason)
        log.warning("room_rejected", room=room.room, peer=room.peer, code=code, reason=room.reason)

    def end_if_quiet(self, room: SenderRoom) -> None:
        """End a room that is being stopped once every worker has proved that nothing of it is in flight."""
        if room.stopping and not room.open_ranks:
            self.raise_event(room, SenderEvent.DRAINED)

    def conclude_if_unused(self, room: SenderRoom) -> None:
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
        self._rooms.ended(room)

    def not_quiet(self, room: SenderRoom, rank: Rank, why: str) -> None:
        """A transport may still read the room's pages: they stay away from everybody until it has been torn down."""
        quarantine(self._ports.book, room, Quarantine.NOT_QUIET, f"rank {rank}: {why}")

    def overdue(self, room: SenderRoom, limit: str) -> None:
        """A room that is being stopped is not quiet in time: its pages stay away from everybody, and that shows."""
        if room.over:
            quarantine_used(self._ports.book, room, room.writing, limit)
            return
        loud = ", ".join(map(str, room.open_ranks))
        why = f"rank workers {loud} have not said that they are quiet (limit: {limit})"
        quarantine(self._ports.book, room, Quarantine.NOT_QUIET, why)

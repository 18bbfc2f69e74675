"""What happens to one room on a decode node once something has happened to it.

Owns: feeding `RECEIVER_TABLE`, carrying its actions out, and what follows from the facts alone (the offer once
everybody is met, the commit once every writer has sent what it owes, the end once nobody writes or reads).
Must not know: who raised the event.

From the offer on, pages are leased to the writers. They come back by proof only: Done from every writer with the
amounts that it owes (commit), Done or Drained from every prefill node, or the end of a node's incarnation. A node that vanished
without proof leaves its pages quarantined, counted and shown, until its successor or its own return brings the proof.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, IntegrityError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.ids import Role
from kvbridge.core.plan.accounting import shortfall
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.receiver import RECEIVER_TABLE, ReceiverAction, ReceiverEvent, ReceiverState
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import Abort, Done, Failed, Offer, to_wire
from kvbridge.node.receiver.room import ReceiverLimits, ReceiverPorts, ReceiverRoom, WriterNode
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.receiver.writers import WriterSets
from kvbridge.node.rooms import Quarantine, RoomBook, give_back, quarantine, quarantine_used
from kvbridge.pool.accounts.book import PageState

log = structlog.get_logger(__name__)

_BY_OTHERS = frozenset({ReceiverEvent.ABORT, ReceiverEvent.FAULT})
_EVENT_KINDS = {
    ReceiverState.AWAITING_PAGES: "wanted",
    ReceiverState.COMMITTED: "committed",
    ReceiverState.ABORTING_CLAIMED: "cancel",
    ReceiverState.FAILING_CLAIMED: "cancel",
    ReceiverState.COMPLETED: "completed",
    ReceiverState.ABORTED: "aborted",
    ReceiverState.FAILED: "failed",
}


class ReceiverDriver:
    """Moves the rooms of one node forward."""

    def __init__(
        self,
        ports: ReceiverPorts,
        rooms: RoomBook[ReceiverRoom],
        limits: ReceiverLimits,
        *,
        geometry: ModelGeometry,
        digest: DigestKind,
        clock: Clock,
    ) -> None:
        """`digest`: what writers are asked to compute, and our ranks do once everything has arrived."""
        self._ports = ports
        self._rooms = rooms
        self._limits = limits
        self._geometry = geometry
        self._digest = digest
        self._clock = clock
        self._writer_sets = WriterSets(geometry)

    def raise_event(self, room: ReceiverRoom, event: ReceiverEvent, code: str = "", reason: str = "") -> None:
        """Feed the table and carry its actions out. `code` and `reason` say why, for ABORT and FAULT."""
        state, actions = RECEIVER_TABLE.step(room.state, event)
        entered = state is not room.state
        if entered and event in _BY_OTHERS:
            room.blame(code, reason)
            log.warning("room_ends", room=room.room, state=state, code=code, reason=room.reason)
        room.state = state
        if entered:
            self._begin_wait(room)
        for action in actions:
            self._act(room, action)
        self.show(room)
        self.follow(room)

    def _begin_wait(self, room: ReceiverRoom) -> None:
        now_s = self._clock()
        if room.state not in {ReceiverState.RESERVED, ReceiverState.OFFERED}:
            room.begin_by_s = None
        match room.state:
            case ReceiverState.RESERVED:
                room.wait_until(now_s + self._limits.meet_s, "timeouts.meet_s")
            case ReceiverState.OFFERED:
                room.wait_until(now_s + self._limits.room_s, "timeouts.room_s")
            case ReceiverState.VERIFYING:
                room.wait_until(now_s + self._limits.verify_s, "timeouts.verify_s")
            case ReceiverState.COMMITTED:
                room.wait_until(now_s + self._limits.claim_s, "timeouts.claim_s")
            case ReceiverState.CLAIMED:
                pass  # The other engines of the node still have what is left of `claim_s`.
            case _ if room.awaits_writers or room.awaits_readers:
                room.wait_until(now_s + self._limits.drain_s, "timeouts.drain_s")
                if room.owner in self._ports.book:
                    self._ports.book.expect_free(room.owner)
            case _:
                room.wait_until(None)

    def _act(self, room: ReceiverRoom, action: ReceiverAction) -> None:
        match action:
            case ReceiverAction.MEET:
                pass  # `follow` asks for the nodes, now and whenever one of them has answered.
            case ReceiverAction.OFFER:
                self._offer(room)
            case ReceiverAction.TELL_ABORT:
                self._tell_abort(room, room.loud)
            case ReceiverAction.VERIFY:
                self._verify(room)
            case ReceiverAction.REJECT:
                self._reject(room)
            case ReceiverAction.HOLD:
                self._ports.book.move(room.owner, PageState.LEASED, PageState.HELD)
            case ReceiverAction.FREE:
                give_back(self._ports.book, room)
                room.forget_details()
                self._rooms.ended(room)
            case ReceiverAction.TELL_ENGINE:
                self.tell_engine(room)

    def show(self, room: ReceiverRoom) -> None:
        """Wake who waits for the room, and count a state that users see for the first time."""
        state = self._rooms.changed(room)
        if state is not None:
            self._ports.observer.room(Role.DECODE, state, room.reason_code)

    def tell_engine(self, room: ReceiverRoom) -> None:
        """Tell every engine where the room stands."""
        self._ports.engines.push(self.event(room))

    @staticmethod
    def event(room: ReceiverRoom) -> RoomEvent:
        """What engines are told of a room in its present state."""
        return RoomEvent(
            room=room.room,
            generation=room.generation,
            kind=_EVENT_KINDS[room.state],
            prompt_tokens=room.prompt_tokens,
            max_new_tokens=room.max_new_tokens,
            code=room.reason_code,
            reason=room.reason,
        )

    def _offer(self, room: ReceiverRoom) -> None:
        self._ports.book.move(room.owner, PageState.HELD, PageState.LEASED)
        room.offered_s = self._clock()
        room.phases_s["admit_to_offer"] = room.offered_s - room.created_s
        if self._digest is not DigestKind.NONE:
            room.verification = Verification(
                self._geometry,
                self._ports.ranks.manifests(),
                prompt_tokens=room.prompt_tokens,
                prefix_tokens=room.prefix_tokens,
            )
        offer = Offer(
            room=room.room,
            generation=room.generation,
            prompt_tokens=room.prompt_tokens,
            prefix_tokens=room.prefix_tokens,
            tables=to_wire(room.tables),
            digest=self._digest,
        )
        for peer in room.writers:
            self._ports.nodes.send(peer, offer)

    def _tell_abort(self, room: ReceiverRoom, writers: Iterable[WriterNode]) -> None:
        abort = Abort(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason)
        for writer in writers:
            if not writer.gone:
                self._ports.nodes.send(writer.node.peer, abort)

    def _reject(self, room: ReceiverRoom) -> None:
        failed = Failed(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason)
        for writer in room.writers.values():
            if not writer.gone:
                self._ports.nodes.send(writer.node.peer, failed)

    def _verify(self, room: ReceiverRoom) -> None:
        assert room.verification is not None, "ARRIVED is raised for rooms with digests only"
        for rank, order in room.verification.orders(room.room, room.generation, room.tables):
            self._ports.ranks.send(rank, order)

    # ------------------------------------------------------------------ what follows from the facts

    def follow(self, room: ReceiverRoom) -> None:
        """Raise the event that the room's facts amount to, if any."""
        if room.state is ReceiverState.RESERVED:
            self._meet(room)
        elif room.awaits_writers:
            self._end_if_quiet(room)
        elif room.released:
            self.raise_event(room, ReceiverEvent.RELEASE)

    def _meet(self, room: ReceiverRoom) -> None:
        try:
            met = [self._ports.nodes.met(address) for address in room.addresses]
            nodes = [node for node in met if node is not None]
            if len(nodes) < len(met):
                return
            room.writers = self._writer_sets.writers(nodes, self._ports.ranks.manifests())
        except BridgeError as error:
            self.raise_event(room, ReceiverEvent.FAULT, error.code, str(error))
            return
        self.raise_event(room, ReceiverEvent.MET)

    def account(self, room: ReceiverRoom, writer: WriterNode, done: Done) -> None:
        """Fail closed unless a rank reports exactly what it owes; commit or verify once every rank of every writer has."""
        reported = {kind: amount.lane_rows for kind, amount in done.amounts.items()}
        owed = writer.shares[done.writer].rows(prompt_tokens=room.prompt_tokens, prefix_tokens=room.prefix_tokens)
        wrong = shortfall(owed, reported)
        if wrong:
            why = f"rank {done.writer} of prefill node {writer.node.name} is done, but {wrong}"
            self.raise_event(room, ReceiverEvent.FAULT, IntegrityError.code, why)
            return
        if any(writer.missing for writer in room.writers.values()):
            return
        if room.verification is None:
            self.commit(room, ReceiverEvent.ALL_DONE)
        else:
            self.raise_event(room, ReceiverEvent.ARRIVED)

    def commit(self, room: ReceiverRoom, event: ReceiverEvent) -> None:
        """Everything has arrived as it was sent, which `event` says."""
        room.committed_s = self._clock()
        room.phases_s["offer_to_commit"] = room.committed_s - room.offered_s
        room.phases_s["admit_to_commit"] = room.committed_s - room.created_s
        self._ports.observer.received(room.amounts, room.phases_s)
        self.raise_event(room, event)

    def _end_if_quiet(self, room: ReceiverRoom) -> None:
        if room.loud:
            return
        unclean = next((writer for writer in room.writers.values() if not writer.clean), None)
        if unclean is None or room.shut:
            self.raise_event(room, ReceiverEvent.DRAINED)
            return
        name = unclean.node.name
        why = f"prefill node {name} is gone ({unclean.gone})" if unclean.gone else f"prefill node {name} has failed"
        why += ", and what it has sent may still arrive until every endpoint that it knows has been revoked"
        quarantine(self._ports.book, room, Quarantine.WRITER_SHUT_OUT, why)
        self._ports.fence.ask(room.owner)

    def overdue(self, room: ReceiverRoom, limit: str) -> None:
        """A room that is being stopped is still used: its pages stay away from everybody, and that shows.

        Writers that do not answer are shut out, which is the proof that they do not give; for engines there is none.
        """
        if room.awaits_readers:
            quarantine_used(self._ports.book, room, room.readers, limit)
            return
        for writer in room.loud:
            writer.gone = f"it did not answer an abort, limit: {limit}"
        self.follow(room)

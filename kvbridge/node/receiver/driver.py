"""What happens to one room on a decode node once something has happened to it.

Owns: feeding `RECEIVER_TABLE`, carrying its actions out, and what follows from the facts alone (the offer once
every writer is known, the commit once every writer has sent what it owes, the end once nobody writes or reads).
Must not know: who raised the event.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, IntegrityError
from kvbridge.core.ids import Role
from kvbridge.core.plan.accounting import shortfall
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.receiver import RECEIVER_TABLE, ReceiverAction, ReceiverEvent, ReceiverState
from kvbridge.core.wire.messages import Abort, Done, Failed, Offer, to_wire
from kvbridge.node.receiver.room import ReceiverPorts, ReceiverRoom, WriterNode, user_state
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.receiver.writers import WriterSets
from kvbridge.node.room import Quarantine, give_back
from kvbridge.node.rooms import Rooms, RoomSettings
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.telemetry.phases import PHASES
from kvbridge.telemetry.spans import COMMIT

log = structlog.get_logger(__name__)


class ReceiverDriver(Rooms[ReceiverRoom]):
    """Moves the rooms of one node forward."""

    _ports: ReceiverPorts
    role = Role.DECODE
    room_type = ReceiverRoom
    table = RECEIVER_TABLE
    ABORT, FAULT = ReceiverEvent.ABORT, ReceiverEvent.FAULT
    engine_words: ClassVar = {
        ReceiverState.AWAITING_PAGES: "wanted",
        ReceiverState.COMMITTED: "committed",
        ReceiverState.ABORTING_CLAIMED: "cancel",
        ReceiverState.FAILING_CLAIMED: "cancel",
        ReceiverState.COMPLETED: "completed",
        ReceiverState.ABORTED: "aborted",
        ReceiverState.FAILED: "failed",
    }

    def __init__(self, ports: ReceiverPorts, settings: RoomSettings, *, clock: Clock = monotonic) -> None:
        super().__init__(ports, settings, clock=clock)
        self._writer_sets = WriterSets(settings.geometry)

    _user_state = staticmethod(user_state)

    @staticmethod
    def _next_event(room: ReceiverRoom) -> ReceiverEvent | None:
        if room.state is ReceiverState.RESERVED and room.writers:
            return ReceiverEvent.WRITERS_KNOWN
        if room.awaits_writers and not room.active and (room.shut or room.clean):
            return ReceiverEvent.DRAINED
        return ReceiverEvent.RELEASE if room.released else None

    def _entered(self, room: ReceiverRoom) -> None:
        now_s = self._clock()
        if room.state not in {ReceiverState.RESERVED, ReceiverState.OFFERED}:
            room.begin_by_s = None
        match room.state:
            case ReceiverState.RESERVED:
                room.wait_until(now_s + self._limits.handshake_s, "timeouts.handshake_s")
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
        if room.over and room.claimed_s:
            self.phases_ended(room, {"claim_to_release": now_s - room.claimed_s})

    def _act(self, room: ReceiverRoom, action: StrEnum) -> None:
        match action:
            case ReceiverAction.OFFER:
                self._offer(room)
            case ReceiverAction.TELL_ABORT:
                self._tell_abort(room)
            case ReceiverAction.VERIFY:
                self._verify(room)
            case ReceiverAction.REJECT:
                self._reject(room)
            case ReceiverAction.HOLD:
                self._ports.book.move(room.owner, PageState.LEASED, PageState.HELD)
            case ReceiverAction.FREE:
                give_back(self._ports.book, room)
                room.forget_details()
                self.rooms.ended(room)
            case ReceiverAction.TELL_ENGINE:
                self.tell_engine(room)

    def _offer(self, room: ReceiverRoom) -> None:
        self._ports.book.move(room.owner, PageState.HELD, PageState.LEASED)
        room.offered_s = self._clock()
        room.phases_s["admit_to_offer"] = room.offered_s - room.created_s
        if self._settings.digest is not DigestKind.NONE:
            room.verification = Verification(
                self._geometry,
                self._ports.workers.manifests(),
                prompt_tokens=room.prompt_tokens,
                prefix_tokens=room.prefix_tokens,
            )
        offer = Offer(
            room=room.room,
            generation=room.generation,
            prompt_tokens=room.prompt_tokens,
            prefix_tokens=room.prefix_tokens,
            tables=to_wire(room.tables),
            digest=self._settings.digest,
            traceparent=room.trace.part(COMMIT).traceparent if room.trace is not None else "",
        )
        for peer in room.writers:
            self._ports.nodes.send(peer, offer)

    def _tell_abort(self, room: ReceiverRoom) -> None:
        abort = Abort(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason)
        for writer in room.active:
            self._ports.nodes.send(writer.node.peer, abort)

    def _reject(self, room: ReceiverRoom) -> None:
        failed = Failed(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason)
        for writer in room.writers.values():
            if not writer.gone:
                self._ports.nodes.send(writer.node.peer, failed)

    def _verify(self, room: ReceiverRoom) -> None:
        assert room.verification is not None, "ARRIVED is raised for rooms with digests only"
        for rank, order in room.verification.orders(room.room, room.generation, room.tables):
            self._ports.workers.send(rank, order)

    # ------------------------------------------------------------------ what follows from the facts

    def find_writers(self, room: ReceiverRoom) -> None:
        """Offer the room once every prefill node that it names is known; those that are not are said hello to."""
        if room.state is not ReceiverState.RESERVED:
            return
        try:
            found = [self._ports.nodes.known_node(address) for address in room.addresses]
            nodes = [node for node in found if node is not None]
            if len(nodes) == len(found):
                room.writers = self._writer_sets.writers(nodes, self._ports.workers.manifests())
                room.peers = tuple(node.name for node in nodes)
        except BridgeError as error:
            self.fail(room, error.code, str(error))
        else:
            self.advance(room)

    def account(self, room: ReceiverRoom, writer: WriterNode, done: Done) -> None:
        """Fail closed unless a rank reports exactly what it owes; commit or verify once every rank of every writer has."""
        reported = {kind: amount.lane_rows for kind, amount in done.amounts.items()}
        owed = writer.shares[done.writer].rows(prompt_tokens=room.prompt_tokens, prefix_tokens=room.prefix_tokens)
        wrong = shortfall(owed, reported)
        if wrong:
            why = f"rank {done.writer} of prefill node {writer.node.name} is done, but {wrong}"
            self.fail(room, IntegrityError.code, why)
            return
        if any(writer.missing for writer in room.writers.values()):
            return
        if room.verification is None:
            self.commit(room, ReceiverEvent.ALL_DONE)
        else:
            self.advance(room, ReceiverEvent.ARRIVED)

    def commit(self, room: ReceiverRoom, event: ReceiverEvent) -> None:
        """Everything has arrived as it was sent, which `event` says."""
        room.committed_s = self._clock()
        room.phases_s["offer_to_commit"] = room.committed_s - room.offered_s
        room.phases_s["admit_to_commit"] = room.committed_s - room.created_s
        own_s = {phase: seconds for phase, seconds in room.phases_s.items() if phase in PHASES[self.role]}
        self.phases_ended(room, own_s)
        self.advance(room, event)

    def _at_rest(self, room: ReceiverRoom) -> None:
        """Shut writers out that give no proof themselves."""
        if not room.awaits_writers or room.active:
            return
        unclean = next(writer for writer in room.writers.values() if not writer.clean)
        name = unclean.node.name
        why = f"prefill node {name} is gone ({unclean.gone})" if unclean.gone else f"prefill node {name} has failed"
        why += ", and what it has sent may still arrive until every endpoint that it knows has been revoked"
        self.quarantine(room, Quarantine.WRITER_SHUT_OUT, why)
        self._ports.fence.ask(room.owner)

    def late(self, room: ReceiverRoom, limit: str) -> None:
        """See Rooms. The pages of a room that is being stopped and is still used stay away from everybody, and that shows.

        Writers that do not answer are shut out, which is the proof that they do not give; for engines there is none.
        """
        if room.awaits_readers:
            self.quarantine_used(room, limit)
        elif room.awaits_writers:
            for writer in room.active:
                writer.gone = f"it did not answer an abort, limit: {limit}"
            self.advance(room)
        elif room.state is ReceiverState.CLAIMED:
            self._stop_expecting(room, limit)
        elif limit == room.begin_limit and room.state is ReceiverState.OFFERED:
            pass  # The prefill nodes know whether an engine has begun, and say Failed if none has.
        else:
            self.miss(room, limit)

    def _stop_expecting(self, room: ReceiverRoom, limit: str) -> None:
        """Engines that never claimed a room do not read it: it need not wait for them."""
        absent = room.expected_by - room.claimed_by
        if absent:
            log.warning("room_not_claimed_by_all", room=room.room, engines=sorted(absent), limit=limit)
        room.expected_by.clear()
        self.advance(room)

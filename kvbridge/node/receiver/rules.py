"""What a decode node makes of its table: the actions are carried out here, the facts amount to events here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.ids import Role
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.receiver import RECEIVER_TABLE, ReceiverAction, ReceiverEvent, ReceiverState
from kvbridge.core.wire.messages import Abort, Failed, Intend, Offer, to_wire
from kvbridge.node.driver import RoomDriver
from kvbridge.node.receiver.room import ReceiverPorts, ReceiverRoom
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.receiver.withdrawals import Withdrawals
from kvbridge.node.room import Quarantine
from kvbridge.node.room_facts import RoomFacts
from kvbridge.node.room_pages import RoomPages
from kvbridge.telemetry.phases import PHASES
from kvbridge.telemetry.spans import COMMIT
from kvbridge.tier.keys import Keys

log = structlog.get_logger(__name__)

ENGINE_WORDS = {
    ReceiverState.AWAITING_PAGES: "wanted",
    ReceiverState.INTENDED: "wanted",
    ReceiverState.COMMITTED: "committed",
    ReceiverState.ABORTING_CLAIMED: "cancel",
    ReceiverState.FAILING_CLAIMED: "cancel",
    ReceiverState.COMPLETED: "completed",
    ReceiverState.ABORTED: "aborted",
    ReceiverState.FAILED: "failed",
}
"""What engines are told, by the state that the room is in."""
_LIMITS = {
    ReceiverState.RESERVED: "handshake_s",
    ReceiverState.OFFERED: "room_s",
    ReceiverState.VERIFYING: "verify_s",
    ReceiverState.COMMITTED: "claim_s",
}
"""Keys of `timeouts`: how long a room may stay in a state."""


@dataclass(slots=True)
class ReceiverRules:
    """Implements RoomRules."""

    table = RECEIVER_TABLE
    ABORT, FAULT, OTHER_PROMPT = ReceiverEvent.ABORT, ReceiverEvent.FAULT, ReceiverEvent.OTHER_PROMPT
    ports: ReceiverPorts
    facts: RoomFacts
    pages: RoomPages
    withdrawals: Withdrawals
    clock: Clock

    def next_event(self, room: ReceiverRoom) -> ReceiverEvent | None:
        """Look at the facts."""
        if room.state in {ReceiverState.RESERVED, ReceiverState.AWAITING_PAGES} and room.writers:
            return ReceiverEvent.WRITERS_KNOWN
        if room.state is ReceiverState.COMMITTED and self.pages.settings.hands_over:
            return ReceiverEvent.HANDED_OVER
        if room.state is ReceiverState.OFFERED and room.arrived and not room.shutting:
            return ReceiverEvent.ALL_DONE if room.verification is None else ReceiverEvent.ARRIVED
        if room.awaits_writers and not room.active and (room.shut or room.clean):
            return ReceiverEvent.DRAINED
        return ReceiverEvent.RELEASE if room.released else None

    def entered(self, room: ReceiverRoom) -> None:
        """Begin the wait of a new state."""
        now_s, limits = self.clock(), self.pages.settings.limits
        if room.state not in {ReceiverState.INTENDED, ReceiverState.RESERVED, ReceiverState.OFFERED}:
            room.begin_by_s = None
        if room.state is ReceiverState.COMMITTED:
            self._committed(room, now_s)
        limit = _LIMITS.get(room.state)
        if limit is not None:
            room.wait_until(now_s + getattr(limits, limit), f"timeouts.{limit}")
        elif room.awaits_writers or room.awaits_readers:
            room.wait_until(now_s + limits.drain_s, "timeouts.drain_s")
            self.pages.expect_free(room)
        elif not self._waits_on(room):
            room.wait_until(None)
        if room.over and room.claimed_s:
            self.facts.phases_ended(room, {"claim_to_release": now_s - room.claimed_s})

    @staticmethod
    def _waits_on(room: ReceiverRoom) -> bool:
        """Whether what is left of the wait before goes on: for the other engines of the node, for pages that a router asked for."""
        return room.state is ReceiverState.CLAIMED or (room.state is ReceiverState.INTENDED and not room.admitted_by)

    def _committed(self, room: ReceiverRoom, now_s: float) -> None:
        room.committed_s = now_s
        room.phases_s["offer_to_commit"] = now_s - room.offered_s
        room.phases_s["admit_to_commit"] = now_s - room.created_s
        own_s = {phase: seconds for phase, seconds in room.phases_s.items() if phase in PHASES[Role.DECODE]}
        self.facts.phases_ended(room, own_s)

    def act(self, room: ReceiverRoom, action: StrEnum) -> None:
        """Carry an action of the table out."""
        match action:
            case ReceiverAction.INTEND | ReceiverAction.OFFER:
                self._ask(room, action)
            case ReceiverAction.TELL_ABORT:
                self._tell_abort(room)
            case ReceiverAction.WITHDRAW:
                self.withdrawals.add(room.addresses, self._intent(room), self._abort(room))
            case ReceiverAction.VERIFY:
                self._verify(room)
            case ReceiverAction.REJECT:
                self._reject(room)
            case ReceiverAction.HOLD:
                self.pages.hold(room)
            case ReceiverAction.KEEP_PROMPT | ReceiverAction.KEEP_ANSWER | ReceiverAction.DROP_PROMPT:
                self._cache(room, action)
            case ReceiverAction.FREE:
                self.pages.give_back(room)
                room.forget_details()
                self.facts.rooms.ended(room)
            case ReceiverAction.TELL_ENGINE:
                self._tell_engine(room)

    def _tell_engine(self, room: ReceiverRoom) -> None:
        event = self.facts.event(room)
        if room.state is ReceiverState.COMMITTED and self.pages.settings.hands_over:
            result = {"metadata": room.metadata, "amounts": room.amounts, "phases_s": room.phases_s}
            event = event.model_copy(update=result)
        self.facts.engines.push(event)

    def _ask(self, room: ReceiverRoom, action: StrEnum) -> None:
        asking: Intend | Offer = self._intent(room) if action is ReceiverAction.INTEND else self._offer(room)
        for peer in room.writers:
            self.ports.nodes.send(peer, asking)

    @staticmethod
    def _intent(room: ReceiverRoom) -> Intend:
        return Intend(
            room=room.room,
            generation=room.generation,
            prompt_tokens=room.prompt_tokens,
            prompt_digest=room.prompt_digest,
            held=room.held,
        )

    def _offer(self, room: ReceiverRoom) -> Offer:
        self.pages.lease(room)
        room.offered_s = self.clock()
        room.phases_s["admit_to_offer"] = room.offered_s - room.created_s
        if self.pages.settings.digest is not DigestKind.NONE:
            room.verification = Verification(
                self.pages.settings.geometry,
                self.ports.workers.manifests(),
                prompt_tokens=room.prompt_tokens,
                prefix_tokens=room.prefix_tokens,
            )
        return Offer(
            room=room.room,
            generation=room.generation,
            prompt_tokens=room.prompt_tokens,
            prompt_digest=room.prompt_digest,
            held=room.held,
            prefix_tokens=room.prefix_tokens,
            tables=to_wire(self.pages.own_tables(room)),
            digest=self.pages.settings.digest,
            traceparent=room.trace.part(COMMIT).traceparent if room.trace is not None else "",
        )

    def _cache(self, room: ReceiverRoom, action: StrEnum) -> None:
        answer = room.answer if self.pages.settings.keeps_answers else None
        if action is ReceiverAction.KEEP_PROMPT:
            self._keep(room, room.keys)
        elif action is ReceiverAction.DROP_PROMPT:
            self._drop_prompt(room)
        elif answer is not None and self._is_stated(room):
            self._keep(room, answer.keys)

    def _is_stated(self, room: ReceiverRoom) -> bool:
        """Return whether an answer is in the memory of all ranks, behind a prompt that all engines have stated to its end.

        The page in which the prompt ends has rows of the writers and of the engines here, and gets its key with the answer.
        """
        ends_whole = room.prompt_tokens % self.pages.settings.geometry.tokens_per_page == 0
        is_same_end = ends_whole or (len(room.end_keys) == 1 and b"" not in room.end_keys)
        return is_same_end and room.answered_by >= self.ports.workers.layers.keys()

    def _keep(self, room: ReceiverRoom, keys: Keys) -> None:
        """Keep whole pages, unless a writer has not stated the keys of what it has computed."""
        if room.is_same_prompt:
            self.pages.keep(room, keys)

    def _drop_prompt(self, room: ReceiverRoom) -> None:
        assert room.disputed_page is not None, "see require_same_prompt"
        links = self.pages.drop_kept(room, room.disputed_page)
        if links and self.ports.store is not None:
            self.ports.store.forget(links)

    def _tell_abort(self, room: ReceiverRoom) -> None:
        for writer in room.active:
            self.ports.nodes.send(writer.node.peer, self._abort(room))

    @staticmethod
    def _abort(room: ReceiverRoom) -> Abort:
        return Abort(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason)

    def _reject(self, room: ReceiverRoom) -> None:
        failed = Failed(room=room.room, generation=room.generation, code=room.reason_code, message=room.reason)
        for writer in room.writers.values():
            if not writer.gone:
                self.ports.nodes.send(writer.node.peer, failed)

    def _verify(self, room: ReceiverRoom) -> None:
        assert room.verification is not None, "ARRIVED is raised for rooms with digests only"
        for rank, order in room.verification.orders(room.room, room.generation, room.tables):
            self.ports.workers.send(rank, order)

    def at_rest(self, room: ReceiverRoom) -> None:
        """Shut writers out that give no proof themselves."""
        if not room.awaits_writers or room.active:
            return
        unclean = next(writer for writer in room.writers.values() if not writer.clean)
        name = unclean.node.name
        why = f"prefill node {name} is gone ({unclean.gone})" if unclean.gone else f"prefill node {name} has failed"
        why += ", and what it has sent may still arrive until every endpoint that it knows has been revoked"
        self.pages.quarantine(room, Quarantine.WRITER_SHUT_OUT, why)
        self.ports.fence.ask(room.owner)

    def late(self, driver: RoomDriver[ReceiverRoom], room: ReceiverRoom, limit: str) -> None:
        """The pages of a room that is being stopped and is still used stay away from everybody, and that shows.

        Writers that do not answer are shut out, which is the proof that they do not give; for engines there is none.
        """
        if room.awaits_readers:
            self.pages.quarantine_used(room, limit)
        elif room.awaits_writers:
            for writer in room.active:
                writer.gone = f"it did not answer an abort, limit: {limit}"
            driver.advance(room)
        elif room.state is ReceiverState.CLAIMED:
            self._stop_expecting(room, limit)
            driver.advance(room)
        elif limit == room.begin_limit and room.state is ReceiverState.OFFERED:
            pass  # The prefill nodes know whether an engine has begun, and say Failed if none has.
        else:
            driver.miss(room, limit)

    @staticmethod
    def _stop_expecting(room: ReceiverRoom, limit: str) -> None:
        """Engines that never claimed a room do not read it: it need not wait for them."""
        if room.awaited:
            log.warning("room_not_claimed_by_all", room=room.room, engines=sorted(room.awaited), limit=limit)
        room.expected.clear()

"""The rooms of a decode node: prefill nodes write their pages (`writers.py`), and engines then read them."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import structlog

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import BridgeError, ConflictError, DigestMismatchError, InvalidInputError, RoomFailedError
from kvbridge.core.geometry.pages import tables_cover, tables_from_wire
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.session.decode import DECODE_HEARS, DECODE_TABLE, DecodeAction, DecodeEvent, DecodeState
from kvbridge.core.wire.engine_messages import AbortRoom, Claim, Extend, Loaded, Pages, Provide, Release, RoomEvent
from kvbridge.core.wire.messages import Abort, Failed, Intend, Offer, PeerMessage, to_wire
from kvbridge.core.wire.worker_messages import Digested, Verified
from kvbridge.node.decode.fence import Fence
from kvbridge.node.decode.prefill_nodes import PrefillNodes
from kvbridge.node.decode.room import ARRIVED, BEFORE_COMMIT, DecodeRoom, speaker_of
from kvbridge.node.decode.verification import Verification
from kvbridge.node.decode.writers import WrittenRooms
from kvbridge.node.engines import AttachedEngine, Engines
from kvbridge.node.room import Quarantine
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.rooms import WORKER_GONE
from kvbridge.node.workers import WorkerSet
from kvbridge.telemetry.facts import PagesDiffer, SparseDecoded
from kvbridge.telemetry.metrics import PHASES
from kvbridge.telemetry.spans import COMMIT
from kvbridge.tier.keys import Keys

log = structlog.get_logger(__name__)

_ENGINE_WORDS = {
    DecodeState.AWAITING_PAGES: "wanted",
    DecodeState.INTENDED: "wanted",
    DecodeState.COMMITTED: "committed",
    DecodeState.ABORTING_CLAIMED: "cancel",
    DecodeState.FAILING_CLAIMED: "cancel",
    DecodeState.COMPLETED: "completed",
    DecodeState.ABORTED: "aborted",
    DecodeState.FAILED: "failed",
}
_LIMITS = {
    DecodeState.RESERVED: "handshake_s",
    DecodeState.OFFERED: "room_s",
    DecodeState.VERIFYING: "verify_s",
    DecodeState.COMMITTED: "claim_s",
}
"""The key of `timeouts` that limits the time of a room in a state."""


class DecodeRooms(WrittenRooms):
    """All rooms of a decode node."""

    role, room_type, table, hearing = Role.DECODE, DecodeRoom, DECODE_TABLE, DECODE_HEARS
    ABORT, FAULT, OTHER_PROMPT = DecodeEvent.ABORT, DecodeEvent.FAULT, DecodeEvent.OTHER_PROMPT
    engine_words = _ENGINE_WORDS
    waits_for_engine = frozenset({DecodeState.AWAITING_PAGES, DecodeState.INTENDED, DecodeState.COMMITTED})
    speaker_of = staticmethod(speaker_of)

    def __init__(
        self,
        pages: RoomPages,
        workers: WorkerSet,
        engines: Engines,
        nodes: PrefillNodes,
        fence: Fence,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(pages, workers, engines, clock)
        self.nodes, self.fence = nodes, fence
        nodes.rooms = fence.rooms = self
        self._manifests, self._shares, self.withdrawn = (), {}, {}
        self.calls = {
            Provide: self.provide,
            Claim: self.claim,
            Loaded: self.loaded,
            Extend: self.extend,
            Release: self.release,
            AbortRoom: self.abort,
        }

    # ------------------------------------------------------------------ admission

    def needs(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        if not request.prefill:
            raise InvalidInputError(
                "a decode daemon needs `prefill`: the control addresses of the prefill nodes that will write"
            )
        return self.pages.needed(request.prompt_tokens + request.max_new_tokens, request.prompt_tokens)

    def admitted(self, room: DecodeRoom, request: AdmissionRequest) -> None:
        room.peers = tuple(address.endpoint for address in request.prefill)
        room.addresses, room.reserved_tokens = request.prefill, request.prompt_tokens + request.max_new_tokens
        if request.begin_within_s is not None:
            room.begin_within(request.begin_within_s, "begin_within_s")
        if not self.settings.adopted:
            self.advance(room, DecodeEvent.PAGES)
        elif room.admitted_by.name:
            room.wait_until(room.created_s + self.limits.handshake_s, "timeouts.handshake_s")
        else:
            room.wait_until(room.created_s + self.limits.pages_s, "timeouts.pages_s")
            self.engines.push(self.event(room))
        self.find_writers(room)

    # ------------------------------------------------------------------ the table

    def next_event(self, room: DecodeRoom) -> DecodeEvent | None:
        match room.state:
            case DecodeState.RESERVED | DecodeState.AWAITING_PAGES if room.writers:
                return DecodeEvent.WRITERS_KNOWN
            case DecodeState.OFFERED if room.arrived and not room.shutting:
                return DecodeEvent.ALL_DONE if room.verification is None else DecodeEvent.ARRIVED
            case DecodeState.COMMITTED if self.pages.hands_over:
                return DecodeEvent.HANDED_OVER
            case DecodeState.CLAIMED | DecodeState.ABORTING_CLAIMED | DecodeState.FAILING_CLAIMED if not room.users:
                is_expected = room.state is DecodeState.CLAIMED and room.awaited
                return None if is_expected else DecodeEvent.RELEASE
            case DecodeState.ABORTING | DecodeState.FAILING if not room.active and (room.shut or room.clean):
                return DecodeEvent.DRAINED
            case _:
                return None

    def entered(self, room: DecodeRoom) -> None:
        now_s, state = self.clock(), room.state
        if state not in {DecodeState.INTENDED, DecodeState.RESERVED, DecodeState.OFFERED}:
            room.begin_by_s = None
        if state is DecodeState.COMMITTED:
            room.committed_s = now_s
            room.phases_s["offer_to_commit"] = now_s - room.offered_s
            room.phases_s["admit_to_commit"] = now_s - room.created_s
            own_s = {phase: seconds for phase, seconds in room.phases_s.items() if phase in PHASES[Role.DECODE]}
            self.phases_ended(room, own_s)
        # The wait goes on for the other engines of the node, and for pages that a router asked for.
        goes_on = state is DecodeState.CLAIMED or (state is DecodeState.INTENDED and not room.admitted_by.name)
        if limit := _LIMITS.get(state):
            room.wait_until(now_s + getattr(self.limits, limit), f"timeouts.{limit}")
        elif room.awaits_writers or room.awaits_readers:
            room.wait_until(now_s + self.limits.drain_s, "timeouts.drain_s")
            self.pages.expect_free(room)
        elif not goes_on:
            room.wait_until(None)
        if room.over and room.claimed_s:
            self.phases_ended(room, {"claim_to_release": now_s - room.claimed_s})

    def act(self, room: DecodeRoom, action: StrEnum) -> None:  # noqa: C901, PLR0912 - one case an action
        match action:
            case DecodeAction.INTEND:
                self._send(room.writers, Intend(**room.asked))
            case DecodeAction.OFFER:
                self._send(room.writers, self._offer(room))
            case DecodeAction.TELL_ABORT:
                abort = Abort(**room.about, code=room.reason_code, message=room.reason)
                self._send([writer.node.incarnation for writer in room.active], abort)
            case DecodeAction.WITHDRAW:
                self.withdraw(room)
            case DecodeAction.VERIFY:
                assert room.verification is not None, "ARRIVED is raised for rooms with digests only"
                for rank, order in room.verification.orders():
                    self.workers.send(rank, order)
            case DecodeAction.REJECT:
                failed = Failed(**room.about, code=room.reason_code, message=room.reason)
                self._send([peer for peer, writer in room.writers.items() if not writer.gone], failed)
            case DecodeAction.HOLD:
                self.pages.hold(room)
            case DecodeAction.KEEP_PROMPT:
                self._keep(room, room.keys)
            case DecodeAction.DROP_PROMPT:
                self.pages.drop_disputed(room)
            case DecodeAction.KEEP_ANSWER:
                answer = room.answer if self.settings.keeps_answers else None
                if answer is not None and self._is_stated(room):
                    self._keep(room, answer.keys)
            case DecodeAction.FREE:
                self.pages.give_back(room)
                room.forget_details()
                self.book.ended(room)
            case DecodeAction.TELL_ENGINE:
                self.engines.push(self.event(room))

    def event(self, room: DecodeRoom) -> RoomEvent:
        event = super().event(room)
        if room.state is DecodeState.COMMITTED and self.pages.hands_over:
            return event.model_copy(update=room.result)
        return event

    def _send(self, peers: Iterable[str], message: PeerMessage) -> None:
        for peer in peers:
            self.nodes.send(peer, message)

    def _offer(self, room: DecodeRoom) -> Offer:
        """Lease the pages, and return the offer of them."""
        self.pages.lease(room)
        room.offered_s = self.clock()
        room.phases_s["admit_to_offer"] = room.offered_s - room.created_s
        if self.settings.digest is not DigestKind.NONE:
            room.verification = Verification(self.geometry, self.workers.manifests(), room)
        return Offer(
            **room.asked,
            prefix_tokens=room.prefix_tokens,
            tables=to_wire(self.pages.own_tables(room)),
            digest=self.settings.digest,
            traceparent=room.trace.part(COMMIT).traceparent if room.trace is not None else "",
        )

    def _is_stated(self, room: DecodeRoom) -> bool:
        """Return whether an answer is in the memory of all ranks, after a prompt that all engines have stated to its end.

        The page in which the prompt ends has rows of writers and of engines here, and gets its key with the answer.
        """
        ends_whole = room.prompt_tokens % self.geometry.tokens_per_page == 0
        is_same_end = ends_whole or (len(room.end_keys) == 1 and b"" not in room.end_keys)
        return is_same_end and room.answered_by >= self.workers.layers.keys()

    def _keep(self, room: DecodeRoom, keys: Keys) -> None:
        """Cache whole pages, unless a writer has not stated the keys of its prompt."""
        if room.is_same_prompt:
            self.pages.keep(room, keys)

    def at_rest(self, room: DecodeRoom) -> None:
        """Shut out writers that give no proof themselves."""
        if not room.awaits_writers or room.active:
            return
        unclean = next(writer for writer in room.writers.values() if not writer.clean)
        end = f"is gone ({unclean.gone})" if unclean.gone else "has failed"
        later = "what it has sent may still arrive until every endpoint that it knows has been revoked"
        self.pages.quarantine(room, Quarantine.WRITER_SHUT_OUT, f"prefill node {unclean.node.name} {end}, and {later}")
        self.fence.ask(room.owner)

    def late(self, room: DecodeRoom, limit: str) -> None:
        """Fail the room; or shut out writers that do not answer an abort, or quarantine pages that engines do not let go of."""
        if room.awaits_readers:
            self.pages.quarantine_used(room, limit)
        elif room.awaits_writers:
            for writer in room.active:
                writer.gone = f"it did not answer an abort, limit: {limit}"
            self.advance(room)
        elif room.state is DecodeState.CLAIMED:
            if room.awaited:
                log.warning("room_not_claimed_by_all", room=room.room, engines=sorted(room.awaited), limit=limit)
            room.expected.clear()  # engines that never claimed a room do not read it
            self.advance(room)
        elif limit == room.begin_limit and room.state is DecodeState.OFFERED:
            pass  # the prefill nodes know whether an engine has begun, and say Failed if none has
        else:
            self.miss(room, limit)

    # ------------------------------------------------------------------ rank workers of this node

    def hear_rank(self, message: Digested | Verified) -> None:
        """Take a rank worker's message about a room that is verifying, or refuse it."""
        room, meaning = self.look_up("", message)
        if room is None or meaning is None or room.verification is None:
            return
        if isinstance(message, Verified):
            self._verified(room, room.verification, message)
            return
        try:
            room.verification.find(message)
        except BridgeError as error:
            why = f"rank worker {message.rank} reports what the room does not have: {error}"
            self.fail(room, error.code, why)

    def _verified(self, room: DecodeRoom, verification: Verification, message: Verified) -> None:
        """Go on when all ranks have computed their digests, and all are equal; else fail the room."""
        if message.error_code:
            why = f"rank worker {message.rank} could not verify what has arrived: {message.error}"
            self.fail(room, message.error_code, why)
            return
        room.add_phases(message.seconds)
        if not verification.answered(message.rank):
            return
        differing, why = verification.differences()
        if not differing:
            self.advance(room, DecodeEvent.VERIFIED)
            return
        for kind, pages in differing.items():
            self.events.emit(PagesDiffer(**room.identity, component=kind, pages=pages))
        self.fail(room, DigestMismatchError.code, why)

    def worker_gone(self, rank: Rank, reason: str, *, memory_lost: bool = False) -> None:
        """Fail the rooms under way: nothing can arrive through a rank worker that died.

        `memory_lost`: the device memory was the worker's own, so rooms that have arrived fail as well.
        """
        failing = BEFORE_COMMIT | ARRIVED if memory_lost else BEFORE_COMMIT
        for room in self.book:
            if room.state in failing:
                self.fail(room, WORKER_GONE, f"rank worker {rank} of the decode node died: {reason}")

    # ------------------------------------------------------------------ engines

    def provide(self, _engine: AttachedEngine, message: Provide) -> None:
        """Adopted pools: take the device pages that the engine names for a room, and the tokens that they hold already."""
        room, tables = self.book.get(message.room), tables_from_wire(message.tables)
        prefix_tokens, host = message.prefix_tokens, self.settings.host
        if not self.settings.adopted:
            raise ConflictError("this node owns its pools: pages are not provided by the engine")
        if room.state not in {DecodeState.AWAITING_PAGES, DecodeState.INTENDED}:
            raise ConflictError(f"room {room.room} does not wait for pages (state '{room.user_state}')")
        if ours := tables.keys() & set(self.pages.book.owned_spaces):
            raise InvalidInputError(f"{min(ours)} pages belong to the daemon; provide pages of the other spaces only")
        page = self.geometry.tokens_per_page
        if prefix_tokens > room.prompt_tokens or prefix_tokens % page:
            raise InvalidInputError(
                f"prefix_tokens must be a multiple of {page} and at most prompt_tokens ({room.prompt_tokens}), "
                f"got {prefix_tokens}"
            )
        if prefix_tokens and host:
            raise InvalidInputError(
                f"{', '.join(sorted(host))} of the room lies in host memory, in pages that hold "
                f"nothing of the prompt yet: prefix_tokens must be 0 here, got {prefix_tokens}"
            )
        covered = {"tokens": room.prompt_tokens, "prefix_tokens": prefix_tokens}
        tables_cover(room.tables | tables, self.geometry, **covered, host=host)
        self.pages.adopt(room, tables, cached_tokens=prefix_tokens, written_by_peers=True)
        room.prefix_tokens = prefix_tokens
        self.advance(room, DecodeEvent.PAGES)
        self.find_writers(room)

    def claim(self, engine: AttachedEngine, message: Claim) -> Pages:
        """Give an engine a committed room. Raises RoomFailedError with the first cause when the room will never be committed.

        Raises KeyMismatchError, and the room fails, when the engine has other tokens than the room's page keys name.
        """
        room = self.book.get(message.room)
        name = f"room {room.room}"
        if any(engine.name in earlier.users for earlier in self.book.attempts(room.room)[:-1]):
            raise ConflictError(f"an earlier attempt at {name} is still claimed by this engine; release it first")
        if room.state in BEFORE_COMMIT:
            raise ConflictError(f"{name} is not committed yet (state '{room.user_state}')")
        if room.state not in ARRIVED:
            raise RoomFailedError(f"{name} is over ({room.user_state}): {room.reason or 'released'}")
        if engine.name in room.claims:
            raise ConflictError(f"{name} was already claimed by this engine")
        self.require_same_prompt(room, message, room.end_keys)
        room.end_keys.add(message.end_key)
        if room.state is DecodeState.COMMITTED:
            room.expected = self.engines.serving()
            room.claimed_s = self.clock()
            waited_s = room.phases_s["commit_to_claim"] = room.claimed_s - room.committed_s
            self.phases_ended(room, {"commit_to_claim": waited_s, "admit_to_claim": room.claimed_s - room.created_s})
        room.claims[engine.name] = engine.ranks
        room.users.add(engine.name)
        self.advance(room, DecodeEvent.CLAIM)
        if not room.awaited:
            room.wait_until(None)  # all engines use it
        return self.answer(message.call, room, load=to_wire(room.load.host_copies if room.load else {}), **room.result)

    def loaded(self, engine: AttachedEngine, message: Loaded) -> None:
        """Note that an engine has copied pages from host memory into the room's own. Harmless when the room is over.

        When all ranks have them, other rooms share those pages, and the rest of the prompt behind them.
        """
        room = self.book.find(message.room, message.generation)
        if room is None or room.load is None or room.state is not DecodeState.CLAIMED:
            return
        if engine.name in room.users and self.pages.loaded(room, engine.ranks, message, of=self.workers.layers):
            self.pages.restored(room)
            self._keep(room, room.keys)

    def _claimed(self, engine: AttachedEngine, room_id: int) -> DecodeRoom:
        """Return the room that an engine has claimed and not released. Raises ConflictError when it has not."""
        room = self.book.used_by(engine.name, room_id)
        if engine.name not in room.users:
            raise ConflictError(f"room {room_id} is not claimed by this engine (state '{room.user_state}')")
        return room

    def extend(self, engine: AttachedEngine, message: Extend) -> Pages:
        """Reserve pages for so many tokens in all and return the tables for that length. Raises CapacityError."""
        room, tokens = self._claimed(engine, message.room), message.tokens
        if room.state is not DecodeState.CLAIMED:
            raise ConflictError(f"room {room.room} is to end and cannot grow: {room.reason}; release it")
        if tokens < room.prompt_tokens:
            raise InvalidInputError(
                f"room {room.room} cannot shrink to {tokens} tokens, its prompt has {room.prompt_tokens}"
            )
        if tokens > room.reserved_tokens:
            self.pages.grow(room, tokens)
            room.reserved_tokens = tokens
        return self.answer(message.call, room)

    def release(self, engine: AttachedEngine, message: Release) -> None:
        """Let go of a room for an engine. The pages are free once every engine that has claimed it, or is expected to, has let go.

        The engine's statement about the answer counts once all engines say the same. A wrong statement is refused with
        InvalidInputError, KeyMismatchError or ConflictError, and the engine has let go of the pages all the same.
        """
        room = self._claimed(engine, message.room)
        if message.sparse is not None:
            self.events.emit(SparseDecoded(**room.identity, rows=message.sparse.model_dump()))
        try:
            said = room.stated_answer(message.valid_tokens, message.page_hashes, self.geometry.tokens_per_page)
            if said is not None:
                room.check_answer(said)
                room.answered_by.update(engine.ranks)
            room.answers[engine.name] = said
        finally:
            self.let_go(room, engine.name)

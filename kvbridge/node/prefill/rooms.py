"""The rooms of a prefill node: engines fill their pages, and rank workers send them.

Source pages go back when nothing of the room is in flight (the table says FREE_SOURCE), and no engine that has begun the room still
writes pages of this node: it said finish or abort, or its process has ended.
"""

from __future__ import annotations

from enum import StrEnum

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import (
    BridgeError,
    ConflictError,
    InvalidInputError,
    KeyMismatchError,
    PeerError,
    StaleError,
    UnknownRoomError,
)
from kvbridge.core.geometry.pages import further_tables, joined_tables, tables_cover, tables_from_wire, tables_hold
from kvbridge.core.ids import IndexSpace, Role, Tables
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.session.prefill import PREFILL_HEARS, PREFILL_TABLE, PrefillAction, PrefillEvent, PrefillState
from kvbridge.core.session.tables import Meaning
from kvbridge.core.wire.engine_messages import (
    AbortRoom,
    AskRestorable,
    Begin,
    Finish,
    Loaded,
    Pages,
    Publish,
    Release,
    Restorable,
)
from kvbridge.core.wire.messages import REASON_CHARS, Abort, Drained, Failed, Intend, Offer
from kvbridge.core.wire.worker_messages import MAX_POINTS
from kvbridge.node.engines import AttachedEngine, Engines
from kvbridge.node.prefill.decode_nodes import DecodeNodes
from kvbridge.node.prefill.early_offers import EarlyOffers, check_offer
from kvbridge.node.prefill.orders import SendingRooms
from kvbridge.node.prefill.room import ALIVE, STOPPING, Asking, FromDecode, PrefillRoom, speaker_of
from kvbridge.node.room import Quarantine, named
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.workers import WorkerSet
from kvbridge.telemetry.context import parse_traceparent
from kvbridge.telemetry.facts import RoomBegun, RoomFinished, RoomOffered, RoomRejected


class PrefillRooms(SendingRooms):
    """All rooms of a prefill node."""

    role, room_type, table, hearing = Role.PREFILL, PrefillRoom, PREFILL_TABLE, PREFILL_HEARS
    ABORT, FAULT, OTHER_PROMPT = PrefillEvent.ABORT, PrefillEvent.FAULT, PrefillEvent.FAULT
    engine_words = {state: state.value for state in PREFILL_TABLE.final}  # noqa: RUF012 - a literal
    speaker_of = staticmethod(speaker_of)

    def __init__(
        self, pages: RoomPages, workers: WorkerSet, engines: Engines, nodes: DecodeNodes, clock: Clock = monotonic
    ) -> None:
        super().__init__(pages, workers, engines, clock)
        self.nodes, nodes.rooms = nodes, self
        self.early = EarlyOffers(wait_s=self.limits.early_offer_s, clock=clock)
        self.calls = {
            AskRestorable: self.restorable,
            Begin: self.begin,
            Loaded: self.loaded,
            Publish: self.publish,
            Finish: self.finish,
            Release: self.release,
            AbortRoom: self.abort,
        }

    # ------------------------------------------------------------------ admission

    def needs(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        if request.prefill:
            raise InvalidInputError("`prefill` is for the decode daemon; a prefill daemon sends to whoever offers it")
        return self.pages.needed(request.prompt_tokens, request.prompt_tokens)

    def admitted(self, room: PrefillRoom, request: AdmissionRequest) -> None:
        room.start_work(self.workers.layers)
        self.pages.reserve_checkpoints(room)
        room.wait_until(room.created_s + self.limits.offer_s, "timeouts.offer_s")
        if request.begin_within_s is not None:
            room.begin_within(request.begin_within_s, "begin_within_s")
        elif not room.admitted_by.name:
            room.begin_within(self.limits.begin_s, "timeouts.begin_s")
        if early := self.early.take(room.room, room.generation):
            self.hear(early.peer, early.offer)

    def not_admitted(self, room: int, generation: int, error: BridgeError) -> None:
        if early := self.early.take(room, generation):
            self._refuse(early.peer, early.offer, error.code, f"prefill did not admit the room: {error}")

    # ------------------------------------------------------------------ the table

    def next_event(self, room: PrefillRoom) -> PrefillEvent | None:
        if room.state is PrefillState.SENDING and room.ranks and all(work.done for work in room.ranks.values()):
            return PrefillEvent.ALL_SENT
        if room.state in STOPPING and not room.open_ranks:  # every worker has proved that nothing of it is in flight
            return PrefillEvent.DRAINED
        return None

    def entered(self, room: PrefillRoom) -> None:
        now_s = self.clock()
        if room.state not in {PrefillState.AWAITED, PrefillState.SENDING}:
            room.begin_by_s = None
        match room.state:
            case PrefillState.SENDING:
                room.wait_until(now_s + self.limits.room_s, "timeouts.room_s")
            case PrefillState.ABORTING | PrefillState.FAILING:
                room.wait_until(now_s + self.limits.drain_s, "timeouts.drain_s")
                self.pages.expect_free(room)
            case PrefillState.COMPLETED:
                room.wait_until(None)
                room.phases_s["offer_to_sent"] = now_s - room.offered_s
                self.phases_ended(room, room.phases_s)
                if not any(work.after for work in room.ranks.values()):
                    room.users.clear()  # every published point has been reached, or nothing would have been sent
                    for work in room.ranks.values():
                        work.written = True
            case _:
                room.wait_until(None)

    def act(self, room: PrefillRoom, action: StrEnum) -> None:
        match action:
            case PrefillAction.OPEN_ROOM:
                self.open_room(room)
            case PrefillAction.CLOSE_ROOM:
                self.close_room(room)
            case PrefillAction.TELL_FAILED if room.peer:
                self.nodes.send(room.peer, Failed(**room.about, code=room.reason_code, message=room.reason))
            case PrefillAction.TELL_DRAINED if room.peer:
                self.nodes.send(room.peer, Drained(**room.about, in_transit=room.in_transit))
            case PrefillAction.TELL_ENGINE:
                self.engines.push(self.event(room))
            case PrefillAction.FREE_SOURCE:
                room.free_wanted = True

    def at_rest(self, room: PrefillRoom) -> None:
        """Give the pages back, once, when the table and every engine have let go of them."""
        if not room.free_wanted or room.concluded:
            return
        if room.users:
            if room.deadline_s is None:
                room.wait_until(self.clock() + self.limits.drain_s, "timeouts.drain_s")
            return
        room.concluded = True
        room.wait_until(None)
        try:
            self.pages.keep_written(room)
        finally:
            self.pages.give_back(room)
            room.forget_details()
            self.book.ended(room)

    def late(self, room: PrefillRoom, limit: str) -> None:
        """Fail the room; or quarantine the pages of one that is being stopped."""
        if room.over:
            self.pages.quarantine_used(room, limit)
        elif room.state in STOPPING:
            why = f"rank workers {named(room.open_ranks)} have not said that they are quiet (limit: {limit})"
            self.pages.quarantine(room, Quarantine.NOT_QUIET, why)
        else:
            self.miss(room, limit)

    def tick(self) -> None:
        """Refuse early offers whose rooms are not admitted in time, too."""
        super().tick()
        for late in self.early.expired():
            why = "the room was never admitted on the prefill side (limit: timeouts.early_offer_s)"
            if late.offer.held:
                why = "prefill holds no such room (any more): it was never there, somebody else has had it, or it has ended"
            self._refuse(late.peer, late.offer, UnknownRoomError.code, why)

    # ------------------------------------------------------------------ decode nodes

    def hear(self, peer: str, message: FromDecode) -> None:
        """Take a decode node's message about a room as `PREFILL_HEARS` lists it, or refuse it."""
        room, meaning = self.look_up(peer, message)
        match message:
            case Intend() | Offer() if meaning is Meaning.TURN_AWAY and room is not None:
                why = (
                    room.reason or f"the room is already {room.user_state} on the prefill side, for {named(room.peers)}"
                )
                self._refuse(peer, message, room.reason_code or ConflictError.code, why)
            case Intend() | Offer() if meaning is Meaning.TAKE and room is None:
                self._take_early(peer, message)
            case Intend() | Offer() if meaning is Meaning.TAKE and room is not None:
                self._take(room, peer, message)
            case Abort() if meaning is Meaning.TAKE and room is not None:
                self.stop(room, f"by the decode side: {message.message}", message.code)
            case Abort() if meaning is Meaning.PROOF:
                # No worker here writes to this peer's pages of the room. The Abort withdraws the peer's offer or intent, which it
                # follows on one ordered link; a room that has taken nothing of this peer is not the peer's to end.
                self.early.take(message.room, message.generation, of=peer)
                self.nodes.send(peer, Drained(room=message.room, generation=message.generation))
            case Failed() if meaning is Meaning.TAKE and room is not None:
                # Everything was sent, and the decode side could not use it. The room cannot fail any more; the reason is kept.
                room.blame(message.code, f"by the decode side: {message.message}")
                self.events.emit(RoomRejected(**room.identity, code=message.code, reason=room.reason))

    def _take_early(self, peer: str, message: Asking) -> None:
        """Keep the offer for a room that is not there, perhaps not yet."""
        newest = self.book.newest_generation(message.room)
        if message.generation < newest:
            stale = f"generation {message.generation} of the room is older than {newest}, which prefill works on"
            self._refuse(peer, message, StaleError.code, stale)
        elif not self.early.put(peer, message):
            why = "the room is not admitted on the prefill side, and other offers have taken this one's place"
            self._refuse(peer, message, UnknownRoomError.code, why)

    def _take(self, room: PrefillRoom, peer: str, message: Asking) -> None:
        try:
            check_offer(
                message, self.geometry, prompt_tokens=room.prompt_tokens, prompt_digest=room.admitted_by.prompt_digest
            )
        except BridgeError as error:
            self._refuse(peer, message, error.code, str(error))
            if not isinstance(error, KeyMismatchError):  # the node for which the room is may still come
                self.fail(room, error.code, str(error))
            return
        room.peer, room.peers = peer, (self.nodes.name(peer),)
        if isinstance(message, Intend):
            self.advance(room, PrefillEvent.INTENT)
            return
        room.destination, room.offered_s, room.is_offered = message.tables, self.clock(), True
        room.prefix_tokens, room.digest = message.prefix_tokens, message.digest
        trace = parse_traceparent(message.traceparent)
        if room.trace is None and trace is not None:  # admitted by an engine, or by a caller that names no trace
            room.trace, room.ids = trace, {**room.ids, "trace_id": trace.trace_id}
        self.events.emit(RoomOffered(**room.identity, trace=trace))
        room.phases_s["admit_to_offer_received"] = room.offered_s - room.created_s
        self.advance(room, PrefillEvent.OFFER)
        self.settle(room)

    def _refuse(self, peer: str, asking: Asking, code: str, message: str) -> None:
        """Turn a decode node away, with the proof that nothing will be written for its offer.

        A refused intent gets no proof: an offer may be on its way behind it, and the room may be admitted before the offer arrives.
        Decode sends an Abort behind the offer, and the answer to the Abort is the proof.
        """
        self.refuse_message(peer, asking, code)
        about = {"room": asking.room, "generation": asking.generation}
        self.nodes.send(peer, Failed(**about, code=code, message=message[:REASON_CHARS]))
        if isinstance(asking, Offer):
            self.nodes.send(peer, Drained(**about))

    def peer_gone(self, peer: str, reason: str) -> None:
        """Fail the rooms of a decode node whose process has ended, or that is silent."""
        self.early.forget_peer(peer)
        for room in self.book:
            if room.peer == peer:
                self.fail(room, PeerError.code, f"the decode node is gone: {reason}")

    # ------------------------------------------------------------------ engines

    def restorable(self, _: AttachedEngine, message: AskRestorable) -> Restorable:
        """Answer at which tokens an engine could start."""
        room = self.book.get(message.room)
        room.require_alive()
        return Restorable(call=message.call, tokens=self.pages.restorable(room))

    def begin(self, engine: AttachedEngine, message: Begin) -> Pages:
        """Let an engine compute a room on its ranks, and let go of its earlier attempts at the room.

        Raises ConflictError on a second begin, and while the engine's GPU (`by_gpu`) may still write an earlier attempt. Raises
        KeyMismatchError, and the room fails, when the engine has other tokens than the room's page keys name.
        """
        room = self.book.get(message.room)
        tables = tables_from_wire(message.tables)
        room.require_alive()
        if message.prompt_tokens != room.prompt_tokens:
            raise InvalidInputError(
                f"room {room.room} was admitted with {room.prompt_tokens} prompt tokens, "
                f"the engine begins it with {message.prompt_tokens}"
            )
        self.require_same_prompt(room, message, [work.end_key for work in room.ranks.values()])
        for rank in engine.ranks:
            if other := room.ranks[rank].engine:
                raise ConflictError(f"room {room.room} was already begun on rank {rank} by engine {other}")
        earlier = [attempt for attempt in self.book.attempts(room.room)[:-1] if engine.name in attempt.users]
        if earlier and message.by_gpu:
            raise ConflictError(
                f"an earlier attempt at room {room.room} (generation {earlier[0].generation}) may still be written by this "
                "engine's GPU; abort it first"
            )
        self._take_tables(room, tables, message.computed_tokens)
        if message.at_most is not None:
            self.pages.start_at_most(room, message.at_most)
        for attempt in earlier:
            self.let_go(attempt, engine.name)
        for rank in engine.ranks:
            room.ranks[rank].engine, room.ranks[rank].end_key = engine.name, message.end_key
        if not self.settings.adopted:
            room.users.add(engine.name)
        room.phases_s.setdefault("admit_to_begin", self.clock() - room.created_s)
        room.begin_by_s = None
        self.events.emit(RoomBegun(**room.identity, engine=engine.name))
        self.show(room)
        self.open_room(room)
        return self.answer(message.call, room, **self.pages.told(room))

    def _take_tables(self, room: PrefillRoom, tables: Tables, computed_tokens: int) -> None:
        if not self.settings.adopted:
            if tables or computed_tokens:
                raise InvalidInputError(
                    "this node owns its pools: `begin` takes no page tables, and no computed_tokens; it returns them"
                )
            return
        if computed_tokens > room.prompt_tokens:
            raise InvalidInputError(
                f"computed_tokens must be at most the {room.prompt_tokens} tokens of the prompt, got {computed_tokens}"
            )
        if room.begun and room.computed_tokens != computed_tokens:
            raise ConflictError(
                f"room {room.room} was begun with {room.computed_tokens} computed_tokens on another rank, not {computed_tokens}; "
                "all ranks read and write the same pages"
            )
        tables_hold(tables, self.geometry, tokens=computed_tokens)
        self.take_pages(room, tables, cached_tokens=computed_tokens)
        room.computed_tokens = computed_tokens

    def loaded(self, engine: AttachedEngine, message: Loaded) -> None:
        """Count pages that an engine has copied from host memory into the room's own. Harmless when the room is over.

        Other rooms share those pages from the end of this one on, with all pages that its engines have written.
        """
        room = self.book.find(message.room, message.generation)
        if room is not None and room.load is not None:
            self.pages.loaded(room, engine.ranks, message, of=room.ranks)

    def publish(self, engine: AttachedEngine, message: Publish) -> None:
        """Send tokens that an engine has made final on its ranks.

        Raises InvalidInputError for layers that its ranks do not hold, and all that RankProgress.check raises.
        """
        room = self.book.used_by(engine.name, message.room)
        upto_token, works = message.upto_token, room.works_of(engine.name, engine.ranks)
        held = {rank: work.progress.check(upto_token, message.layers) for rank, work in works.items()}
        if unknown := sorted(set(message.layers or ()).difference(*held.values())):
            raise InvalidInputError(f"publish names layers {unknown}, which the ranks of this engine do not hold")
        if self.settings.adopted:
            self._take_published(room, message)
        elif message.tables:
            raise InvalidInputError("this node owns its pools: `publish` takes no page tables")
        for rank, work in works.items():
            work.progress.publish(upto_token, held[rank])
            if point := message.after.get(str(rank)):
                work.after[point] = None
                if len(work.after) > MAX_POINTS:  # the oldest goes: later points of a GPU cover it
                    del work.after[next(iter(work.after))]
        self.open_room(room)

    def _take_published(self, room: PrefillRoom, message: Publish) -> None:
        """Adopted pools: take further pages, and check that every published row has one."""
        tables = tables_from_wire(message.tables)
        together = joined_tables(room.tables, further_tables(room.tables, tables))
        if message.upto_token == room.prompt_tokens:
            tables_cover(together, self.geometry, tokens=room.prompt_tokens)
        else:
            tables_hold(together, self.geometry, tokens=message.upto_token)
        # No engine writes a page any more that is final on all layers: other rooms of the same prefix may name it as well.
        self.take_pages(room, tables, cached_tokens=message.upto_token if message.layers is None else 0)

    def finish(self, engine: AttachedEngine, message: Finish) -> None:
        """Note that an engine has published everything and does not write the room's pages any more.

        `by_gpu`: its GPU may still write, until everything that was published has been sent, or until `release`. Raises
        ConflictError when the engine has not published everything, or when the room is over; in a room that is over the engine has
        let go of the pages all the same.
        """
        room = self.book.used_by(engine.name, message.room)
        if room.state not in ALIVE and not message.by_gpu:
            self.let_go(room, engine.name)
        works = room.works_of(engine.name, engine.ranks)
        for rank, work in works.items():
            if work.finished:
                raise ConflictError(f"room {room.room} was already finished on rank {rank}")
            if not work.progress.complete:
                raise ConflictError(
                    f"room {room.room} cannot finish: rank {rank} has published {work.progress.published_tokens} "
                    f"of {room.prompt_tokens} tokens"
                )
        unasked = sorted(set(message.checkpoints).difference(room.asked_checkpoints))
        if unasked:  # the engine has written to pages that nobody gave it
            raise InvalidInputError(
                f"finish names checkpoints at {unasked} tokens of room {room.room} that `begin` did not ask for; it asked for "
                f"{room.asked_checkpoints}"
            )
        for work in works.values():
            work.finished, work.written = True, not message.by_gpu
            work.metadata, work.checkpoints = message.metadata, frozenset(message.checkpoints)
        self.events.emit(RoomFinished(**room.identity, engine=engine.name))
        if not message.by_gpu:
            self.let_go(room, engine.name)
        self.settle(room)

    def release(self, engine: AttachedEngine, message: Release) -> None:
        """Let go of an attempt that an engine has finished: its GPU is through. Harmless when the attempt is forgotten.

        Raises ConflictError for one that the engine has yet to finish.
        """
        room = self.book.find(message.room, message.generation)
        if room is None:
            return
        unfinished = any(work.engine == engine.name and not work.finished for work in room.ranks.values())
        if unfinished and room.state in ALIVE:
            raise ConflictError(f"room {room.room} is not finished by this engine; finish or abort it")
        for work in room.ranks.values():
            work.written = work.written or (work.finished and work.engine == engine.name)
        self.let_go(room, engine.name)

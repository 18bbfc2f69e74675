"""The parts of rooms that both roles share: admission, the state machine, deadlines, engines, refused messages.

An engine names a room without its generation: it means the attempt that it uses, else the newest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from kvbridge.api.rooms import AdmissionRequest, DroppedObjects, DroppedPrefixes, RoomReport
from kvbridge.core.errors import (
    BridgeError,
    ConflictError,
    DeadlineError,
    KeyMismatchError,
    NotReadyError,
    PeerError,
    TransportError,
)
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.process import Clock
from kvbridge.core.session.tables import WITHDRAWN, Hearing, Meaning, Table
from kvbridge.core.wire.engine_messages import AbortRoom, Begin, Call, Claim, Pages, Restorable, RoomEvent
from kvbridge.core.wire.messages import RoomMessage, to_wire
from kvbridge.node.engines import AttachedEngine, Engines
from kvbridge.node.room import OVER_HTTP, AdmittingEngine, Room, keys_of
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.workers import WorkerSet
from kvbridge.telemetry.context import TRACE, bound_ids, exemplar
from kvbridge.telemetry.facts import PhasesEnded, PrefixesDropped, RoomEntered, RoomMessageRefused
from kvbridge.tier.keys import NO_KEYS, Keys

ABORTED = "aborted"
"""Code of rooms that a user or an engine has stopped."""
WORKER_GONE = "worker_gone"

RoomT = TypeVar("RoomT", bound=Room[Any])


class Rooms(ABC, Generic[RoomT]):
    """The rooms of a node of one role. Called from the event loop's thread only.

    A role adds its tables, and a method for each call of an engine and for each message of peers and rank workers.
    """

    role: ClassVar[Role]
    room_type: type[RoomT]
    table: ClassVar[Table[Any, Any, Any]]
    hearing: ClassVar[Hearing[Any, Any]]
    ABORT: ClassVar[Any]
    FAULT: ClassVar[Any]
    OTHER_PROMPT: ClassVar[Any]
    engine_words: ClassVar[Mapping[Any, str]]
    """The word for a state in events to engines."""
    waits_for_engine: ClassVar[frozenset[StrEnum]] = frozenset()
    """The states in which a room waits for an engine."""
    calls: Mapping[type[Call], Callable[[AttachedEngine, Any], Pages | Restorable | None]]
    """The method for each call of an engine. A call without a result is answered with Accepted."""

    def __init__(self, pages: RoomPages, workers: WorkerSet, engines: Engines, clock: Clock) -> None:
        self.pages, self.workers, self.engines, self.clock = pages, workers, engines, clock
        self.events, self.store, self.settings = pages.events, pages.store, pages.settings
        self.limits, self.geometry = self.settings.limits, self.settings.geometry
        self.book = RoomBook[RoomT](self.role, clock=clock, keep_s=self.limits.room_keep_s)

    # ------------------------------------------------------------------ hooks of a role

    @staticmethod
    @abstractmethod
    def speaker_of(room: RoomT | None, peer: str, message: Any) -> StrEnum | None:  # noqa: ANN401 - each role's own
        """Return the speaker of a message as `hearing` names speakers; None for one whom the room does not concern."""

    @abstractmethod
    def needs(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Return the pages that a request takes of the spaces that this node gives out. Raises InvalidInputError."""

    @abstractmethod
    def admitted(self, room: RoomT, request: AdmissionRequest) -> None:
        """Begin the first wait of a room that has the pages which this node gives out."""

    @abstractmethod
    def next_event(self, room: RoomT) -> StrEnum | None:
        """Return the event that follows from the room's fields in its present state. Changes nothing."""

    @abstractmethod
    def entered(self, room: RoomT) -> None:
        """Begin the wait of a new state."""

    @abstractmethod
    def act(self, room: RoomT, action: StrEnum) -> None:
        """Carry out an action of the table."""

    @abstractmethod
    def at_rest(self, room: RoomT) -> None:
        """Do the work that the room waits for, once no event follows any more."""

    @abstractmethod
    def late(self, room: RoomT, limit: str) -> None:
        """End the present wait of a room, whose limit has passed."""

    def not_admitted(self, room: int, generation: int, error: BridgeError) -> None:
        """Refuse the offers that came for a room which is not admitted."""

    # ------------------------------------------------------------------ admission

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Return the pages that a request takes. Raises as `admit` does, without CapacityError for pages that are not free."""
        self._checked(request)
        return self.needs(request)

    def _checked(self, request: AdmissionRequest) -> Keys:
        """Return the page keys of a request, which this node uses if it shares prefixes; raise unless it can be admitted now."""
        if missing := self.workers.missing():
            raise NotReadyError(f"this {self.role} daemon cannot admit a room now: {missing}")
        if request.room is not None:
            self.book.check_free(request.room, request.generation)
        if not request.page_hashes:
            return NO_KEYS
        keys = keys_of(request.page_hashes, request.prompt_tokens, self.geometry.tokens_per_page)
        return keys if self.settings.shares_prefixes else NO_KEYS

    def admit(self, request: AdmissionRequest, *, engine: AdmittingEngine = OVER_HTTP) -> RoomReport:
        """Reserve all or nothing. `engine`: the one that admits the room itself, if one does.

        Raises CapacityError, NotReadyError, ConflictError, InvalidInputError.
        """
        keys = self._checked(request)
        demand = self.needs(request)
        room = self.room_type(
            room=self.book.draw() if request.room is None else request.room,
            generation=request.generation,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            client=request.client,
            admitted_by=engine,
            state=self.table.start,
            created_s=self.clock(),
            ids=bound_ids(),
            keys=keys,
            namespace=request.namespace,
            retention=request.retention,
            trace=TRACE.get(),
        )
        self.pages.reserve(room, demand)
        self.book.add(room)
        self.show(room)
        self.admitted(room, request)
        return self.book.describe(room)

    async def fetch(self, request: AdmissionRequest) -> None:
        """Bring the stored part of a prompt here before the request is admitted. Raises all that `demand` does."""
        names = self._checked(request).in_namespace(request.namespace)
        self.needs(request)
        if self.store is not None:
            await self.store.prefetch(self.pages.shareable(names, request.prompt_tokens))

    async def drop_prefixes(self, *, stored: bool = True) -> DroppedPrefixes:
        """Forget every cached prefix, and if `stored` the objects of this model in the store; rooms under way keep their pages.

        Raises ConflictError where none are kept.
        """
        prefixes = self.pages.prefixes
        if prefixes is None:
            raise ConflictError(
                f"this {self.role} daemon keeps no prefixes: tier.enabled is false, or its engines bring memory"
            )
        dropped = prefixes.drop()
        self.events.emit(PrefixesDropped(pages=dropped.pages, read=dropped.read))
        store = None
        if self.store is not None:
            store = await self.store.drop() if stored else DroppedObjects(outcome="kept")
        return DroppedPrefixes(dropped_pages=dropped.pages, read_pages=dropped.read, store=store)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """Abort a room; harmless on a final one. Raises UnknownRoomError."""
        found = self.book.get(room)
        self.stop(found, reason)
        return self.book.describe(found)

    # ------------------------------------------------------------------ the state machine

    def stop(self, room: RoomT, reason: str, code: str = ABORTED) -> None:
        """Stop a room that is not wanted any more. Harmless on one that is over."""
        self.advance(room, self.ABORT, code, reason)

    def fail(self, room: RoomT, code: str, reason: str) -> None:
        """Fail a room that cannot complete. Harmless on one that is over."""
        self.advance(room, self.FAULT, code, reason)

    def miss(self, room: RoomT, limit: str) -> None:
        """Fail a room because nothing happened within `limit`."""
        room.missed = room.missed or limit
        what = "no prefill engine has begun it in time"
        if limit != room.begin_limit:
            what = f"it has waited too long for {room.waits_for}"
        self.fail(room, DeadlineError.code, f"{what} (limit: {limit})")

    def let_go(self, room: RoomT, engine: str) -> None:
        """Note that an engine does not use the pages of a room any more. Harmless for one that did not."""
        room.users.discard(engine)
        self.advance(room)

    def advance(self, room: RoomT, event: StrEnum | None = None, code: str = "", reason: str = "") -> None:
        """Run the actions of an event, if there is one, and of the events that follow from the room's fields, until none does.

        `code` and `reason` say why, for ABORT, FAULT and OTHER_PROMPT. Raises ConflictError when the event is not possible now.
        """
        event = event or self.next_event(room)
        while event is not None:
            state, actions = self.table.step(room.state, event)
            is_new = state is not room.state
            room.state = state
            if is_new:
                if event in {self.ABORT, self.FAULT, self.OTHER_PROMPT}:
                    room.blame(code, reason)
                self.entered(room)
            for action in actions:
                self.act(room, action)
            self.show(room)
            event = self.next_event(room)
        self.at_rest(room)

    def tick(self) -> None:
        """End the waits whose limit has passed, and forget old receipts."""
        now_s = self.clock()
        for room in self.book.due(now_s):
            if limit := room.late(now_s):
                self.late(room, limit)
        self.book.sweep()

    # ------------------------------------------------------------------ messages of peers and rank workers

    def look_up(self, who: str, message: RoomMessage) -> tuple[RoomT | None, Meaning | None]:
        """Return the room of a message and the meaning of the message, None when it is refused or late.

        `who`: the incarnation of a peer; empty for a rank worker of this node.
        """
        room = self.book.find(message.room, message.generation)
        speaker = self.speaker_of(room, who, message)
        meaning = self.hearing.meaning(None if room is None else room.state, speaker, message.type)
        if meaning is None:
            cause = "stale" if room is None or room.over else "foreign" if speaker is None else "unexpected"
            self.refuse_message(who, message, f"{cause}_{message.type}")
        return room, None if meaning is Meaning.LATE else meaning

    def refuse_message(self, peer: str, message: RoomMessage, code: str) -> None:
        """Count a message about a room that is ignored; `peer` is empty for a rank worker of this node."""
        rank = "" if peer else str(getattr(message, "rank", ""))
        self.events.emit(
            RoomMessageRefused(room=message.room, generation=message.generation, peer=peer, code=code, rank=rank)
        )

    # ------------------------------------------------------------------ events and answers

    def show(self, room: RoomT) -> None:
        """Wake the callers that wait for the room, and report a state that users see for the first time."""
        state = self.book.changed(room)
        if state is not None:
            self.events.emit(
                RoomEntered(
                    **room.identity,
                    state=state,
                    code=room.reason_code,
                    reason=room.reason,
                    limit=room.missed,
                    age_s=self.clock() - room.created_s,
                    **room.tokens,
                    bytes=sum(amount.bytes for amount in room.amounts.values()),
                    ids=room.ids,
                    trace=room.trace,
                )
            )

    def phases_ended(self, room: RoomT, phases_s: Mapping[str, float]) -> None:
        """Report the durations of phases of a room that are over."""
        self.events.emit(PhasesEnded(**room.identity, phases_s=phases_s, trace_id=exemplar(room.trace)))

    def event(self, room: RoomT) -> RoomEvent:
        """Return the event to engines about a room in its present state."""
        return RoomEvent(
            **room.about,
            kind=self.engine_words[room.state],
            **room.tokens,
            max_new_tokens=room.max_new_tokens,
            code=room.reason_code,
            reason=room.reason,
        )

    @staticmethod
    def answer(call: int, room: RoomT, **more: Any) -> Pages:  # noqa: ANN401 - further fields of the answer
        """Answer a call with a room's tables."""
        return Pages(
            call=call,
            **room.about,
            **room.tokens,
            host_tokens=room.host_tokens,
            tables=to_wire(room.tables),
            traceparent=room.trace.traceparent if room.trace is not None else "",
            **more,
        )

    # ------------------------------------------------------------------ engines

    def abort(self, engine: AttachedEngine, message: AbortRoom) -> None:
        """Stop a room that an engine gives up and does not use any more. Harmless on one that is over or forgotten."""
        if not self.book.attempts(message.room):
            return
        room = self.book.used_by(engine.name, message.room)
        room.users.discard(engine.name)
        if message.load_failed:
            self.pages.load_ended(room, code=TransportError.code, reason=message.reason)
        reason = f"by the {self.role} engine: {message.reason}"
        if message.again:
            self.fail(room, WITHDRAWN, reason)
        else:
            self.stop(room, reason)

    def require_same_prompt(self, room: RoomT, said: Begin | Claim, end_keys: Iterable[bytes]) -> None:
        """Fail a room whose engine has other tokens than its keys name, and raise KeyMismatchError.

        `end_keys`: as other engines of the room have stated them. Raises InvalidInputError, and the room goes on, when the room has
        keys and the engine states none, or another number.
        """
        page, why = room.differing_page(said, self.geometry.tokens_per_page, end_keys)
        if why:
            why = f"the {self.role} engine's {why}"
            room.disputed_page = page
            self.advance(room, self.OTHER_PROMPT, KeyMismatchError.code, why)
            raise KeyMismatchError(f"room {room.room}: {why}")

    def engine_gone(self, engine: str, reason: str, *, followed: bool = True) -> bool:
        """Fail the rooms that need an engine whose connection has ended.

        Returns whether pages wait for `engine_ended`; `followed`: whether that will come.
        """
        waits = False
        for room in self.book:
            uses = engine in room.users
            if room.lose(engine):
                why = f"the {self.role} engine {engine} is gone: {reason}"
                self.fail(room, PeerError.code, why)
            if uses:
                waits = True
                self.pages.await_process(room, engine, followed=followed)
            self.advance(room)
        return waits

    def engine_ended(self, engine: str) -> None:
        """Let go of the pages that an engine had: its process has ended, or it said so before it left."""
        for room in self.book:
            if engine in room.departed:
                room.departed.discard(engine)
                self.let_go(room, engine)

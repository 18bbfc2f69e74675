"""All rooms of a node, for everybody who has to do with rooms of either side.

Owns: how a room moves forward (an event is looked up, its actions are carried out, the facts amount to the next event), and what
users, admission, engines and time may do to rooms, where both sides do it alike. Must not know: which side it is on, sockets, HTTP.

An engine names a room without its generation. It means the attempt that it uses, else the newest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

from kvbridge.api.rooms import AdmissionRequest, RoomPage, RoomQuery, RoomReport
from kvbridge.config.timeouts import DaemonTimeouts
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import DeadlineError, NotReadyError, PeerError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.geometry.tables import check_demand, request_tables
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.machine import Table
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import RoomMessage
from kvbridge.node.admission.pressure import Reservation
from kvbridge.node.engines import AttachedEngines
from kvbridge.node.room import Quarantine, Room, quarantine
from kvbridge.node.room_book import RoomBook
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.telemetry.context import TRACE, bound_ids, exemplar
from kvbridge.telemetry.events import EventStream, PhasesEnded, RoomEntered, RoomMessageRefused, RoomQuarantined

ABORTED = "aborted"
"""Code of rooms that somebody wanted stopped."""
WORKER_GONE = "worker_gone"

RoomT = TypeVar("RoomT", bound=Room[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPorts:
    """What a room of either side touches."""

    book: PageBook
    workers: WorkerSet
    engines: AttachedEngines
    events: EventStream


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomSettings:
    """What is the same for all rooms of a node."""

    geometry: ModelGeometry
    limits: DaemonTimeouts
    adopted: bool = False
    """Engines bring the device memory and name its pages; otherwise pages are reserved at admission."""
    host: frozenset[ComponentKind] = frozenset()
    """Decode: the components that live in the host pool."""
    digest: DigestKind = DigestKind.NONE
    """Decode: what writers are asked to compute, our ranks compute once everything has arrived, and a room commits by."""


class Rooms(ABC, Generic[RoomT]):
    """The rooms of one role. Called from the event loop's thread only."""

    role: ClassVar[Role]
    room_type: ClassVar[Any]
    """The role's kind of Room."""
    table: ClassVar[Table[Any, Any, Any]]
    ABORT: ClassVar[Any]
    FAULT: ClassVar[Any]
    """The events by which others end a room."""
    engine_words: ClassVar[Mapping[Any, str]]
    """What engines are told, by the state that the room is in."""

    def __init__(self, ports: RoomPorts, settings: RoomSettings, *, clock: Clock = monotonic) -> None:
        self.rooms: RoomBook[RoomT] = RoomBook(
            self.role, self._user_state, clock=clock, keep_s=settings.limits.room_keep_s
        )
        self._ports = ports
        self._geometry = settings.geometry
        self._limits = settings.limits
        self._settings = settings
        self._clock = clock

    @staticmethod
    @abstractmethod
    def _user_state(room: RoomT) -> RoomState:
        """What users see of a room."""

    # ------------------------------------------------------------------ from an event to the next

    def stop(self, room: RoomT, reason: str, code: str = ABORTED) -> None:
        """Somebody wants the room stopped. Harmless on one that is over."""
        self.advance(room, self.ABORT, code, reason)

    def fail(self, room: RoomT, code: str, reason: str) -> None:
        """The room cannot be completed. Harmless on one that is over."""
        self.advance(room, self.FAULT, code, reason)

    def miss(self, room: RoomT, limit: str) -> None:
        """The room cannot be completed, because nothing happened within `limit`."""
        room.missed = room.missed or limit
        self.fail(room, DeadlineError.code, room.why_late(limit))

    def advance(self, room: RoomT, event: StrEnum | None = None, code: str = "", reason: str = "") -> None:
        """Do what an event leads to, if any, and then what the room's facts do, until nothing more follows from them.

        `code` and `reason` say why, for ABORT and FAULT. Raises ConflictError when the event is not possible now.
        """
        event = event or self._next_event(room)
        while event is not None:
            self._step(room, event, code, reason)
            event = self._next_event(room)
        self._at_rest(room)

    def _step(self, room: RoomT, event: StrEnum, code: str, reason: str) -> None:
        state, actions = self.table.step(room.state, event)
        entered = state is not room.state
        room.state = state
        if entered:
            if event in {self.ABORT, self.FAULT}:
                room.blame(code, reason)
            self._entered(room)
        for action in actions:
            self._act(room, action)
        self.show(room)

    @staticmethod
    @abstractmethod
    def _next_event(room: RoomT) -> StrEnum | None:
        """What the facts about a room amount to in its present state. Changes nothing."""

    @abstractmethod
    def _entered(self, room: RoomT) -> None:
        """A room has come into another state: another wait begins."""

    @abstractmethod
    def _act(self, room: RoomT, action: StrEnum) -> None:
        """Carry an action of the table out."""

    @abstractmethod
    def _at_rest(self, room: RoomT) -> None:
        """Nothing follows from the facts now: see to what the room waits for."""

    @abstractmethod
    def late(self, room: RoomT, limit: str) -> None:
        """The present wait of a room is over; `limit` is its name."""

    def show(self, room: RoomT) -> None:
        """Wake who waits for the room, and tell of a state that users see for the first time."""
        state = self.rooms.changed(room)
        if state is not None:
            self._ports.events.emit(
                RoomEntered(
                    **room.identity,
                    state=state,
                    code=room.reason_code,
                    reason=room.reason,
                    limit=room.missed,
                    age_s=self._clock() - room.created_s,
                    prompt_tokens=room.prompt_tokens,
                    bytes=sum(amount.bytes for amount in room.amounts.values()),
                    ids=room.ids,
                    trace=room.trace,
                )
            )

    def phases_ended(self, room: RoomT, phases_s: Mapping[str, float]) -> None:
        """Say how long phases of a room took that are over."""
        self._ports.events.emit(PhasesEnded(**room.identity, phases_s=phases_s, trace_id=exemplar(room.trace)))

    def tell_engine(self, room: RoomT) -> None:
        """Tell every engine where the room stands."""
        self._ports.engines.push(self.event(room))

    def event(self, room: RoomT) -> RoomEvent:
        """What engines are told of a room in its present state."""
        return RoomEvent(
            room=room.room,
            generation=room.generation,
            kind=self.engine_words[room.state],
            prompt_tokens=room.prompt_tokens,
            max_new_tokens=room.max_new_tokens,
            code=room.reason_code,
            reason=room.reason,
        )

    def quarantine(self, room: RoomT, cause: Quarantine, why: str) -> None:
        """Keep the pages of a room from everybody, and say why. Harmless when that was said before."""
        if quarantine(self._ports.book, room, cause, why):
            self._ports.events.emit(RoomQuarantined(**room.identity, cause=cause, reason=why))

    def await_process(self, room: RoomT, engine: str, *, followed: bool) -> None:
        """Note that only the end of an engine's process proves that it uses no page any more: its connection has ended.

        `followed`: that end will be seen. Otherwise the pages are quarantined at once, since nobody will say when they are free.
        """
        room.departed.add(engine)
        if not followed:
            why = (
                f"engine {engine} has left without letting go of it, and the end of its process cannot be seen from here (it is "
                "in another pid namespace); when you know that it has ended, restart this daemon to have the pages back"
            )
            self.quarantine(room, Quarantine.ENGINE_ALIVE, why)

    def quarantine_used(self, room: RoomT, limit: str) -> None:
        """Keep pages that engines have not let go of in time from everybody, and say whether they could."""
        departed = sorted(room.users & room.departed)
        if departed:
            why = f"engines {', '.join(departed)} have left, and their processes have not ended (limit: {limit}); end them"
            self.quarantine(room, Quarantine.ENGINE_ALIVE, why)
        else:
            why = f"engines {', '.join(sorted(room.users))} have not let go of it (limit: {limit})"
            self.quarantine(room, Quarantine.NOT_RELEASED, why)

    def refuse_message(self, peer: str, message: RoomMessage, code: str) -> None:
        """Say that a peer's message about a room is ignored."""
        fact = RoomMessageRefused(room=message.room, generation=message.generation, peer=peer, code=code)
        self._ports.events.emit(fact)

    # ------------------------------------------------------------------ admission

    def missing(self) -> str:
        """Why no room can be admitted now whatever is free, or an empty text."""
        return self._ports.workers.missing()

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Pages that a request takes of the spaces that this node gives out.

        Raises all that `admit` does, but CapacityError for pages that are not free.
        """
        if missing := self.missing():
            raise NotReadyError(f"this {self.role} daemon cannot admit a room now: {missing}")
        if request.room is not None:
            self.rooms.check_free(request.room, request.generation)
        return self._demand(request)

    @abstractmethod
    def _demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """See `demand`: what the role makes of it."""

    def _pages_needed(self, tokens: int, prompt_tokens: int) -> dict[IndexSpace, int]:
        """Pages to give out for `tokens` tokens. Raises InvalidInputError when the pools are too small for them ever to be free."""
        needed = pages_needed(self._geometry, tokens=tokens, prompt_tokens=prompt_tokens, host=self._settings.host)
        check_demand(needed)
        self._ports.book.require_possible(needed)
        if self._settings.adopted:
            return {space: count for space, count in needed.items() if space is IndexSpace.HOST}
        return needed

    def admit(self, request: AdmissionRequest) -> RoomReport:
        """Reserve all or nothing. Raises CapacityError, NotReadyError, ConflictError, InvalidInputError."""
        demand = self.demand(request)
        room: RoomT = self.room_type(
            room=self.rooms.draw() if request.room is None else request.room,
            generation=request.generation,
            prompt_tokens=request.prompt_tokens,
            prefix_tokens=0,
            max_new_tokens=request.max_new_tokens,
            client=request.client,
            state=self.table.start,
            created_s=self._clock(),
            ids=bound_ids(),
            trace=TRACE.get(),
        )
        ids = self._ports.book.reserve(room.owner, demand, state=PageState.HELD)
        room.tables = request_tables(self._geometry, ids, prompt_tokens=room.prompt_tokens)
        self.rooms.add(room)
        self.show(room)
        self._admitted(room, request)
        return self.rooms.report(room)

    @abstractmethod
    def _admitted(self, room: RoomT, request: AdmissionRequest) -> None:
        """A room is there, with the pages that this node gives out: its first wait begins."""

    def in_use(self) -> Mapping[str, int]:
        """Rooms that have not ended, or have not given everything back, by client."""
        return self.rooms.in_use

    def not_begun(self) -> list[Reservation]:
        """What rooms have that end unless a prefill engine begins them, those that end first in front."""
        return self.rooms.not_begun()

    # ------------------------------------------------------------------ users and operators

    def report(self, room: int) -> RoomReport:
        """Describe the newest attempt. Raises UnknownRoomError."""
        return self.rooms.report(self.rooms.get(room))

    def page(self, query: RoomQuery) -> RoomPage:
        """List rooms, the oldest first: those under way and the receipts that are kept."""

        def wanted(room: RoomT) -> bool:
            return (
                (not query.states or self._user_state(room) in query.states)
                and (query.client is None or room.client == query.client)
                and (not query.peer or any(query.peer in {peer, peer.partition("/")[0]} for peer in room.peers))
            )

        found, following = self.rooms.page(wanted, after=query.after, limit=query.limit)
        return RoomPage(rooms=tuple(map(self.rooms.report, found)), next=following)

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """Return when the room is in one of the states or final, or with its present state after `timeout_s`."""
        return await self.rooms.wait(room, timeout_s, until)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """Abort a room; harmless on a final one. Raises UnknownRoomError."""
        found = self.rooms.get(room)
        self.stop(found, reason)
        return self.rooms.report(found)

    def open(self) -> list[int]:
        """Rooms that have not ended."""
        return [room.room for room in self.rooms.open()]

    def states(self) -> dict[str, int]:
        """Count rooms by what users see."""
        return self.rooms.states()

    def quarantined(self) -> dict[str, int]:
        """Count rooms whose pages are quarantined, by cause."""
        return self.rooms.quarantined()

    # ------------------------------------------------------------------ engines

    def abort(self, engine: str, room_id: int, reason: str) -> None:
        """An engine gives a room up, and does not use its pages any more. Harmless on an ended room."""
        room = self.rooms.used_by(engine, room_id)
        room.let_go(engine)
        self.stop(room, f"by the {self.role} engine: {reason}")

    def engine_gone(self, engine: str, reason: str, *, followed: bool = True) -> bool:
        """An engine's connection has ended: rooms that need it fail.

        Returns whether pages wait for `engine_ended`; `followed`: whether that will come.
        """
        waits = False
        for room in self.rooms:
            uses = engine in room.users
            if room.lose(engine):
                why = f"the {self.role} engine {engine} is gone: {reason}"
                self.fail(room, PeerError.code, why)
            if uses:
                waits = True
                self.await_process(room, engine, followed=followed)
            self.advance(room)
        return waits

    def engine_ended(self, engine: str) -> None:
        """Nothing of an engine that is gone uses a page any more: its process has ended, or it said so before it left."""
        for room in self.rooms:
            if engine in room.departed:
                room.departed.discard(engine)
                self._let_go(room, engine)

    def _let_go(self, room: RoomT, engine: str) -> None:
        room.let_go(engine)
        self.advance(room)

    # ------------------------------------------------------------------ time

    def tick(self) -> None:
        """Fail what has waited too long, forget what has been kept long enough."""
        now_s = self._clock()
        for room in self.rooms:
            limit = room.late(now_s)
            if limit:
                self.late(room, limit)
        self.rooms.sweep()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.rooms.states()}>"

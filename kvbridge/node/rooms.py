"""What users and engines may do to the rooms of a node, where both sides do it alike.

An engine names a room without its generation. It means the attempt that it uses, else the newest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol

from kvbridge.api.rooms import AdmissionRequest, DroppedObjects, DroppedPrefixes, RoomReport
from kvbridge.core.clock import Clock
from kvbridge.core.errors import ConflictError, NotReadyError, PeerError
from kvbridge.core.ids import IndexSpace
from kvbridge.core.session.states import WITHDRAWN
from kvbridge.core.wire.engine_messages import AbortRoom, Call, Pages, Restorable, RoomEvent
from kvbridge.node.driver import Deadlines, RoomDriver, RoomT
from kvbridge.node.engines import AttachedEngine, AttachedEngines
from kvbridge.node.prompt_keys import keys_of
from kvbridge.node.room import AdmittingEngine
from kvbridge.node.room_book import RoomBook
from kvbridge.node.room_pages import RoomPages
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.book import PageBook
from kvbridge.telemetry.context import TRACE, bound_ids
from kvbridge.telemetry.events import PrefixesDropped
from kvbridge.telemetry.stream import EventStream
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache

EngineCalls = Mapping[type[Call], Callable[[AttachedEngine, Any], Pages | Restorable | None]]
"""Who carries out each call of an engine; what is not listed, a node of this role does not know. No answer is Accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomPorts:
    """What a room of either side touches."""

    book: PageBook
    workers: WorkerSet
    engines: AttachedEngines
    events: EventStream
    prefixes: PrefixCache | None = None
    """None: the node shares nothing."""
    store: StoredPrefixes | None = None
    """None: it has no store below host memory."""


class AdmittingSide(Protocol[RoomT]):
    """What a role makes of a request."""

    room_type: type[RoomT]

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Pages that a request takes of the spaces that this node gives out. Raises InvalidInputError."""

    def admitted(self, room: RoomT, request: AdmissionRequest) -> None:
        """A room is there, with the pages that this node gives out: its first wait begins."""


@dataclass(frozen=True, slots=True)
class RoomRequests(Generic[RoomT]):
    """What users ask of a node. Called from the event loop's thread only."""

    rooms: RoomBook[RoomT]
    driver: RoomDriver[RoomT]
    pages: RoomPages
    workers: WorkerSet
    side: AdmittingSide[RoomT]
    clock: Clock
    store: StoredPrefixes | None = None
    """None: nothing is stored."""

    def missing(self) -> str:
        """Why no room can be admitted now whatever is free, or an empty text."""
        return self.workers.missing()

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Pages that a request takes of the spaces that this node gives out.

        Raises all that `admit` does, but CapacityError for pages that are not free.
        """
        if missing := self.missing():
            raise NotReadyError(f"this {self.rooms.role} daemon cannot admit a room now: {missing}")
        if request.room is not None:
            self.rooms.check_free(request.room, request.generation)
        self._keys(request)
        return self.side.demand(request)

    def admit(self, request: AdmissionRequest, *, engine: AdmittingEngine | None = None) -> RoomReport:
        """Reserve all or nothing; `engine`: whose own room it is, if it is one's.

        Raises CapacityError, NotReadyError, ConflictError, InvalidInputError.
        """
        demand = self.demand(request)
        room = self.side.room_type(
            room=self.rooms.draw() if request.room is None else request.room,
            generation=request.generation,
            prompt_tokens=request.prompt_tokens,
            prefix_tokens=0,
            max_new_tokens=request.max_new_tokens,
            client=request.client,
            admitted_by=engine.name if engine else "",
            prompt_digest=engine.prompt_digest if engine else b"",
            held=engine.held if engine else False,
            state=self.driver.rules.table.start,
            created_s=self.clock(),
            ids=bound_ids(),
            keys=self._keys(request),
            namespace=request.namespace,
            retention=request.retention,
            trace=TRACE.get(),
        )
        self.pages.reserve(room, demand)
        self.rooms.add(room)
        self.driver.facts.show(room)
        self.side.admitted(room, request)
        return self.rooms.describe(room)

    def _keys(self, request: AdmissionRequest) -> Keys:
        settings = self.pages.settings
        if not request.page_hashes:
            return Keys()
        keys = keys_of(request.page_hashes, request.prompt_tokens, settings.geometry.tokens_per_page)
        return keys if settings.shares_prefixes else Keys()

    async def fetch(self, request: AdmissionRequest) -> None:
        """Have what is stored of a prompt brought here, before it is admitted. Raises all that `demand` does."""
        self.demand(request)
        if self.store is not None:
            names = self._keys(request).in_namespace(request.namespace)
            await self.store.prefetch(self.pages.shareable(names, request.prompt_tokens))

    async def drop_prefixes(self, *, stored: bool = True) -> DroppedPrefixes:
        """Forget every cached prefix, and if `stored` what the store has of this model; rooms under way keep what they read.

        Raises ConflictError where none are kept.
        """
        prefixes = self.pages.prefixes
        if prefixes is None:
            raise ConflictError(
                f"this {self.rooms.role} daemon keeps no prefixes: tier.enabled is false, or its engines bring memory"
            )
        dropped = prefixes.drop()
        self.pages.events.emit(PrefixesDropped(pages=dropped.pages, read=dropped.read))
        store = None
        if self.store is not None:
            store = await self.store.drop() if stored else DroppedObjects(outcome="kept")
        return DroppedPrefixes(dropped_pages=dropped.pages, read_pages=dropped.read, store=store)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """Abort a room; harmless on a final one. Raises UnknownRoomError."""
        found = self.rooms.get(room)
        self.driver.stop(found, reason)
        return self.rooms.describe(found)


@dataclass(frozen=True, slots=True)
class RoomEngines(Generic[RoomT]):
    """What engines do to rooms of either side."""

    rooms: RoomBook[RoomT]
    driver: RoomDriver[RoomT]
    pages: RoomPages
    waiting: frozenset[StrEnum] = frozenset()
    """States in which a room waits for an engine."""

    def abort(self, engine: AttachedEngine, message: AbortRoom) -> None:
        """An engine gives a room up, and does not use its pages any more. Harmless on one that is over, or even forgotten."""
        if not self.rooms.attempts(message.room):
            return
        room = self.rooms.used_by(engine.name, message.room)
        room.let_go(engine.name)
        if message.load_failed:
            self.pages.load_failed(room, message.reason)
        reason = f"by the {self.rooms.role} engine: {message.reason}"
        if message.again:
            self.driver.fail(room, WITHDRAWN, reason)
        else:
            self.driver.stop(room, reason)

    def open_events(self) -> list[RoomEvent]:
        """What an engine that attaches now would have been told, had it been there before."""
        return [self.driver.facts.event(room) for room in self.rooms if room.state in self.waiting]

    def gone(self, engine: str, reason: str, *, followed: bool = True) -> bool:
        """An engine's connection has ended: rooms that need it fail.

        Returns whether pages wait for `ended`; `followed`: whether that will come.
        """
        waits = False
        for room in self.rooms:
            uses = engine in room.users
            if room.lose(engine):
                why = f"the {self.rooms.role} engine {engine} is gone: {reason}"
                self.driver.fail(room, PeerError.code, why)
            if uses:
                waits = True
                self.pages.await_process(room, engine, followed=followed)
            self.driver.advance(room)
        return waits

    def ended(self, engine: str) -> None:
        """Nothing of an engine that is gone uses a page any more: its process has ended, or it said so before it left."""
        for room in self.rooms:
            if engine in room.departed:
                room.departed.discard(engine)
                self.driver.let_go(room, engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rooms(Generic[RoomT]):
    """The rooms of a node, by who has to do with them."""

    book: RoomBook[RoomT]
    driver: RoomDriver[RoomT]
    requests: RoomRequests[RoomT]
    engines: RoomEngines[RoomT]
    calls: EngineCalls
    deadlines: Deadlines[RoomT]

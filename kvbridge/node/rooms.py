"""What both sides keep about a room, and who waits for it.

Owns: `Room` (facts common to both sides), `RoomBook` (every room of a daemon by its id, waiters, receipts of ended
rooms). Must not know: which side it is on, messages, pages of memory.

One room id names one attempt at a time. A second admission of an id that is still in flight is a conflict; after it
ended, the same id may be used again with a higher generation only, so that late messages of the first attempt can be
told apart. An attempt that has ended for users may still wait for the proof that its pages are quiet: it is kept
beside its successor until then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import structlog

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.core.clock import Clock
from kvbridge.core.errors import ConflictError, NotReadyError, RoomFailedError, StaleError, UnknownRoomError
from kvbridge.core.ids import ROOM_BITS, IndexSpace, Role, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.node.admission.pressure import Reservation
from kvbridge.pool.accounts.book import Owner, PageBook, PageState

log = structlog.get_logger(__name__)

StateT = TypeVar("StateT", bound=StrEnum)


class Quarantine(StrEnum):
    """Why a room's pages stay away from everybody, in one word."""

    NOT_QUIET = "transport_not_quiet"
    """Prefill: a transport of ours may still read them."""
    WRITER_SHUT_OUT = "writer_being_shut_out"
    """Decode: a writer gives no proof that it has stopped, or something that it has sent may still arrive."""
    NOT_RELEASED = "engine_not_released"
    """An engine has not let go of them."""
    ENGINE_ALIVE = "engine_process_alive"
    """An engine has left without letting go of them, and its process has not ended, as far as can be seen."""


@dataclass(eq=False)
class Room(Generic[StateT]):
    """One attempt at one request on this node. Written by its service only."""

    room: int
    generation: int
    prompt_tokens: int
    prefix_tokens: int
    max_new_tokens: int
    client: str
    state: StateT
    created_s: float
    tables: Tables = field(default_factory=dict)
    reason_code: str = ""
    reason: str = ""
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    deadline_s: float | None = None
    """When the present wait counts as failed, on the service's clock."""
    deadline_name: str = ""
    """The configuration key of that wait."""
    begin_by_s: float | None = None
    """Until then a prefill engine has to begin the room, on the service's clock; None once that does not matter any more."""
    begin_limit: str = ""
    """Who set that limit: a configuration key, or a field of the admission."""
    shown: RoomState | None = None
    """The state that users were told of last."""
    quarantine: Quarantine | None = None
    """Why its pages are quarantined, while they are."""
    departed: set[str] = field(default_factory=set)
    """Engines that may use its pages, whose connection has ended and whose process has not."""

    @property
    def owner(self) -> Owner:
        """The key under which pages are booked."""
        return Owner(self.room, self.generation)

    def blame(self, code: str, reason: str) -> None:
        """Keep the first cause; what others wrote is cut to a length that every message can carry."""
        if not self.reason_code:
            self.reason_code = code[:200] or RoomFailedError.code
            self.reason = reason[:REASON_CHARS]

    def wait_until(self, deadline_s: float | None, name: str = "") -> None:
        """Start another wait (None: no limit)."""
        self.deadline_s, self.deadline_name = deadline_s, name

    def begin_within(self, within_s: float | None, *, or_else: tuple[float, str] | None = None) -> None:
        """Limit the wait for a prefill engine, from the room's creation, by its admission's word or as named."""
        limit = (within_s, "begin_within_s") if within_s is not None else or_else
        if limit is not None:
            self.begin_by_s, self.begin_limit = self.created_s + limit[0], limit[1]

    @property
    def next_limit(self) -> tuple[float | None, str]:
        """What ends the room first unless something happens: when, on the service's clock, and the limit's name."""
        if self.begin_by_s is not None and (self.deadline_s is None or self.begin_by_s <= self.deadline_s):
            return self.begin_by_s, self.begin_limit
        return self.deadline_s, self.deadline_name

    def late(self, now_s: float) -> str:
        """Return the name of the limit that has passed, once; empty when none has."""
        limit_s, name = self.next_limit
        if limit_s is None or now_s < limit_s:
            return ""
        if limit_s == self.begin_by_s:
            self.begin_by_s = None
        else:
            self.wait_until(None)
        return name

    def why_late(self, limit: str) -> str:
        """Return what did not happen within a limit that `late` has returned."""
        what = f"nothing happened in time in state '{self.state}'"
        if limit == self.begin_limit:
            what = "no prefill engine has begun it in time"
        return f"{what} (limit: {limit})"


def quarantine(book: PageBook, room: Room[StateT], cause: Quarantine, why: str) -> None:
    """Keep the pages of a room from everybody until `give_back`, and say why. Harmless when that was said before."""
    if room.owner not in book or room.quarantine is cause:
        return
    log.error("room_quarantined", room=room.room, generation=room.generation, cause=cause, reason=why)
    room.quarantine = cause
    book.quarantine(room.owner, f"{room.owner}: {why}")


def await_process(book: PageBook, room: Room[StateT], engine: str, *, followed: bool) -> None:
    """Note that an engine's connection has ended, and that only the end of its process proves that it uses no page any more.

    `followed`: that end will be seen. Otherwise the pages are quarantined at once, since nobody will say when they are free.
    """
    room.departed.add(engine)
    if not followed:
        why = (
            f"engine {engine} has left without letting go of it, and the end of its process cannot be seen from here (it is in "
            "another pid namespace); when you know that it has ended, restart this daemon to have the pages back"
        )
        quarantine(book, room, Quarantine.ENGINE_ALIVE, why)


def quarantine_used(book: PageBook, room: Room[StateT], engines: set[str], limit: str) -> None:
    """Keep pages that engines have not let go of in time from everybody, and say whether they could."""
    departed = sorted(engines & room.departed)
    if departed:
        why = f"engines {', '.join(departed)} have left, and their processes have not ended (limit: {limit}); end them"
        quarantine(book, room, Quarantine.ENGINE_ALIVE, why)
    else:
        why = f"engines {', '.join(sorted(engines))} have not let go of it (limit: {limit})"
        quarantine(book, room, Quarantine.NOT_RELEASED, why)


def require_ready(role: Role, missing: str) -> None:
    """Raise NotReadyError when something is missing that every room needs."""
    if missing:
        raise NotReadyError(f"this {role} daemon cannot admit a room now: {missing}")


def give_back(book: PageBook, room: Room[StateT]) -> None:
    """Free the pages of a room, given proof that nobody touches them any more; harmless when it has none."""
    owner, room.quarantine = room.owner, None
    match book.state(owner):
        case PageState.LEASED:
            book.move(owner, PageState.LEASED, PageState.HELD)
            book.free(owner)
        case PageState.HELD:
            book.free(owner)
        case PageState.QUARANTINED:
            # A room's reasons begin with its name, so they are nobody else's.
            for reason, owners in book.quarantine_reasons().items():
                if owners == (owner,):
                    book.release_quarantined(reason)
        case PageState.FREE:
            pass


class Rooms(Protocol):
    """The rooms of one role, for all that have to do with rooms of either."""

    def missing(self) -> str:
        """Why no room can be admitted now whatever is free, or an empty text."""

    def demand(self, request: AdmissionRequest) -> dict[IndexSpace, int]:
        """Pages that a request takes of the spaces that this node gives out.

        Raises all that `admit` does, but CapacityError for pages that are not free.
        """

    def admit(self, request: AdmissionRequest) -> RoomReport:
        """Reserve all or nothing. Raises CapacityError, NotReadyError, ConflictError, InvalidInputError."""

    def in_use(self) -> Mapping[str, int]:
        """Rooms that have not ended, or have not given everything back, by client."""

    def not_begun(self) -> Sequence[Reservation]:
        """What rooms have that end unless a prefill engine begins them, those that end first in front."""

    def report(self, room: int) -> RoomReport:
        """Describe the newest attempt. Raises UnknownRoomError."""

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """Return when the room is in one of the states or final, or with its present state after `timeout_s`."""

    async def cancel(self, room: int, reason: str) -> RoomReport:
        """Abort a room; harmless on a final one. Raises UnknownRoomError."""

    def open(self) -> list[int]:
        """Rooms that have not ended."""

    def states(self) -> dict[str, int]:
        """Count rooms by what users see."""

    def quarantined(self) -> dict[str, int]:
        """Count rooms whose pages are quarantined, by cause."""

    def engine_gone(self, engine: str, reason: str, *, followed: bool = True) -> bool:
        """An engine's connection has ended: rooms that it used fail.

        Returns whether pages wait for `engine_ended`; `followed`: whether that will come.
        """

    def engine_ended(self, engine: str) -> None:
        """Nothing of an engine that is gone uses a page any more: its process has ended, or it said so before it left."""

    def tick(self) -> None:
        """Fail what has waited too long, forget what has been kept long enough."""


RoomT = TypeVar("RoomT", bound=Room)  # type: ignore[type-arg]


class RoomBook(Generic[RoomT]):
    """Every room of a daemon. Used from the event loop's thread only.

    Iterating gives the rooms of which something is left to be done. Those that have ended are found by their id, and are not
    looked at otherwise: there are thousands of them, and deadlines, engines and peers are looked through often.
    """

    def __init__(
        self,
        role: Role,
        describe_state: Callable[[RoomT], RoomState],
        *,
        clock: Clock,
        keep_s: float,
        keep_rooms: int = 10_000,
    ) -> None:
        """`describe_state` maps a room to what users see; ended rooms are kept `keep_s`, `keep_rooms` at most."""
        self._role = role
        self._describe_state = describe_state
        self._clock = clock
        self._keep_s = keep_s
        self._keep_rooms = keep_rooms
        self._attempts: dict[int, list[RoomT]] = {}
        self._live: dict[RoomT, None] = {}
        self._ended: deque[tuple[float, RoomT, RoomState]] = deque()
        self._ended_states: Counter[RoomState] = Counter()
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self.in_use: Counter[str] = Counter()
        """Rooms that have not ended, or have not given everything back, by client."""

    def __len__(self) -> int:
        return len(self._live) + len(self._ended)

    def __iter__(self) -> Iterator[RoomT]:
        return iter(tuple(self._live))

    def open(self) -> list[RoomT]:
        """Return the rooms that have not ended for users."""
        return [room for room in self if not self._describe_state(room).final]

    def draw(self) -> int:
        """Return an id that no room of this daemon has; never 0."""
        while True:
            room = secrets.randbits(ROOM_BITS)
            if room and room not in self._attempts:
                return room

    def check_free(self, room: int, generation: int) -> None:
        """Raise ConflictError or StaleError unless (room, generation) may be admitted now."""
        if room not in self._attempts:
            return
        known = self.get(room)
        if not self._describe_state(known).final:
            raise ConflictError(
                f"room {room} is already in flight here (generation {known.generation}, state '{known.state}')"
            )
        if generation <= known.generation:
            raise StaleError(
                f"room {room} generation {generation} has already ended here ({self._describe_state(known)}); "
                f"use generation {known.generation + 1} or another room id"
            )

    def add(self, room: RoomT) -> None:
        """Take a room in; `check_free` has been called."""
        self._attempts.setdefault(room.room, []).append(room)
        self._live[room] = None
        self.in_use[room.client] += 1

    def get(self, room: int) -> RoomT:
        """Return the newest attempt of a room. Raises UnknownRoomError."""
        attempts = self._attempts.get(room)
        if not attempts:
            raise UnknownRoomError(
                f"room {room} is not known to this {self._role} daemon (never admitted, or ended and forgotten)"
            )
        return attempts[-1]

    def attempts(self, room: int) -> tuple[RoomT, ...]:
        """Return every attempt that is still known, the oldest first."""
        return tuple(self._attempts.get(room, ()))

    def choose(self, room: int, wanted: Callable[[RoomT], bool]) -> RoomT:
        """Return the oldest attempt that is `wanted`, or the newest when none is. Raises UnknownRoomError."""
        newest = self.get(room)
        return next(filter(wanted, self._attempts[room]), newest)

    def find(self, room: int, generation: int) -> RoomT | None:
        """Return the room if this very attempt is known."""
        return next((found for found in self._attempts.get(room, ()) if found.generation == generation), None)

    def newest_generation(self, room: int) -> int:
        """Return the newest generation seen of a room, 0 when it is unknown."""
        attempts = self._attempts.get(room)
        return attempts[-1].generation if attempts else 0

    def changed(self, room: RoomT) -> RoomState | None:
        """Wake everybody who waits for the room; returns the state that users see now if it is another than before."""
        for waiter in self._waiters.pop(room.room, []):
            if not waiter.done():
                waiter.set_result(None)
        state = self._describe_state(room)
        if state is room.shown:
            return None
        room.shown = state
        return state

    def ended(self, room: RoomT) -> None:
        """Keep the room's receipt for a while. Called once, when nothing of the room is left to be done."""
        self.in_use[room.client] -= 1
        if not self.in_use[room.client]:
            del self.in_use[room.client]
        state = self._describe_state(room)
        del self._live[room]
        self._ended.append((self._clock() + self._keep_s, room, state))
        self._ended_states[state] += 1
        self.sweep()

    def sweep(self) -> None:
        """Forget receipts that have been kept long enough, and the oldest when there are too many."""
        now_s = self._clock()
        while self._ended and (self._ended[0][0] <= now_s or len(self._ended) > self._keep_rooms):
            _, room, state = self._ended.popleft()
            self._ended_states[state] -= 1
            attempts = self._attempts[room.room]
            attempts.remove(room)
            if not attempts:
                del self._attempts[room.room]

    def report(self, room: RoomT) -> RoomReport:
        """Describe a room for users."""
        now_s = self._clock()
        limit_s, limit = room.next_limit
        return RoomReport(
            room=room.room,
            generation=room.generation,
            role=self._role,
            state=self._describe_state(room),
            prompt_tokens=room.prompt_tokens,
            prefix_tokens=room.prefix_tokens,
            reason_code=room.reason_code,
            reason=room.reason,
            amounts=room.amounts,
            phases_s=room.phases_s,
            age_s=now_s - room.created_s,
            expires_in_s=None if limit_s is None else max(0.0, limit_s - now_s),
            limit=limit,
        )

    def not_begun(self) -> list[Reservation]:
        """Return what rooms have that end unless a prefill engine begins them, those that end first in front."""
        now_s = self._clock()
        found = [
            Reservation(
                room.begin_by_s - now_s, {space: len(table) for space, table in room.tables.items()}, room.client
            )
            for room in self._live
            if room.begin_by_s is not None
        ]
        return sorted(found, key=lambda reservation: reservation.ends_in_s)

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """Return the report once the state is in `until` or final, or whatever it is after `timeout_s`."""
        deadline_s = self._clock() + timeout_s
        while True:
            found = self.get(room)
            state = self._describe_state(found)
            left_s = deadline_s - self._clock()
            if state in until or state.final or left_s <= 0:
                return self.report(found)
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(room, []).append(waiter)
            try:
                await asyncio.wait_for(waiter, left_s)
            except TimeoutError:
                return self.report(self.get(room))
            finally:
                self._forget_waiter(room, waiter)

    def _forget_waiter(self, room: int, waiter: asyncio.Future[None]) -> None:
        waiting = self._waiters.get(room, [])
        if waiter in waiting:
            waiting.remove(waiter)
            if not waiting:
                del self._waiters[room]

    def quarantined(self) -> dict[str, int]:
        """Count rooms whose pages are quarantined, by cause."""
        counts = dict.fromkeys(map(str, Quarantine), 0)
        for room in self:
            if room.quarantine is not None:
                counts[room.quarantine] += 1
        return counts

    def states(self) -> dict[str, int]:
        """Count rooms by what users see."""
        counts = Counter(self._ended_states)
        counts.update(map(self._describe_state, self))
        return {state.value: count for state, count in counts.items() if count}

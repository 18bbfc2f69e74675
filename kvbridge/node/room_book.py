"""Every room of a daemon by its id, the callers that wait for one, and the receipts of ended rooms.

One room id names one attempt at a time. A second admission of an open id is a conflict. After its end the id may be used again,
with a higher generation only, so that late messages of the first attempt can be told apart. An attempt that has ended for users may
still wait for the proof that nobody touches its pages: it is kept beside its successor until then.
"""

from __future__ import annotations

import asyncio
import secrets
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, KeysView
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

from kvbridge.api.rooms import RoomPage, RoomQuery, RoomReport
from kvbridge.core.errors import ConflictError, StaleError, UnknownRoomError
from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.core.process import Clock
from kvbridge.core.session.tables import RoomState
from kvbridge.node.room import Quarantine, Room

RoomT = TypeVar("RoomT", bound=Room[Any])

LIMITS_KEPT = 64
"""Void limits that may stay in the heap, beside four limits for each room under way."""
LOOKED_AT = 1_000
"""One page of a listing looks at so many rooms at most: the loop has other work."""


class RoomBook(Generic[RoomT]):
    """Every room of a daemon. Used from the event loop's thread only.

    Iterating gives the rooms that are not done, through which deadlines, engines and peers look often. The thousands of done rooms
    are found by their id only.
    """

    def __init__(self, role: Role, *, clock: Clock, keep_s: float, keep_rooms: int = 10_000) -> None:
        """Receipts are kept `keep_s`, `keep_rooms` at most."""
        self.role, self._clock, self._keep_s, self._keep_rooms = role, clock, keep_s, keep_rooms
        self._attempts: dict[int, list[RoomT]] = {}
        self._numbered: dict[int, RoomT] = {}
        """Every attempt by its number, which is the order of admission."""
        self._admitted = 0
        self._live: dict[RoomT, None] = {}
        """Rooms that are not done."""
        self._open: dict[RoomT, None] = {}
        """Rooms that have not ended for users."""
        self._limits: list[tuple[float, int]] = []
        """A heap of the times of limits and the numbers of their rooms. A void limit waits here for its time."""
        self._beside: dict[int, RoomT] = {}
        """Newest receipts whose time is over, by room: without them an earlier attempt that still has pages would be the newest."""
        self._ended: deque[tuple[float, RoomT]] = deque()
        self._ended_states: Counter[RoomState] = Counter()
        self._waiters: dict[int, list[asyncio.Future[None]]] = {}
        self.in_use: Counter[str] = Counter()
        """Rooms that have not ended, or have not given everything back, by client."""

    def __len__(self) -> int:
        return len(self._numbered)

    def __iter__(self) -> Iterator[RoomT]:
        return iter(tuple(self._live))

    @property
    def open(self) -> KeysView[RoomT]:
        """The rooms that have not ended for users."""
        return self._open.keys()

    # ------------------------------------------------------------------ coming and going

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
        state = known.user_state
        if not state.final:
            raise ConflictError(
                f"room {room} is already in flight here (generation {known.generation}, state '{state}')"
            )
        if generation <= known.generation:
            raise StaleError(
                f"room {room} generation {generation} has already ended here ({state}); "
                f"use generation {known.generation + 1} or another room id"
            )

    def add(self, room: RoomT) -> None:
        """Take a room in; `check_free` has been called."""
        self._admitted += 1
        room.number = self._admitted
        self._numbered[room.number] = room
        self._attempts.setdefault(room.room, []).append(room)
        self._live[room] = self._open[room] = None
        room.note_limit = self._note_limit
        self.in_use[room.client] += 1

    def changed(self, room: RoomT) -> RoomState | None:
        """Wake the callers that wait for the room; return the state that users see if it is another than before."""
        for waiter in self._waiters.pop(room.room, []):
            if not waiter.done():
                waiter.set_result(None)
        state = room.user_state
        if state.final:
            self._open.pop(room, None)
        if state is room.shown:
            return None
        room.shown = state
        return state

    def ended(self, room: RoomT) -> None:
        """Keep the room's receipt for a while. Called once, when the room is done."""
        room.begin_by_s = None
        self.in_use[room.client] -= 1
        if not self.in_use[room.client]:
            del self.in_use[room.client]
        del self._live[room]
        self._open.pop(room, None)
        self._ended_states[room.user_state] += 1
        until_s = self._clock() + self._keep_s
        self._ended.append((until_s, room))
        if beside := self._beside.pop(room.room, None):
            self._ended.append((until_s, beside))
        self.sweep()

    def sweep(self) -> None:
        """Forget receipts that have been kept long enough, and the oldest when there are too many."""
        now_s = self._clock()
        while self._ended and (self._ended[0][0] <= now_s or len(self._ended) > self._keep_rooms):
            _, ended = self._ended.popleft()
            attempts, forgotten = self._attempts[ended.room], self._beside.get(ended.room)
            if ended is attempts[-1] and any(earlier in self._live for earlier in attempts):
                self._beside[ended.room] = ended
            else:
                forgotten = ended
            if forgotten is not None:
                self._ended_states[forgotten.user_state] -= 1
                del self._numbered[forgotten.number]
                attempts.remove(forgotten)
                if not attempts:
                    del self._attempts[ended.room]

    # ------------------------------------------------------------------ finding

    def get(self, room: int) -> RoomT:
        """Return the newest attempt of a room. Raises UnknownRoomError."""
        attempts = self._attempts.get(room)
        if not attempts:
            raise UnknownRoomError(
                f"room {room} is not known to this {self.role} daemon (never admitted, or ended and forgotten)"
            )
        return attempts[-1]

    def attempts(self, room: int) -> tuple[RoomT, ...]:
        """Return every known attempt of a room, the oldest first."""
        return tuple(self._attempts.get(room, ()))

    def used_by(self, engine: str, room: int) -> RoomT:
        """Return the oldest attempt that an engine uses, or the newest when it uses none. Raises UnknownRoomError."""
        using = next((found for found in self._attempts.get(room, ()) if engine in found.users), None)
        return using or self.get(room)

    def find(self, room: int, generation: int) -> RoomT | None:
        """Return the room if this very attempt is known."""
        return next((found for found in self._attempts.get(room, ()) if found.generation == generation), None)

    def newest_generation(self, room: int) -> int:
        """Return the newest known generation of a room, 0 when it is unknown."""
        attempts = self._attempts.get(room)
        return attempts[-1].generation if attempts else 0

    # ------------------------------------------------------------------ limits

    def _note_limit(self, room: RoomT, limit_s: float) -> None:
        heappush(self._limits, (limit_s, room.number))
        if len(self._limits) > LIMITS_KEPT + 4 * len(self._live):
            both = ((limit_s, room.number) for room in self._live for limit_s in (room.begin_by_s, room.deadline_s))
            self._limits = [(limit_s, number) for limit_s, number in both if limit_s is not None]
            heapify(self._limits)

    def due(self, now_s: float) -> list[RoomT]:
        """Return the rooms under way that had a limit which has passed by now, once for each limit."""
        found = []
        while self._limits and self._limits[0][0] <= now_s:
            room = self._numbered.get(heappop(self._limits)[1])
            if room is not None and room in self._live:
                found.append(room)
        return found

    # ------------------------------------------------------------------ for users

    def report(self, room: int) -> RoomReport:
        """Describe the newest attempt. Raises UnknownRoomError."""
        return self.describe(self.get(room))

    def describe(self, room: RoomT) -> RoomReport:
        """Describe a room for users."""
        now_s = self._clock()
        limit_s, limit = room.next_limit
        return RoomReport(
            **room.about,
            **room.tokens,
            role=self.role,
            state=room.user_state,
            client=room.client,
            peers=room.peers,
            host_tokens=room.host_tokens,
            namespace=room.namespace,
            reason_code=room.reason_code,
            reason=room.reason,
            pages={space: len(table) for space, table in room.tables.items()},
            quarantine=room.quarantine or "",
            amounts=room.amounts,
            phases_s=room.phases_s,
            age_s=now_s - room.created_s,
            expires_in_s=None if limit_s is None else max(0.0, limit_s - now_s),
            limit=limit,
            waits_for=room.waits_for,
        )

    def page(self, query: RoomQuery) -> RoomPage:
        """List rooms under way and receipts, the oldest first, and where to go on when there may be more.

        A page has at most `query.limit` rooms, and fewer although more follow when few of the next `LOOKED_AT` are wanted.
        """
        numbers = list(self._numbered)
        place = bisect_right(numbers, query.after)
        end = min(place + LOOKED_AT, len(numbers))
        found: list[RoomReport] = []
        while place < end and len(found) < query.limit:
            room = self._numbered[numbers[place]]
            place += 1
            if (
                (not query.state or room.user_state in query.state)
                and (query.client is None or room.client == query.client)
                and (not query.peer or any(query.peer in {peer, peer.partition("/")[0]} for peer in room.peers))
            ):
                found.append(self.describe(room))
        return RoomPage(rooms=tuple(found), next=numbers[place - 1] if place < len(numbers) else None)

    async def wait(self, room: int, timeout_s: float, until: frozenset[RoomState]) -> RoomReport:
        """Return the report once the state is in `until` or final, or after `timeout_s`."""
        deadline_s = self._clock() + timeout_s
        while True:
            found = self.get(room)
            state = found.user_state
            left_s = deadline_s - self._clock()
            if state in until or state.final or left_s <= 0:
                return self.describe(found)
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.setdefault(room, []).append(waiter)
            try:  # not `asyncio.wait_for`, which in Python 3.11 loses a cancellation that meets the end of the wait
                done, _ = await asyncio.wait({waiter}, timeout=left_s)
            finally:
                waiting = self._waiters.get(room, [])
                if waiter in waiting:
                    waiting.remove(waiter)
                    if not waiting:
                        del self._waiters[room]
            if not done:
                return self.report(room)

    def quarantined(self) -> dict[str, int]:
        """Count rooms whose pages are quarantined, by cause."""
        return {str(cause): sum(room.quarantine is cause for room in self) for cause in Quarantine}

    def states(self) -> dict[str, int]:
        """Count rooms by the state that users see."""
        counts = Counter(self._ended_states)
        counts.update(room.user_state for room in self)
        return {state.value: count for state, count in counts.items() if count}

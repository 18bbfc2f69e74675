"""What happened to each room, in order: for the status page.

Owns: the facts of open rooms and of those that ended lately, by the state that each room is in. Must not know: who looks, how
a fact is shown.

A room that failed is kept longer than one that completed, which nobody asks about; all of it is bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.events import RoomEntered, RoomFact
from kvbridge.telemetry.stream import Reader

KEPT_ENDED: Mapping[RoomState, int] = {RoomState.COMPLETED: 500, RoomState.ABORTED: 250, RoomState.FAILED: 250}
"""Rooms that are remembered after their end, by how they ended; the oldest are forgotten first."""
MAX_FACTS = 200
"""Of one room: a peer can repeat messages that are refused, and each is a fact."""

RoomKey = tuple[int, int]
"""(room, generation)."""


@dataclass(slots=True)
class Timeline:
    """One attempt at one room. Times are monotonic seconds."""

    admitted_s: float
    entered: RoomEntered
    """How it came into its present state."""
    entered_s: float
    peer: str = ""
    """The incarnation of the last node at its other end, also when that is gone."""
    facts: list[tuple[float, RoomFact]] = field(default_factory=list)


class RoomTimelines:
    """A reader of facts that keeps those of each room. Used from the event loop's thread only."""

    def __init__(self) -> None:
        self._timelines: dict[RoomKey, Timeline] = {}
        self._of_state: dict[RoomState, dict[RoomKey, Timeline]] = {state: {} for state in RoomState}
        """In the order in which rooms came into the state."""
        self.ended: Counter[RoomState] = Counter()
        """Rooms that ended since the start, by how they did."""
        self.table: Reader = {RoomFact: self._read}

    def _read(self, now_s: float, fact: RoomFact) -> None:
        key = (fact.room, fact.generation)
        timeline = self._timelines.get(key)
        if isinstance(fact, RoomEntered):
            if timeline is None:
                timeline = self._timelines[key] = Timeline(now_s, fact, now_s)
            self._enter(key, timeline, now_s, fact)
        if timeline is not None and len(timeline.facts) < MAX_FACTS:
            timeline.facts.append((now_s, fact))

    def _enter(self, key: RoomKey, timeline: Timeline, now_s: float, fact: RoomEntered) -> None:
        self._of_state[timeline.entered.state].pop(key, None)
        timeline.entered, timeline.entered_s = fact, now_s
        timeline.peer = fact.peer or timeline.peer
        if fact.state.final:
            self.ended[fact.state] += 1
        rooms = self._of_state[fact.state]
        rooms[key] = timeline
        if len(rooms) > KEPT_ENDED.get(fact.state, len(rooms)):
            oldest = next(iter(rooms))
            del rooms[oldest], self._timelines[oldest]

    def of(self, room: int, generation: int | None = None) -> tuple[int, Timeline] | None:
        """Return the generation and the timeline of one attempt, the newest when none is named; None for one not kept."""
        if generation is None:
            generation = max((key[1] for key in self._timelines if key[0] == room), default=0)
        timeline = self._timelines.get((room, generation))
        return None if timeline is None else (generation, timeline)

    def shown(self, limit: int) -> Iterator[tuple[RoomKey, Timeline]]:
        """Return so many rooms of each state: of an open one those longest in it, of a final one those that ended last."""
        for state, rooms in self._of_state.items():
            yield from islice(reversed(rooms.items()) if state.final else rooms.items(), limit)

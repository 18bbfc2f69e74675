"""The recent past, for `/status` and the status page: problems, the traffic with each peer, what happened to each room."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.events import (
    EngineLost,
    OrderEnded,
    PeerLost,
    PeerRejected,
    PrefixMatched,
    RankReceived,
    RoomEntered,
    RoomFact,
    RoomQuarantined,
    RoomRejected,
    WorkerLost,
)
from kvbridge.telemetry.path_events import PathLost, SuccessorsFailed
from kvbridge.telemetry.stream import Reader

RECENT_PROBLEMS = 50
RECENT_PEERS = 256
KEPT_ENDED: Mapping[RoomState, int] = {RoomState.COMPLETED: 500, RoomState.ABORTED: 250, RoomState.FAILED: 250}
"""Rooms that are remembered after their end, by how they ended; the oldest are forgotten first."""
MAX_FACTS = 200
"""Of one room: a peer can repeat messages that are refused, and each is a fact."""

RoomKey = tuple[int, int]
"""(room, generation)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that went wrong lately."""

    at_s: float
    """Monotonic seconds."""
    what: str
    whom: str
    """Room, peer, rank or engine; empty when nobody in particular."""
    reason: str


@dataclass
class PeerTraffic:
    """What went between this node and one peer since the peer was first seen."""

    sent_bytes: int = 0
    received_bytes: int = 0
    rooms_completed: int = 0
    rooms_failed: int = 0
    last_s: float = field(default=0.0)
    """When a room of it moved last; monotonic seconds."""


class StatusReader:
    """Keeps what `/status` shows of the recent past: the last problems, and the traffic with each peer."""

    def __init__(self) -> None:
        self._problems: deque[Problem] = deque(maxlen=RECENT_PROBLEMS)
        self._traffic: dict[str, PeerTraffic] = {}
        self.hit_tokens, self.miss_tokens, self.host_tokens = 0, 0, 0
        """Of prompts with page keys: cached when their rooms were admitted, not cached, and of the first those from the host."""

        self.table: Reader = {
            RoomEntered: self._room,
            OrderEnded: self._sent,
            RankReceived: self._received,
            PeerRejected: lambda now_s, fact: self._note(now_s, "peer rejected", fact.peer, fact.reason),
            PeerLost: lambda now_s, fact: self._note(now_s, "peer lost", fact.peer, fact.reason),
            PathLost: lambda now_s, fact: self._note(
                now_s, "path lost", fact.peer, f"{fact.transport} of rank {fact.rank}: {fact.reason}"
            ),
            WorkerLost: lambda now_s, fact: self._note(now_s, "worker lost", str(fact.rank), fact.reason),
            SuccessorsFailed: lambda now_s, fact: self._note(
                now_s, "transports not built", str(fact.rank), f"{', '.join(fact.transports)}: {fact.reason}"
            ),
            EngineLost: lambda now_s, fact: self._note(now_s, "engine lost", fact.engine, fact.reason),
            RoomQuarantined: lambda now_s, fact: self._note(now_s, "room quarantined", str(fact.room), fact.reason),
            RoomRejected: lambda now_s, fact: self._note(now_s, "room rejected", str(fact.room), fact.reason),
            PrefixMatched: self._matched,
        }

    def problems(self) -> tuple[Problem, ...]:
        """The last problems, the oldest first."""
        return tuple(self._problems)

    def traffic(self) -> Mapping[str, PeerTraffic]:
        """Traffic by the peer's incarnation, the longest unheard-of first."""
        return self._traffic

    def _matched(self, _now_s: float, fact: PrefixMatched) -> None:
        self.hit_tokens += fact.hit_tokens
        self.miss_tokens += fact.miss_tokens
        self.host_tokens += fact.host_tokens

    def _sent(self, now_s: float, fact: OrderEnded) -> None:
        if fact.amounts:
            self._peer(now_s, fact.peer).sent_bytes += _bytes(fact.amounts)

    def _received(self, now_s: float, fact: RankReceived) -> None:
        self._peer(now_s, fact.peer).received_bytes += _bytes(fact.amounts)

    def _room(self, now_s: float, fact: RoomEntered) -> None:
        if not fact.state.final:
            return
        if fact.code:
            self._note(now_s, f"room {fact.state.value}", str(fact.room), fact.reason)
        if fact.peer:
            peer = self._peer(now_s, fact.peer)
            if fact.code:
                peer.rooms_failed += 1
            else:
                peer.rooms_completed += 1

    def _note(self, now_s: float, what: str, whom: str, reason: str) -> None:
        self._problems.append(Problem(now_s, what, whom, reason))

    def _peer(self, now_s: float, peer: str) -> PeerTraffic:
        traffic = self._traffic.pop(peer, None) or PeerTraffic()
        traffic.last_s = now_s
        self._traffic[peer] = traffic
        if len(self._traffic) > RECENT_PEERS:
            del self._traffic[next(iter(self._traffic))]
        return traffic


def _bytes(amounts: Amounts) -> int:
    return sum(amount.bytes for amount in amounts.values())


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
    """A reader of facts that keeps those of each room. Used from the event loop's thread only.

    A room that failed is kept longer than one that completed, which nobody asks about; all of it is bounded.
    """

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

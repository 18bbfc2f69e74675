"""The recent past, for `/status` and the status page: problems, traffic with each peer, the facts of each room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from kvbridge.core.plan.operations import Amounts
from kvbridge.core.process import moment
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.facts import (
    CopyEnded,
    Fact,
    OrderEnded,
    PeerAccepted,
    PeerFact,
    PrefixMatched,
    RankReceived,
    Reader,
    RequestAnswered,
    RoomEntered,
    RoomFact,
)
from kvbridge.telemetry.metrics import DIRECTIONS
from kvbridge.telemetry.problems import Moment, Problems, Tally

RECENT_PEERS = 256
_NO_FAILURES = frozenset({"", "aborted"})
"""Codes of rooms that were completed, or given up by somebody who did not want them any more."""
KEPT_ENDED: Mapping[RoomState, int] = {RoomState.COMPLETED: 500, RoomState.ABORTED: 250, RoomState.FAILED: 250}
"""Rooms that are kept after their end, by how they ended; the oldest are forgotten first."""
MAX_FACTS_OF_KIND = 64
"""A room keeps the first facts of each kind, up to this number: a peer can repeat refused messages, and each is a fact."""

RoomKey = tuple[int, int]
"""(room, generation)."""


@dataclass(slots=True)
class PeerTraffic:
    """Traffic between this node and one peer since the peer was first seen."""

    name: str = ""
    """`instance/node`; empty: no handshake has told it."""
    sent_bytes: int = 0
    received_bytes: int = 0
    rooms_completed: int = 0
    rooms_failed: int = 0
    last_at: Moment = 0.0
    """When a room with the peer moved last."""


@dataclass(slots=True)
class CopySums:
    """Copies in one direction between device and host memory since the daemon was started."""

    pages: int = 0
    """Pages that arrived."""
    bytes: int = 0
    failed: int = 0
    """Orders that failed."""
    last_failure: str = ""
    longest_s: float = 0.0
    """Duration of the slowest order."""


@dataclass(slots=True)
class Timeline:
    """One attempt at one room. Times are monotonic seconds."""

    admitted_s: float
    asked_s: float
    """When the request that admitted the room arrived."""
    entered: RoomEntered
    """How the room came into its present state."""
    entered_s: float
    peer: str = ""
    """The incarnation of the last node at the other end, also when that node is gone."""
    facts: list[tuple[float, RoomFact]] = field(default_factory=list)
    counts: Counter[type[RoomFact]] = field(default_factory=Counter)
    """Number of facts of each kind, also of those that are not kept."""


class Recent:
    """A reader of facts that keeps the recent past, all of it bounded. Used from the event loop's thread only.

    A failed room is kept longer than a completed one, which nobody asks about.
    """

    def __init__(self) -> None:
        self.problems = Problems()
        self.ended_lately = Tally()
        """Rooms by how they ended."""
        self.moved_bytes = 0
        """Bytes sent to, or received from, all peers since the start, also those that are forgotten."""
        self.traffic: dict[str, PeerTraffic] = {}
        """By the peer's incarnation, the peer without news for the longest time first."""
        self.hit_tokens, self.miss_tokens, self.host_tokens = 0, 0, 0
        """Tokens of prompts with page keys at admission: cached, not cached, and cached in host memory alone."""
        self.copies = {direction: CopySums() for direction in DIRECTIONS}
        self.ended: Counter[RoomState] = Counter()
        """Rooms that ended since the start, by how they did."""
        self._timelines: dict[RoomKey, Timeline] = {}
        self._of_state: dict[RoomState, dict[RoomKey, Timeline]] = {state: {} for state in RoomState}
        """In the order in which rooms came into the state."""
        self.table: Reader = {
            **dict.fromkeys((kind for kind in Fact.kinds if kind.problem), self._problem),
            RoomFact: self._read,
            PeerAccepted: self._accepted,
            OrderEnded: self._sent,
            RankReceived: self._received,
            PrefixMatched: self._matched,
            CopyEnded: self._copied,
            RequestAnswered: self._answered,
        }

    def of(self, room: int, generation: int | None = None) -> tuple[int, Timeline] | None:
        """Return the generation and the timeline of one attempt, by default the newest; None when it is not kept."""
        if generation is None:
            generation = max((key[1] for key in self._timelines if key[0] == room), default=0)
        timeline = self._timelines.get((room, generation))
        return None if timeline is None else (generation, timeline)

    def shown(self, limit: int) -> Iterator[tuple[RoomKey, Timeline]]:
        """Return at most `limit` rooms of each state: open ones by how long they are in it, ended ones the latest first."""
        for state, rooms in self._of_state.items():
            yield from islice(reversed(rooms.items()) if state.final else rooms.items(), limit)

    def _problem(self, _now_s: float, fact: Fact) -> None:
        peer = self.traffic.get(fact.peer) if isinstance(fact, PeerFact) else None
        self.problems.add(fact.problem, (peer and peer.name) or fact.about, fact.why)

    def _accepted(self, _now_s: float, fact: PeerAccepted) -> None:
        self._peer(fact.peer).name = fact.name

    def _read(self, now_s: float, fact: RoomFact) -> None:
        key = (fact.room, fact.generation)
        timeline = self._timelines.get(key)
        if isinstance(fact, RoomEntered):
            if timeline is None:
                timeline = self._timelines[key] = Timeline(now_s, now_s, fact, now_s)
            self._of_state[timeline.entered.state].pop(key, None)
            timeline.entered, timeline.entered_s = fact, now_s
            timeline.peer = fact.peer or timeline.peer
            rooms = self._of_state[fact.state]
            rooms[key] = timeline
            if fact.state.final:
                self._end(fact, rooms)
        if timeline is not None:
            timeline.counts[type(fact)] += 1
            if timeline.counts[type(fact)] <= MAX_FACTS_OF_KIND:
                timeline.facts.append((now_s, fact))

    def _end(self, fact: RoomEntered, rooms: dict[RoomKey, Timeline]) -> None:
        self.ended[fact.state] += 1
        self.ended_lately.add(fact.state.value)
        if fact.code not in _NO_FAILURES:
            self.problems.add(f"room {fact.state.value}", str(fact.room), fact.reason)
        if fact.peer:
            peer = self._peer(fact.peer)
            peer.rooms_failed += fact.state is RoomState.FAILED
            peer.rooms_completed += fact.state is RoomState.COMPLETED
        if len(rooms) > KEPT_ENDED[fact.state]:
            oldest = next(iter(rooms))
            del rooms[oldest], self._timelines[oldest]

    def _answered(self, now_s: float, fact: RequestAnswered) -> None:
        timeline = self._timelines.get((fact.room, fact.generation))
        if timeline is not None and not fact.code:
            timeline.asked_s = min(timeline.asked_s, now_s - fact.seconds)

    def _matched(self, _now_s: float, fact: PrefixMatched) -> None:
        self.hit_tokens += fact.hit_tokens
        self.miss_tokens += fact.miss_tokens
        self.host_tokens += fact.host_tokens

    def _copied(self, _now_s: float, fact: CopyEnded) -> None:
        sums = self.copies[fact.direction]
        sums.bytes += fact.bytes
        sums.longest_s = max(sums.longest_s, fact.seconds)
        if fact.code:
            sums.failed += 1
            sums.last_failure = fact.reason
        else:
            sums.pages += fact.pages

    def _sent(self, _now_s: float, fact: OrderEnded) -> None:
        if fact.amounts:
            self._peer(fact.peer).sent_bytes += (sent := _bytes(fact.amounts))
            self.moved_bytes += sent

    def _received(self, _now_s: float, fact: RankReceived) -> None:
        self._peer(fact.peer).received_bytes += (received := _bytes(fact.amounts))
        self.moved_bytes += received

    def _peer(self, peer: str) -> PeerTraffic:
        traffic = self.traffic.pop(peer, None) or PeerTraffic()
        traffic.last_at = moment()
        self.traffic[peer] = traffic
        if len(self.traffic) > RECENT_PEERS:
            del self.traffic[next(iter(self.traffic))]
        return traffic


def _bytes(amounts: Amounts) -> int:
    return sum(amount.bytes for amount in amounts.values())

"""The reader of a node's facts: metrics, lines of the log, and the recent past."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

import structlog

from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.process import moment
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry import facts as f, metrics as m
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.recent import CopySums, PeerTraffic, Problems, Tally, Timeline
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

KNOWN_NAMES = 1_024
RECENT_PEERS = 256
UNKNOWN = "unknown"
"""Name of a peer that was never accepted, or long ago, and of the transport of an older peer."""
WHOLE = "admit_to_claim"
"""The phase with a metric of its own."""
_NO_FAILURES = frozenset({"", "aborted"})
"""Codes of rooms that were completed, or given up because nobody wanted them any more."""
KEPT_ENDED: Mapping[RoomState, int] = {RoomState.COMPLETED: 500, RoomState.ABORTED: 250, RoomState.FAILED: 250}
"""Number of ended rooms that are kept, by how they ended; the oldest are forgotten first."""
MAX_FACTS_OF_KIND = 64
"""A room keeps the first facts of each kind up to this number, because a peer can repeat refused messages."""

RoomKey = tuple[int, int]
"""(room, generation)."""


class NodeRecord:
    """Counts facts in a node's metrics, writes them to its log, and keeps the recent past, all of it bounded.

    Every fact that declares a line has one in the log; ended rooms and failed copies have lines, too. Unauthenticated callers can
    cause some of these lines, and many rooms others: `seldom` limits their number. A failed room is kept longer than a completed
    one, which nobody asks about. Used from the event loop's thread only.
    """

    def __init__(self, events: f.EventStream, metrics: Metrics, seldom: Seldom) -> None:
        self._metrics = metrics
        self._seldom = seldom
        # structlog makes a module's logger anew for each line, also for a line that is not written; a room has many.
        self._rooms = log.bind()
        self._names: dict[str, str] = {}
        """Names of the peers' incarnations, from their handshakes."""
        self._registered: dict[Rank, float] = {}
        self._began_s: dict[int, float] = {}
        """Start of each order under way."""
        self.problems = Problems()
        self.ended: Counter[RoomState] = Counter()
        """Rooms that ended since the start, by how they ended."""
        self.ended_lately = Tally()
        self.moved_bytes = 0
        """Bytes sent to, or received from, all peers since the start, also peers that are forgotten."""
        self.traffic: dict[str, PeerTraffic] = {}
        """By the peer's incarnation, the peer without news for the longest time first."""
        self.matched = Counter[str]()
        """Tokens of prompts with page keys at admission: `hit` and `miss`, and `host` for hits in host memory alone."""
        self.copies = {direction: CopySums() for direction in m.DIRECTIONS}
        self._timelines: dict[RoomKey, Timeline] = {}
        self._of_state: dict[RoomState, dict[RoomKey, Timeline]] = {state: {} for state in RoomState}
        """In the order in which rooms came into the state."""
        count = metrics.count
        events.add_reader(
            {
                f.PeerAccepted: self._accepted,
                f.RoomFact: self._happened,
                f.RoomEntered: self._entered,
                f.RequestAnswered: self._answered,
                f.OrderBegan: lambda now_s, fact: self._began_s.update({fact.order: now_s}),
                f.OrderEnded: self._order_ended,
                f.RankReceived: self._received,
                f.PhasesEnded: self._phases_ended,
                f.PagesDiffer: lambda _, fact: count(m.DIGEST_MISMATCHES, fact.component.value, by=fact.pages),
                f.PrefixMatched: self._prefix_matched,
                f.SparseDecoded: self._sparse_decoded,
                f.CopyEnded: self._copied,
                f.RequestRefused: lambda _, fact: count(m.REFUSED, fact.code),
                f.RoomMessageRefused: lambda _, fact: count(m.MESSAGES_REFUSED, fact.code),
                f.RequestWaited: lambda _, fact: metrics.observe(m.WAIT, fact.seconds, fact.outcome),
                f.PeerRejected: lambda _, fact: count(m.PEER_FAILURES, self._name(fact.peer), fact.code),
                f.PeerLost: lambda _, fact: count(m.PEER_FAILURES, self._name(fact.peer), "lost"),
                f.PathLost: lambda _, fact: count(m.PEER_FAILURES, self._name(fact.peer), "path_lost"),
                f.FrameRefused: lambda _, fact: count(m.FRAMES_REFUSED, fact.kind),
                f.MessagesResent: lambda _, fact: count(m.RESENT, by=fact.count),
                f.MessageUndelivered: lambda _, __: count(m.UNDELIVERED),
                f.MemoryRegistered: self._memory_registered,
                f.WorkerLost: lambda _, fact: fact.cause and count(m.WORKER_RESTARTS, fact.cause),
            }
        )
        events.add_reader(dict.fromkeys((kind for kind in f.Fact.kinds if kind.line or kind.problem), self._tell))

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

    # ------------------------------------------------------------------ peers

    def _accepted(self, _now_s: float, fact: f.PeerAccepted) -> None:
        self._names.pop(fact.peer, None)
        self._names[fact.peer] = fact.name
        if len(self._names) > KNOWN_NAMES:
            del self._names[next(iter(self._names))]
        self._peer(fact.peer).name = fact.name

    def _name(self, peer: str) -> str:
        return self._names.get(peer, UNKNOWN)

    def _peer(self, peer: str) -> PeerTraffic:
        traffic = self.traffic.pop(peer, None) or PeerTraffic()
        traffic.last_at = moment()
        self.traffic[peer] = traffic
        if len(self.traffic) > RECENT_PEERS:
            del self.traffic[next(iter(self.traffic))]
        return traffic

    def _order_ended(self, now_s: float, fact: f.OrderEnded) -> None:
        way = m.SENT, fact.transport, self._name(fact.peer)
        self._metrics.busy(self._began_s.pop(fact.order, now_s), now_s, *way)
        if fact.amounts:
            self._peer(fact.peer).sent_bytes += self._moved(fact.amounts, *way)

    def _received(self, now_s: float, fact: f.RankReceived) -> None:
        way = m.RECEIVED, fact.transport or UNKNOWN, self._name(fact.peer)
        for began_ago_s, ended_ago_s in fact.under_way_ago_s:
            self._metrics.busy(now_s - began_ago_s, now_s - ended_ago_s, *way)
        self._peer(fact.peer).received_bytes += self._moved(fact.amounts, *way)

    def _moved(self, amounts: Amounts, direction: str, transport: str, peer: str) -> int:
        """Count bytes that have arrived, by component and by peer, and return their sum."""
        for kind, amount in amounts.items():
            self._metrics.count(m.TRANSFERRED, kind.value, direction, transport, by=amount.bytes)
        moved = sum(amount.bytes for amount in amounts.values())
        self._metrics.count(m.PEER_TRANSFERRED, peer, direction, transport, by=moved)
        self.moved_bytes += moved
        return moved

    # ------------------------------------------------------------------ rooms

    def _happened(self, now_s: float, fact: f.RoomFact) -> None:
        key = (fact.room, fact.generation)
        timeline = self._timelines.get(key)
        if isinstance(fact, f.RoomEntered):
            if timeline is None:
                timeline = self._timelines[key] = Timeline(now_s, now_s, fact, now_s)
            self._of_state[timeline.entered.state].pop(key, None)
            self._of_state[fact.state][key] = timeline
            timeline.entered, timeline.entered_s = fact, now_s
            timeline.peer = fact.peer or timeline.peer
        if timeline is None:
            return
        timeline.counts[type(fact)] += 1
        if timeline.counts[type(fact)] <= MAX_FACTS_OF_KIND:
            timeline.facts.append((now_s, fact))

    def _entered(self, _now_s: float, fact: f.RoomEntered) -> None:
        state = fact.state
        if not state.final:
            if self._rooms.is_enabled_for(logging.DEBUG):
                self._rooms.debug("room_entered", **self._whose(fact), state=state.value)
            return
        self.ended[state] += 1
        self.ended_lately.add(state.value)
        self._metrics.count(m.ROOMS_ENDED, state.value, fact.code)
        if fact.limit:
            self._metrics.count(m.ENDED_BY_LIMIT, fact.limit)
        if fact.code not in _NO_FAILURES:
            self.problems.add(f"room {state.value}", str(fact.room), fact.reason)
        if fact.peer:
            peer, failed = self._peer(fact.peer), state is RoomState.FAILED
            peer.rooms_failed += failed
            peer.rooms_completed += state is RoomState.COMPLETED
            if failed:
                self._metrics.count(m.PEER_FAILURES, self._name(fact.peer), fact.code)
        if len(rooms := self._of_state[state]) > KEPT_ENDED[state]:
            oldest = next(iter(rooms))
            del rooms[oldest], self._timelines[oldest]
        if self._seldom.admits("room_ended", fact.code or state.value):
            self._tell_end(fact)

    def _tell_end(self, fact: f.RoomEntered) -> None:
        figures = ("prompt_tokens", "prefix_tokens", "computed_tokens", "bytes")
        told = {
            **self._whose(fact),
            "state": fact.state.value,
            "age_s": round(fact.age_s, 4),
            **{name: getattr(fact, name) for name in figures},
            **fact.ids,
        }
        if not fact.code:
            self._rooms.info("room_ended", **told)
        else:
            limit = {"limit": fact.limit} if fact.limit else {}
            self._rooms.warning("room_ended", **told, code=fact.code, reason=fact.reason, **limit)

    def _answered(self, now_s: float, fact: f.RequestAnswered) -> None:
        timeline = self._timelines.get((fact.room, fact.generation))
        if timeline is not None and not fact.code:
            timeline.asked_s = min(timeline.asked_s, now_s - fact.seconds)

    def _phases_ended(self, _now_s: float, fact: f.PhasesEnded) -> None:
        for phase, seconds in fact.phases_s.items():
            where = (m.ADMISSION_TO_CLAIM, seconds) if phase == WHOLE else (m.PHASE, seconds, phase)
            self._metrics.observe(*where, trace_id=fact.trace_id)

    def _prefix_matched(self, _now_s: float, fact: f.PrefixMatched) -> None:
        self.matched.update(hit=fact.hit_tokens, miss=fact.miss_tokens, host=fact.host_tokens)
        for outcome, tokens in (("hit", fact.hit_tokens), ("miss", fact.miss_tokens)):
            self._metrics.count(m.PREFIX_TOKENS, outcome, by=tokens)

    def _sparse_decoded(self, _now_s: float, fact: f.SparseDecoded) -> None:
        for outcome, rows in fact.rows.items():
            self._metrics.count(m.SPARSE_ROWS, outcome, by=rows)

    def _copied(self, _now_s: float, fact: f.CopyEnded) -> None:
        self._metrics.count(m.TIER_COPIES, fact.direction, fact.code or m.DONE)
        self._metrics.count(m.TIER_COPIED, fact.direction, by=fact.bytes)
        self._metrics.count(m.TIER_COPY_SECONDS, fact.direction, by=fact.busy_s)
        sums, about = self.copies[fact.direction], {"direction": fact.direction, "pages": fact.pages}
        sums.bytes += fact.bytes
        sums.longest_s = max(sums.longest_s, fact.seconds)
        if not fact.code:
            sums.pages += fact.pages
            log.debug("pages_copied", **about, bytes=fact.bytes, seconds=round(fact.seconds, 4))
            return
        sums.failed, sums.last_failure = sums.failed + 1, fact.reason
        if self._seldom.admits("pages_not_copied", fact.code):
            log.warning("pages_not_copied", **about, code=fact.code, reason=fact.reason)

    def _memory_registered(self, _now_s: float, fact: f.MemoryRegistered) -> None:
        """A node is as far as the slowest of its ranks."""
        self._registered[fact.rank] = fact.share
        self._metrics.assign(m.REGISTRATION, min(self._registered.values()))

    # ------------------------------------------------------------------ lines and problems

    def _tell(self, _now_s: float, fact: f.Fact) -> None:
        named = vars(fact)
        if fact.problem:
            shown = {name: ", ".join(value) if isinstance(value, tuple) else value for name, value in named.items()}
            about = self._names.get(named.get("peer", "")) if isinstance(fact, f.PeerFact) else None
            whom = about or next(named[name] for name in ("room", "engine", "peer", "rank") if name in named)
            self.problems.add(fact.problem, str(whom), fact.why.format_map(shown))
        if not fact.line:
            return
        level, event, *keys = fact.line.split()
        if fact.seldom is not None and not self._seldom.admits(event, named.get(fact.seldom, "")):
            return
        told = {key: named[name or key] for key, _, name in (each.partition("=") for each in keys)}
        getattr(log, level)(
            event, **self._whose(fact), **{key: _shown(value) for key, value in told.items() if value != ""}
        )

    def _whose(self, fact: f.Fact) -> dict[str, object]:
        """Return the keys that say which room a line is about, and which peer."""
        told: dict[str, object] = {}
        if isinstance(fact, f.RoomFact):
            told = {"room": fact.room, "generation": fact.generation}
        if isinstance(fact, f.RoomFact | f.PeerFact) and fact.peer:
            told |= {"peer": fact.peer, "peer_name": self._name(fact.peer)}
        return told


def _shown(value: object) -> object:
    """Return a fact's value as a line shows it: ranks by their names."""
    if isinstance(value, Rank):
        return str(value)
    if isinstance(value, tuple) and any(isinstance(each, Rank) for each in value):
        return list(map(str, value))
    return value

"""What becomes of facts: metrics and log lines (`telemetry/recent.py`: what `/status` shows of the recent past).

Each reader has a table from a fact's type to what it does with it; a fact that the table leaves out does not concern that reader.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import structlog

from kvbridge.core.ids import Rank
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.busy import BusyTime
from kvbridge.telemetry.events import (
    DisputedPagesDropped,
    EngineAttached,
    EngineEnded,
    EngineLeft,
    EngineLost,
    Fact,
    FrameRefused,
    MemoryRegistered,
    MessagesResent,
    MessageUndelivered,
    OrderBegan,
    OrderEnded,
    PagesDiffer,
    PeerAccepted,
    PeerFact,
    PeerLost,
    PeerRejected,
    PhasesEnded,
    PrefixesDropped,
    PrefixMatched,
    PromptNotKept,
    RankReceived,
    RequestRefused,
    RequestWaited,
    RoomEntered,
    RoomFact,
    RoomMessageRefused,
    RoomQuarantined,
    RoomRejected,
    SparseDecoded,
    WorkerLost,
    WorkerStarted,
)
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import (
    ADMISSION_TO_CLAIM,
    DIGEST_MISMATCHES,
    ENDED_BY_LIMIT,
    FRAMES_REFUSED,
    MESSAGES_REFUSED,
    PEER_FAILURES,
    PHASE,
    PREFIX_TOKENS,
    REFUSED,
    REGISTRATION,
    RESENT,
    ROOMS_ENDED,
    SPARSE_ROWS,
    UNDELIVERED,
    WAIT,
    WORKER_RESTARTS,
)
from kvbridge.telemetry.path_events import FenceBegan, PathLost, PathsFound, WritersShutOut
from kvbridge.telemetry.registry import Metrics
from kvbridge.telemetry.specs import Direction
from kvbridge.telemetry.stream import Reader

log = structlog.get_logger(__name__)

KNOWN_NAMES = 1_024
UNKNOWN = "unknown"
"""A peer that has never been accepted, or an older one's transport."""
LOST = "lost"
PATH_LOST = "path_lost"
WHOLE = "admit_to_claim"
"""The phase that has a metric of its own."""


class PeerNames:
    """How the incarnations of peers are called, as their handshakes said. A reader of facts, to be added before its users."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self.table: Reader = {PeerAccepted: self._accepted}

    def _accepted(self, _now_s: float, fact: PeerAccepted) -> None:
        self._names.pop(fact.peer, None)
        self._names[fact.peer] = fact.name
        if len(self._names) > KNOWN_NAMES:
            del self._names[next(iter(self._names))]

    def get(self, peer: str) -> str:
        """Return instance and node of an incarnation; `unknown` for one that was never accepted, or long ago."""
        return self._names.get(peer, UNKNOWN)


class MetricsReader:
    """Counts facts in the metrics of a node."""

    def __init__(self, metrics: Metrics, names: PeerNames) -> None:
        self._metrics = metrics
        self._names = names
        self._registered: dict[Rank, float] = {}
        self._under_way: dict[int, BusyTime] = {}
        """Orders, and where their time is counted."""
        self.table: Reader = {
            RoomEntered: self._room,
            OrderBegan: self._order_began,
            OrderEnded: self._order_ended,
            RankReceived: self._received,
            PhasesEnded: self._phases_ended,
            PagesDiffer: lambda _, fact: metrics.count(DIGEST_MISMATCHES, fact.component.value, by=fact.pages),
            PrefixMatched: self._prefix_matched,
            SparseDecoded: self._sparse_decoded,
            RequestRefused: lambda _, fact: metrics.count(REFUSED, fact.code),
            RoomMessageRefused: lambda _, fact: metrics.count(MESSAGES_REFUSED, fact.code),
            RequestWaited: lambda _, fact: metrics.observe(WAIT, fact.seconds, fact.outcome.value),
            PeerRejected: lambda _, fact: metrics.count(PEER_FAILURES, names.get(fact.peer), fact.code),
            PeerLost: lambda _, fact: metrics.count(PEER_FAILURES, names.get(fact.peer), LOST),
            PathLost: lambda _, fact: metrics.count(PEER_FAILURES, names.get(fact.peer), PATH_LOST),
            FrameRefused: lambda _, fact: metrics.count(FRAMES_REFUSED, fact.kind),
            MessagesResent: lambda _, fact: metrics.count(RESENT, by=fact.count),
            MessageUndelivered: lambda _, __: metrics.count(UNDELIVERED),
            MemoryRegistered: self._memory_registered,
            WorkerLost: self._worker_lost,
        }

    def _room(self, _now_s: float, fact: RoomEntered) -> None:
        if not fact.state.final:
            return
        self._metrics.count(ROOMS_ENDED, fact.state.value, fact.code)
        if fact.limit:
            self._metrics.count(ENDED_BY_LIMIT, fact.limit)
        if fact.state is RoomState.FAILED and fact.peer:
            self._metrics.count(PEER_FAILURES, self._names.get(fact.peer), fact.code)

    def _order_began(self, now_s: float, fact: OrderBegan) -> None:
        busy = self._metrics.busy(Direction.SENT, fact.transport, self._names.get(fact.peer))
        self._under_way[fact.order] = busy
        busy.begin(now_s)

    def _order_ended(self, now_s: float, fact: OrderEnded) -> None:
        self._under_way.pop(fact.order).end(now_s)
        if fact.amounts:
            self._metrics.transferred(fact.amounts, Direction.SENT, fact.transport, self._names.get(fact.peer))

    def _received(self, now_s: float, fact: RankReceived) -> None:
        way = Direction.RECEIVED, fact.transport or UNKNOWN, self._names.get(fact.peer)
        self._metrics.transferred(fact.amounts, *way)
        busy = self._metrics.busy(*way)
        for began_ago_s, ended_ago_s in fact.under_way_ago_s:
            busy.add(now_s - began_ago_s, now_s - ended_ago_s)

    def _prefix_matched(self, _now_s: float, fact: PrefixMatched) -> None:
        self._metrics.count(PREFIX_TOKENS, "hit", by=fact.hit_tokens)
        self._metrics.count(PREFIX_TOKENS, "miss", by=fact.miss_tokens)

    def _phases_ended(self, _now_s: float, fact: PhasesEnded) -> None:
        for phase, seconds in fact.phases_s.items():
            if phase == WHOLE:
                self._metrics.observe(ADMISSION_TO_CLAIM, seconds, trace_id=fact.trace_id)
            else:
                self._metrics.observe(PHASE, seconds, phase, trace_id=fact.trace_id)

    def _sparse_decoded(self, _now_s: float, fact: SparseDecoded) -> None:
        for outcome, rows in fact.rows.items():
            self._metrics.count(SPARSE_ROWS, outcome, by=rows)

    def _memory_registered(self, _now_s: float, fact: MemoryRegistered) -> None:
        """A node is as far as the slowest of its ranks."""
        self._registered[fact.rank] = fact.share
        self._metrics.assign(REGISTRATION, min(self._registered.values()))

    def _worker_lost(self, _now_s: float, fact: WorkerLost) -> None:
        if fact.cause:
            self._metrics.count(WORKER_RESTARTS, fact.cause)


LINES: Mapping[type[Fact], tuple[str, str, str]] = {
    RoomRejected: ("warning", "room_rejected", "code reason"),
    RoomQuarantined: ("error", "room_quarantined", "cause reason"),
    PromptNotKept: ("warning", "prefix_not_kept", "reason"),
    DisputedPagesDropped: ("warning", "disputed_pages_dropped", "page dropped_pages=dropped read_pages=read"),
    PrefixesDropped: ("info", "prefixes_dropped", "pages read_pages=read"),
    PeerAccepted: ("info", "peer_accepted", "features"),
    PeerRejected: ("warning", "peer_rejected", "code reason"),
    PeerLost: ("warning", "peer_lost", "reason"),
    PathLost: ("warning", "path_lost", "rank transport goes_on_over=transports reason"),
    PathsFound: ("info", "paths_found", "rank transports standby"),
    FrameRefused: ("warning", "frame_refused", "kind detail"),
    RoomMessageRefused: ("warning", "room_message_refused", "rank code"),
    WorkerStarted: ("info", "worker_ready", "rank pid"),
    EngineAttached: ("info", "engine_attached", "engine pid ranks"),
    EngineLost: ("warning", "engine_lost", "engine reason pages_wait"),
    EngineLeft: ("info", "engine_left", "engine"),
    EngineEnded: ("info", "engine_ended", "engine"),
    FenceBegan: ("warning", "fence_began", "epoch rooms"),
    WritersShutOut: ("info", "writers_shut_out", "epoch rooms"),
}
"""By fact: level, event, and the keys of the line, as `key=field` where the field has another name."""
SELDOM = {PromptNotKept: "", FrameRefused: "kind", RoomMessageRefused: "code"}
"""What happens often, or at a stranger's will, and the field that tells its kinds apart."""


class LogReader:
    """Writes a line for each fact that an operator should find again.

    Of rooms that ended, and of what strangers can cause, `seldom` lets only so many lines through.
    """

    def __init__(self, names: PeerNames, seldom: Seldom) -> None:
        self._names = names
        self._seldom = seldom
        # A module's logger is made anew for each line, also for one that is not written; a room has many.
        self._rooms = log.bind()
        self.table: Reader = {RoomEntered: self._room, **dict.fromkeys(LINES, self._line)}

    def _line(self, _now_s: float, fact: Fact) -> None:
        kind = type(fact)
        level, event, keys = LINES[kind]
        if kind in SELDOM and not self._seldom.admits(event, getattr(fact, SELDOM[kind], "")):
            return
        named = {key: getattr(fact, field or key) for key, _, field in (each.partition("=") for each in keys.split())}
        shown = {key: _shown(value) for key, value in named.items() if value != ""}
        getattr(log, level)(event, **self._whose(fact), **shown)

    def _room(self, _now_s: float, fact: RoomEntered) -> None:
        if not fact.state.final:
            if self._rooms.is_enabled_for(logging.DEBUG):
                self._rooms.debug("room_entered", **self._whose(fact), state=fact.state.value)
            return
        if not self._seldom.admits("room_ended", fact.code or fact.state.value):
            return
        facts = {
            **self._whose(fact),
            "state": fact.state.value,
            "age_s": round(fact.age_s, 4),
            "prompt_tokens": fact.prompt_tokens,
            "prefix_tokens": fact.prefix_tokens,
            "computed_tokens": fact.computed_tokens,
            "bytes": fact.bytes,
            **fact.ids,
        }
        if not fact.code:
            self._rooms.info("room_ended", **facts)
        else:
            limit = {"limit": fact.limit} if fact.limit else {}
            self._rooms.warning("room_ended", **facts, code=fact.code, reason=fact.reason, **limit)

    def _whose(self, fact: Fact) -> dict[str, object]:
        """Return the keys that say which room a line is about, and which peer."""
        told: dict[str, object] = {}
        if isinstance(fact, RoomFact):
            told = {"room": fact.room, "generation": fact.generation}
        if isinstance(fact, RoomFact | PeerFact) and fact.peer:
            told |= {"peer": fact.peer, "peer_name": self._names.get(fact.peer)}
        return told


def _shown(value: object) -> object:
    """Return a fact's value as a line has it: ranks and components by their names."""
    if isinstance(value, Rank):
        return str(value)
    if isinstance(value, Mapping):
        return {kind.value: pages for kind, pages in value.items()}
    if isinstance(value, tuple) and any(isinstance(each, Rank) for each in value):
        return list(map(str, value))
    return value

"""What becomes of facts: metrics and log lines (`telemetry/recent.py`: what `/status` shows of the recent past).

Owns: which fact counts where, and how it reads in a log. Must not know: how facts come about, what is to be done.

Each reader has a table from a fact's type to what it does with it; a fact that the table leaves out does not concern that reader.
"""

from __future__ import annotations

import logging

import structlog

from kvbridge.core.ids import Rank
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.busy import BusyTime
from kvbridge.telemetry.events import (
    CheckpointKept,
    DisputedPagesDropped,
    EngineAttached,
    EngineEnded,
    EngineLeft,
    EngineLost,
    FrameRefused,
    MemoryRegistered,
    MessagesResent,
    MessageUndelivered,
    OrderBegan,
    OrderEnded,
    PagesDiffer,
    PeerAccepted,
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
    CHECKPOINTS_KEPT,
    CHECKPOINTS_USED,
    DIGEST_MISMATCHES,
    ENDED_BY_LIMIT,
    FRAMES_REFUSED,
    HOST_TOKENS,
    MESSAGES_REFUSED,
    PEER_FAILURES,
    PHASE,
    PREFIX_BYTES,
    PREFIX_TOKENS,
    REFUSED,
    REGISTRATION,
    RESENT,
    ROOMS_ENDED,
    SPARSE_ROWS,
    SUCCESSORS_FAILED,
    UNDELIVERED,
    WAIT,
    WORKER_RESTARTS,
)
from kvbridge.telemetry.path_events import FenceBegan, PathLost, PathsFound, SuccessorsFailed, WritersShutOut
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
        self._under_way: dict[int, tuple[BusyTime, ...]] = {}
        """Orders, and where their time is counted."""
        self.table: Reader = {
            RoomEntered: self._room,
            OrderBegan: self._order_began,
            OrderEnded: self._order_ended,
            RankReceived: self._received,
            PhasesEnded: self._phases_ended,
            PagesDiffer: lambda _, fact: metrics.count(DIGEST_MISMATCHES, fact.component.value, by=fact.pages),
            PrefixMatched: self._prefix_matched,
            CheckpointKept: lambda _, fact: metrics.count(CHECKPOINTS_KEPT, fact.cause),
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
            SuccessorsFailed: self._successors_failed,
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
        times = self._metrics.busy(Direction.SENT, fact.transport, self._names.get(fact.peer))
        self._under_way[fact.order] = times
        for time in times:
            time.begin(now_s)

    def _order_ended(self, now_s: float, fact: OrderEnded) -> None:
        for time in self._under_way.pop(fact.order):
            time.end(now_s)
        if fact.amounts:
            self._metrics.transferred(fact.amounts, Direction.SENT, fact.transport, self._names.get(fact.peer))

    def _received(self, now_s: float, fact: RankReceived) -> None:
        way = Direction.RECEIVED, fact.transport or UNKNOWN, self._names.get(fact.peer)
        self._metrics.transferred(fact.amounts, *way)
        for time in self._metrics.busy(*way):
            for began_ago_s, ended_ago_s in fact.under_way_ago_s:
                time.add(now_s - began_ago_s, now_s - ended_ago_s)

    def _prefix_matched(self, _now_s: float, fact: PrefixMatched) -> None:
        self._metrics.count(PREFIX_TOKENS, "hit", by=fact.hit_tokens)
        self._metrics.count(PREFIX_TOKENS, "miss", by=fact.miss_tokens)
        self._metrics.count(HOST_TOKENS, by=fact.host_tokens)
        if fact.hit_bytes:  # a prefill node has no such metric
            self._metrics.count(PREFIX_BYTES, by=fact.hit_bytes)
        if fact.from_checkpoint:  # nor a decode node this
            self._metrics.count(CHECKPOINTS_USED)

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

    def _successors_failed(self, _now_s: float, fact: SuccessorsFailed) -> None:
        for name in fact.transports:
            self._metrics.count(SUCCESSORS_FAILED, name)

    def _worker_lost(self, _now_s: float, fact: WorkerLost) -> None:
        if fact.cause:
            self._metrics.count(WORKER_RESTARTS, fact.cause)


class LogReader:
    """Writes a line for each fact that an operator should find again.

    Of rooms that ended, and of what strangers can cause, `seldom` lets only so many lines through.
    """

    def __init__(self, names: PeerNames, seldom: Seldom) -> None:
        self._names = names
        self._seldom = seldom
        # A module's logger is made anew for each line, also for one that is not written; a room has many.
        self._rooms = log.bind()
        self.table: Reader = {
            RoomEntered: self._room,
            RoomRejected: lambda _, fact: log.warning(
                "room_rejected", **self._whose(fact), code=fact.code, reason=fact.reason
            ),
            RoomQuarantined: lambda _, fact: log.error(
                "room_quarantined", **self._whose(fact), cause=fact.cause, reason=fact.reason
            ),
            PromptNotKept: self._not_kept,
            DisputedPagesDropped: lambda _, fact: log.warning(
                "disputed_pages_dropped",
                **self._whose(fact),
                page=fact.page,
                dropped_pages=fact.dropped,
                read_pages=fact.read,
            ),
            PrefixesDropped: lambda _, fact: log.info("prefixes_dropped", pages=fact.pages, read_pages=fact.read),
            PeerAccepted: lambda _, fact: log.info(
                "peer_accepted", peer=fact.peer, peer_name=fact.name, features=fact.features
            ),
            PeerRejected: lambda _, fact: log.warning(
                "peer_rejected", **self._peer(fact.peer), code=fact.code, reason=fact.reason
            ),
            PeerLost: lambda _, fact: log.warning("peer_lost", **self._peer(fact.peer), reason=fact.reason),
            PathLost: lambda _, fact: log.warning(
                "path_lost",
                **self._peer(fact.peer),
                rank=str(fact.rank),
                transport=fact.transport,
                goes_on_over=fact.transports,
                reason=fact.reason,
            ),
            PathsFound: lambda _, fact: log.info(
                "paths_found",
                **self._peer(fact.peer),
                rank=str(fact.rank),
                transports=fact.transports,
                standby=fact.standby,
            ),
            FrameRefused: self._frame_refused,
            RoomMessageRefused: self._message_refused,
            WorkerStarted: lambda _, fact: log.info("worker_ready", rank=str(fact.rank), pid=fact.pid),
            EngineAttached: lambda _, fact: log.info(
                "engine_attached", engine=fact.engine, pid=fact.pid, ranks=[str(rank) for rank in fact.ranks]
            ),
            EngineLost: lambda _, fact: log.warning(
                "engine_lost", engine=fact.engine, reason=fact.reason, pages_wait=fact.pages_wait
            ),
            EngineLeft: lambda _, fact: log.info("engine_left", engine=fact.engine),
            EngineEnded: lambda _, fact: log.info("engine_ended", engine=fact.engine),
            FenceBegan: lambda _, fact: log.warning("fence_began", epoch=fact.epoch, rooms=fact.rooms),
            WritersShutOut: lambda _, fact: log.info("writers_shut_out", epoch=fact.epoch, rooms=fact.rooms),
        }

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

    def _not_kept(self, _now_s: float, fact: PromptNotKept) -> None:
        if self._seldom.admits("prefix_not_kept"):
            log.warning("prefix_not_kept", **self._whose(fact), reason=fact.reason)

    def _frame_refused(self, _now_s: float, fact: FrameRefused) -> None:
        if self._seldom.admits("frame_refused", fact.kind):
            log.warning("frame_refused", kind=fact.kind, detail=fact.detail)

    def _message_refused(self, _now_s: float, fact: RoomMessageRefused) -> None:
        if self._seldom.admits("room_message_refused", fact.code):
            rank = {"rank": fact.rank} if fact.rank else {}
            log.warning("room_message_refused", **self._whose(fact), **rank, code=fact.code)

    def _whose(self, fact: RoomFact) -> dict[str, object]:
        return {"room": fact.room, "generation": fact.generation, **(self._peer(fact.peer) if fact.peer else {})}

    def _peer(self, peer: str) -> dict[str, object]:
        return {"peer": peer, "peer_name": self._names.get(peer)}

"""The reader that turns facts into metrics and into lines of the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import structlog

from kvbridge.core.ids import Rank
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry import metrics as m
from kvbridge.telemetry.facts import (
    CopyEnded,
    Fact,
    FrameRefused,
    MemoryRegistered,
    MessagesResent,
    MessageUndelivered,
    OrderBegan,
    OrderEnded,
    PagesDiffer,
    PathLost,
    PeerAccepted,
    PeerFact,
    PeerLost,
    PeerRejected,
    PhasesEnded,
    PrefixMatched,
    RankReceived,
    Reader,
    RequestRefused,
    RequestWaited,
    RoomEntered,
    RoomFact,
    RoomMessageRefused,
    SparseDecoded,
    WorkerLost,
)
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.registry import BusyTime, Metrics

log = structlog.get_logger(__name__)

KNOWN_NAMES = 1_024
UNKNOWN = "unknown"
"""The name of a peer that was never accepted, or long ago, and of the transport of an older peer."""
WHOLE = "admit_to_claim"
"""The phase that has a metric of its own."""


class NodeReader:
    """Counts facts in a node's metrics, and writes them to its log; knows the names of peers.

    Each fact that declares a line has one in the log, and so have rooms that ended and copies that failed. Unauthenticated callers
    can cause some of these lines, and many rooms others: `seldom` limits their number.
    """

    def __init__(self, metrics: Metrics, seldom: Seldom) -> None:
        self._metrics = metrics
        self._seldom = seldom
        # A module's logger is made anew for each line, also for a line that is not written; a room has many.
        self._rooms = log.bind()
        self._names: dict[str, str] = {}
        """Names of incarnations of peers, from their handshakes."""
        self._registered: dict[Rank, float] = {}
        self._under_way: dict[int, BusyTime] = {}
        """By order, the busy time to which the order adds."""
        count, name = metrics.count, self._name
        lines = dict.fromkeys((kind for kind in Fact.kinds if kind.line), self._line)
        self.tables: tuple[Reader, ...] = (
            {PeerAccepted: self._accepted},
            {
                RoomEntered: self._room,
                OrderBegan: self._order_began,
                OrderEnded: self._order_ended,
                RankReceived: self._received,
                PhasesEnded: self._phases_ended,
                PagesDiffer: lambda _, fact: count(m.DIGEST_MISMATCHES, fact.component.value, by=fact.pages),
                PrefixMatched: self._prefix_matched,
                SparseDecoded: self._sparse_decoded,
                CopyEnded: self._copied,
                RequestRefused: lambda _, fact: count(m.REFUSED, fact.code),
                RoomMessageRefused: lambda _, fact: count(m.MESSAGES_REFUSED, fact.code),
                RequestWaited: lambda _, fact: metrics.observe(m.WAIT, fact.seconds, fact.outcome),
                PeerRejected: lambda _, fact: count(m.PEER_FAILURES, name(fact.peer), fact.code),
                PeerLost: lambda _, fact: count(m.PEER_FAILURES, name(fact.peer), "lost"),
                PathLost: lambda _, fact: count(m.PEER_FAILURES, name(fact.peer), "path_lost"),
                FrameRefused: lambda _, fact: count(m.FRAMES_REFUSED, fact.kind),
                MessagesResent: lambda _, fact: count(m.RESENT, by=fact.count),
                MessageUndelivered: lambda _, __: count(m.UNDELIVERED),
                MemoryRegistered: self._memory_registered,
                WorkerLost: self._worker_lost,
            },
            {**lines, RoomEntered: self._tell_room, CopyEnded: self._tell_copy},
        )

    def _accepted(self, _now_s: float, fact: PeerAccepted) -> None:
        self._names.pop(fact.peer, None)
        self._names[fact.peer] = fact.name
        if len(self._names) > KNOWN_NAMES:
            del self._names[next(iter(self._names))]

    def _name(self, peer: str) -> str:
        return self._names.get(peer, UNKNOWN)

    def _room(self, _now_s: float, fact: RoomEntered) -> None:
        if not fact.state.final:
            return
        self._metrics.count(m.ROOMS_ENDED, fact.state.value, fact.code)
        if fact.limit:
            self._metrics.count(m.ENDED_BY_LIMIT, fact.limit)
        if fact.state is RoomState.FAILED and fact.peer:
            self._metrics.count(m.PEER_FAILURES, self._name(fact.peer), fact.code)

    def _order_began(self, now_s: float, fact: OrderBegan) -> None:
        busy = self._metrics.busy(m.SENT, fact.transport, self._name(fact.peer))
        self._under_way[fact.order] = busy
        busy.begin(now_s)

    def _order_ended(self, now_s: float, fact: OrderEnded) -> None:
        self._under_way.pop(fact.order).end(now_s)
        if fact.amounts:
            self._metrics.transferred(fact.amounts, m.SENT, fact.transport, self._name(fact.peer))

    def _received(self, now_s: float, fact: RankReceived) -> None:
        way = m.RECEIVED, fact.transport or UNKNOWN, self._name(fact.peer)
        self._metrics.transferred(fact.amounts, *way)
        busy = self._metrics.busy(*way)
        for began_ago_s, ended_ago_s in fact.under_way_ago_s:
            busy.add(now_s - began_ago_s, now_s - ended_ago_s)

    def _prefix_matched(self, _now_s: float, fact: PrefixMatched) -> None:
        for outcome, tokens in (("hit", fact.hit_tokens), ("miss", fact.miss_tokens)):
            self._metrics.count(m.PREFIX_TOKENS, outcome, by=tokens)

    def _phases_ended(self, _now_s: float, fact: PhasesEnded) -> None:
        for phase, seconds in fact.phases_s.items():
            if phase == WHOLE:
                self._metrics.observe(m.ADMISSION_TO_CLAIM, seconds, trace_id=fact.trace_id)
            else:
                self._metrics.observe(m.PHASE, seconds, phase, trace_id=fact.trace_id)

    def _sparse_decoded(self, _now_s: float, fact: SparseDecoded) -> None:
        for outcome, rows in fact.rows.items():
            self._metrics.count(m.SPARSE_ROWS, outcome, by=rows)

    def _copied(self, _now_s: float, fact: CopyEnded) -> None:
        self._metrics.count(m.TIER_COPIES, fact.direction, fact.code or m.DONE)
        self._metrics.count(m.TIER_COPIED, fact.direction, by=fact.bytes)
        self._metrics.count(m.TIER_COPY_SECONDS, fact.direction, by=fact.busy_s)

    def _memory_registered(self, _now_s: float, fact: MemoryRegistered) -> None:
        """A node is as far as the slowest of its ranks."""
        self._registered[fact.rank] = fact.share
        self._metrics.assign(m.REGISTRATION, min(self._registered.values()))

    def _worker_lost(self, _now_s: float, fact: WorkerLost) -> None:
        if fact.cause:
            self._metrics.count(m.WORKER_RESTARTS, fact.cause)

    # ------------------------------------------------------------------ the log

    def _line(self, _now_s: float, fact: Fact) -> None:
        level, event, *keys = fact.line.split()
        if fact.seldom is not None and not self._seldom.admits(event, getattr(fact, fact.seldom, "")):
            return
        named = {key: getattr(fact, name or key) for key, _, name in (each.partition("=") for each in keys)}
        shown = {key: _shown(value) for key, value in named.items() if value != ""}
        getattr(log, level)(event, **self._whose(fact), **shown)

    def _tell_room(self, _now_s: float, fact: RoomEntered) -> None:
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

    def _tell_copy(self, _now_s: float, fact: CopyEnded) -> None:
        about = {"direction": fact.direction, "pages": fact.pages}
        if not fact.code:
            log.debug("pages_copied", **about, bytes=fact.bytes, seconds=round(fact.seconds, 4))
        elif self._seldom.admits("pages_not_copied", fact.code):
            log.warning("pages_not_copied", **about, code=fact.code, reason=fact.reason)

    def _whose(self, fact: Fact) -> dict[str, object]:
        """Return the keys that say which room a line is about, and which peer."""
        told: dict[str, object] = {}
        if isinstance(fact, RoomFact):
            told = {"room": fact.room, "generation": fact.generation}
        if isinstance(fact, RoomFact | PeerFact) and fact.peer:
            told |= {"peer": fact.peer, "peer_name": self._name(fact.peer)}
        return told


def _shown(value: object) -> object:
    """Return a fact's value as a line shows it: ranks and components by their names."""
    if isinstance(value, Rank):
        return str(value)
    if isinstance(value, Mapping):
        return {kind.value: pages for kind, pages in value.items()}
    if isinstance(value, tuple) and any(isinstance(each, Rank) for each in value):
        return list(map(str, value))
    return value

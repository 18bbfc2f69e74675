"""What becomes of facts: metrics, log lines, and what `/status` shows of the recent past.

Owns: which fact counts where, and how it reads in a log. Must not know: how facts come about, what is to be done.

Each reader is a table from a fact's type to what it does with it; a fact that a table leaves out does not concern that reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amounts
from kvbridge.telemetry.events import (
    EngineAttached,
    EngineEnded,
    EngineLeft,
    EngineLost,
    Fact,
    FenceBegan,
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
    RankSent,
    RequestRefused,
    RequestWaited,
    RoomEntered,
    RoomFact,
    RoomMessageRefused,
    RoomQuarantined,
    RoomReceived,
    RoomRejected,
    WorkerLost,
    WorkerStarted,
    WritersShutOut,
)
from kvbridge.telemetry.logs import Seldom
from kvbridge.telemetry.metrics import (
    DIGEST_MISMATCHES,
    FRAMES_REFUSED,
    PHASE,
    REFUSED,
    REGISTRATION,
    RESENT,
    ROOMS_ENDED,
    UNDELIVERED,
    WAIT,
    WORKER_RESTARTS,
    Direction,
    Metrics,
)

log = structlog.get_logger(__name__)

RECENT_PROBLEMS = 50
RECENT_PEERS = 256
UNKNOWN_TRANSPORT = "any"
"""Of received bytes: the receiving side sees memory change, not what changes it."""


class MetricsReader:
    """Counts facts in the metrics of a node."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._registered: dict[Rank, float] = {}
        self._table: dict[type[Any], Callable[[Any], None]] = {
            RoomEntered: self._room,
            OrderBegan: lambda fact: metrics.transfer_began(Direction.SENT, fact.transport),
            OrderEnded: self._order_ended,
            RankSent: lambda fact: self._phases(fact.phases_s),
            RoomReceived: self._received,
            PagesDiffer: lambda fact: metrics.count(DIGEST_MISMATCHES, fact.component.value, by=fact.pages),
            RequestRefused: lambda fact: metrics.count(REFUSED, fact.code),
            RoomMessageRefused: lambda fact: metrics.count(REFUSED, fact.code),
            RequestWaited: lambda fact: metrics.observe(WAIT, fact.seconds, fact.outcome),
            FrameRefused: lambda fact: metrics.count(FRAMES_REFUSED, fact.kind),
            MessagesResent: lambda fact: metrics.count(RESENT, by=fact.count),
            MessageUndelivered: lambda _fact: metrics.count(UNDELIVERED),
            MemoryRegistered: self._memory_registered,
            WorkerLost: self._worker_lost,
        }

    def __call__(self, _now_s: float, fact: Fact) -> None:
        """Read one fact."""
        count = self._table.get(type(fact))
        if count is not None:
            count(fact)

    def _room(self, fact: RoomEntered) -> None:
        if fact.state.final:
            self._metrics.count(ROOMS_ENDED, fact.state.value, fact.code)

    def _order_ended(self, fact: OrderEnded) -> None:
        self._metrics.transfer_ended(Direction.SENT, fact.transport)
        self._metrics.transferred(fact.amounts, Direction.SENT, fact.transport)

    def _received(self, fact: RoomReceived) -> None:
        self._metrics.transferred(fact.amounts, Direction.RECEIVED, UNKNOWN_TRANSPORT)
        self._phases(fact.phases_s)

    def _phases(self, phases_s: Mapping[str, float]) -> None:
        for phase, seconds in phases_s.items():
            self._metrics.observe(PHASE, seconds, phase)

    def _memory_registered(self, fact: MemoryRegistered) -> None:
        """A node is as far as the slowest of its ranks."""
        self._registered[fact.rank] = fact.share
        self._metrics.set(REGISTRATION, min(self._registered.values()))

    def _worker_lost(self, fact: WorkerLost) -> None:
        if fact.cause:
            self._metrics.count(WORKER_RESTARTS, fact.cause)


class LogReader:
    """Writes a line for each fact that an operator should find again. What strangers can cause is written seldom."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._refusals = Seldom(clock=clock)
        # A module's logger is made anew for each line, also for one that is not written; a room has many.
        self._rooms = log.bind()
        self._table: dict[type[Any], Callable[[Any], None]] = {
            RoomEntered: self._room,
            RoomRejected: lambda fact: log.warning("room_rejected", **_room(fact), code=fact.code, reason=fact.reason),
            RoomQuarantined: lambda fact: log.error(
                "room_quarantined", **_room(fact), cause=fact.cause, reason=fact.reason
            ),
            PeerAccepted: lambda fact: log.info(
                "peer_accepted", peer=fact.peer, name=fact.name, features=fact.features
            ),
            PeerRejected: lambda fact: log.warning("peer_rejected", peer=fact.peer, code=fact.code, reason=fact.reason),
            PeerLost: lambda fact: log.warning("peer_lost", peer=fact.peer, reason=fact.reason),
            FrameRefused: self._frame_refused,
            RoomMessageRefused: self._message_refused,
            WorkerStarted: lambda fact: log.info("worker_ready", rank=str(fact.rank), pid=fact.pid),
            EngineAttached: lambda fact: log.info(
                "engine_attached", engine=fact.engine, pid=fact.pid, ranks=[str(rank) for rank in fact.ranks]
            ),
            EngineLost: lambda fact: log.warning(
                "engine_lost", engine=fact.engine, reason=fact.reason, pages_wait=fact.pages_wait
            ),
            EngineLeft: lambda fact: log.info("engine_left", engine=fact.engine),
            EngineEnded: lambda fact: log.info("engine_ended", engine=fact.engine),
            FenceBegan: lambda fact: log.warning("fence_began", epoch=fact.epoch, rooms=fact.rooms),
            WritersShutOut: lambda fact: log.info("writers_shut_out", epoch=fact.epoch, rooms=fact.rooms),
        }

    def __call__(self, _now_s: float, fact: Fact) -> None:
        """Read one fact."""
        write = self._table.get(type(fact))
        if write is not None:
            write(fact)

    def _room(self, fact: RoomEntered) -> None:
        if not fact.state.final:
            self._rooms.debug("room_entered", **_room(fact), state=fact.state.value)
        elif not fact.code:
            self._rooms.info("room_ended", **_room(fact), state=fact.state.value)
        else:
            self._rooms.warning("room_ended", **_room(fact), state=fact.state.value, code=fact.code, reason=fact.reason)

    def _frame_refused(self, fact: FrameRefused) -> None:
        if self._refusals.admits(fact.kind):
            log.warning("frame_refused", kind=fact.kind, detail=fact.detail)

    def _message_refused(self, fact: RoomMessageRefused) -> None:
        if self._refusals.admits(fact.code):
            log.warning("room_message_refused", **_room(fact), code=fact.code)


def _room(fact: RoomFact) -> dict[str, object]:
    return {"room": fact.room, "generation": fact.generation, "peer": fact.peer}


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

    def __call__(self, now_s: float, fact: Fact) -> None:
        """Read one fact."""
        match fact:
            case RoomEntered():
                self._room(now_s, fact)
            case OrderEnded() if fact.amounts:
                self._peer(now_s, fact.peer).sent_bytes += _bytes(fact.amounts)
            case RoomReceived():
                self._peer(now_s, fact.peer).received_bytes += _bytes(fact.amounts)
            case PeerRejected():
                self._note(now_s, "peer rejected", fact.peer, fact.reason)
            case PeerLost():
                self._note(now_s, "peer lost", fact.peer, fact.reason)
            case WorkerLost():
                self._note(now_s, "worker lost", str(fact.rank), fact.reason)
            case EngineLost():
                self._note(now_s, "engine lost", fact.engine, fact.reason)
            case RoomQuarantined():
                self._note(now_s, "room quarantined", str(fact.room), fact.reason)
            case RoomRejected():
                self._note(now_s, "room rejected", str(fact.room), fact.reason)
            case _:
                pass

    def problems(self) -> tuple[Problem, ...]:
        """The last problems, the oldest first."""
        return tuple(self._problems)

    def traffic(self) -> Mapping[str, PeerTraffic]:
        """Traffic by the peer's incarnation, the longest unheard-of first."""
        return self._traffic

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

"""Facts about the ways between nodes: those that are lost, and those that are shut."""

from __future__ import annotations

from dataclasses import dataclass

from kvbridge.core.ids import Rank
from kvbridge.telemetry.events import Fact, PeerFact, RoomFact


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLost(PeerFact):
    """Prefill: a rank has lost `transport` to a peer in the middle of a transfer, and goes on over `transports`."""

    rank: Rank
    transport: str
    transports: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PathsFound(PeerFact):
    """Prefill: a rank reaches a peer by `transports`, and could by those of `standby`."""

    rank: Rank
    transports: tuple[str, ...]
    standby: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRerouted(RoomFact):
    """What one transport has not confirmed of a room goes over another one; on decode, the lost one is being shut."""

    rank: Rank
    lost: str
    over: str = ""
    """Empty on decode, which does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuccessorsFailed(Fact):
    """A rank worker could not build transports in the place of those that it has; it tries again."""

    rank: Rank
    transports: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceBegan(Fact):
    """Endpoints of `epoch` replace the earlier ones, because `rooms` rooms have writers that give no proof."""

    epoch: int
    rooms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WritersShutOut(Fact):
    """Everything that writers knew of this node's memory before `epoch` is void; `rooms` rooms were waiting for that."""

    epoch: int
    rooms: int

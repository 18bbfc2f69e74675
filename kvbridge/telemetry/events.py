"""What happens on a node: the facts that metrics, logs and `/status` are made of.

A fact is something that has happened and cannot be taken back. What *is* (rooms by state, free pages, who is connected) is
not a fact: readers look it up when they are asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.states import RoomState
from kvbridge.telemetry.context import TraceContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """Something that has happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomFact(Fact):
    """Something about one attempt at one room. `peer` is the other node's incarnation, empty while there is none."""

    room: int
    generation: int
    peer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomEntered(RoomFact):
    """A room came into another state, as users see it. `code` and `reason` are its first cause, empty while there is none."""

    state: RoomState
    code: str = ""
    reason: str = ""
    limit: str = ""
    """What has ended it, if it was that nothing happened in time."""
    age_s: float = 0.0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    """Of these, what decode held already."""
    computed_tokens: int = 0
    """Of these, what prefill held already."""
    bytes: int = 0
    """What has arrived, as far as is known."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """On whose behalf: the request id and the trace id of its admission, those that there were."""
    trace: TraceContext | None = None
    """The room's own span; None for one that nobody traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomOffered(RoomFact):
    """Prefill: a decode node has said where to send a room, and of which span that is a part."""

    trace: TraceContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomBegun(RoomFact):
    """Prefill: an engine has begun to compute a room."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomFinished(RoomFact):
    """Prefill: an engine has published everything of a room that it has begun."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomRejected(RoomFact):
    """Everything of a room was sent, and the decode side could not use it."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomQuarantined(RoomFact):
    """The pages of a room stay away from everybody until something is proved; `cause` is one of few words."""

    cause: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderBegan(RoomFact):
    """A rank worker was told to send a section of a room to `peer`, over `transport`."""

    rank: Rank
    order: int
    transport: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderEnded(RoomFact):
    """An order has ended, well or badly; for each OrderBegan there is one, also when its worker ends first."""

    rank: Rank
    order: int
    transport: str
    amounts: Amounts = field(default_factory=dict)
    """What has arrived, as far as its worker could say."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Its phases, as its worker has measured them (`telemetry/phases.py`)."""
    code: str = ""
    """Why it has failed; empty when it has not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhasesEnded(RoomFact):
    """Phases of a room are over (`telemetry/phases.py`), and took so long on this node."""

    phases_s: Mapping[str, float]
    trace_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReceived(RoomFact):
    """A rank of `peer` has sent everything of a room that was its to send, and it has arrived."""

    rank: Rank
    amounts: Amounts
    transport: str
    under_way_ago_s: tuple[tuple[float, float], ...] = ()
    """When it was sending: from so many seconds ago until so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseDecoded(RoomFact):
    """What the hot buffer of an engine did for a room: rows, by the names of `SparseRows`."""

    rows: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatched(RoomFact):
    """How much of the prompt of a room with page keys was cached when the room was admitted."""

    hit_tokens: int
    miss_tokens: int
    from_checkpoint: bool = False
    """Whether prefill goes on from windows and states that were kept."""
    host_tokens: int = 0
    """Of the hit tokens, those that were on the host alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptNotKept(RoomFact):
    """Nothing more of a room stays for others, though it has page keys."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DisputedPagesDropped(RoomFact):
    """Engines of a room say different tokens, from this page on: what the room had let others read is forgotten."""

    page: int
    dropped: int
    """Pages that no request finds any more, those that go on from them included."""
    read: int
    """Of these, those that are still read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixesDropped(Fact):
    """Somebody had every cached prefix forgotten: so many pages, of which so many are still read."""

    pages: int
    read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesDiffer(RoomFact):
    """Pages of a component have arrived with other bytes than were sent."""

    component: ComponentKind
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAnswered(Fact):
    """A request for a room has been answered, or its caller has left (`code`); `code` is empty when it was admitted."""

    room: int
    generation: int
    seconds: float
    code: str
    trace: TraceContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndReserved(Fact):
    """Bootstrap: a daemon has been asked to reserve one end of a room; `code` says why it has not."""

    room: int
    generation: int
    role: str
    url: str
    seconds: float
    code: str
    trace: TraceContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PairingEnded(Fact):
    """Bootstrap: a request for a pair has been answered: `paired`, `cancelled` by its caller, or the code of its error."""

    room: int | None
    """None when no ticket was given."""
    generation: int
    seconds: float
    outcome: str
    trace: TraceContext | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixGuessed(Fact):
    """Bootstrap: what became of the guess who holds the beginning of a prompt, for one side of a pair."""

    role: str
    guess: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRefused(Fact):
    """A request was not admitted; `code` is one of few words."""

    code: str
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomMessageRefused(RoomFact):
    """A message of a peer or of a rank worker about a room was refused; `code` is one of few words."""

    code: str
    rank: str = ""
    """The rank worker's; empty for a peer."""


class WaitOutcome(StrEnum):
    """How a wait for pages ended."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    LEFT = "left"
    """Its client went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestWaited(Fact):
    """A request that waited for pages waits no more."""

    outcome: WaitOutcome
    seconds: float
    client: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFact(Fact):
    """Something about a node of the other role. `peer` is its incarnation, or its address while that is not known."""

    peer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccepted(PeerFact):
    """A handshake has succeeded, perhaps again: rooms may go between both nodes. `name` is the instance and node of the peer."""

    name: str
    features: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRejected(PeerFact):
    """A handshake has failed, on whichever side: no room goes between both nodes (any more)."""

    code: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost(PeerFact):
    """A peer is gone, silent, or another incarnation: rooms do not rely on it any more."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageUndelivered(Fact):
    """A control message was given up unacknowledged."""

    peer: str
    message: str
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesResent(Fact):
    """Control messages were sent again."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRefused(Fact):
    """A frame or a connection was refused; `kind` is one of few words, `detail` is for people."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRegistered(Fact):
    """A rank worker has registered this share of its memory with its transports (0 to 1)."""

    rank: Rank
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStarted(Fact):
    """A rank worker is ready (again)."""

    rank: Rank
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost(Fact):
    """A rank worker has ended, and with it all that it had under way."""

    rank: Rank
    cause: str
    """One of few words for a process that is started again; empty for the worker of an engine."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFact(Fact):
    """Something about one engine process, by the name of its connection."""

    engine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAttached(EngineFact):
    """An engine has attached to ranks of this node. `pid` is the kernel's word, 0 for one of another pid namespace."""

    pid: int
    ranks: tuple[Rank, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLeft(EngineFact):
    """An engine has said that it leaves and uses no page any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLost(EngineFact):
    """An engine's connection has ended, or the memory that it was attached to is gone."""

    reason: str
    pages_wait: bool = False
    """Pages wait for the end of its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnded(EngineFact):
    """The process of a lost engine has ended, for whose end pages waited."""

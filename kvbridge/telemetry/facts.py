"""Everything that can happen on a node or on bootstrap, as facts (`telemetry/stream.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.context import TraceContext
from kvbridge.telemetry.stream import Fact


class RoomFact(Fact):
    """A fact about one attempt at one room. `peer` is the other node's incarnation, empty while there is none."""

    room: int
    generation: int
    peer: str = ""


class RoomEntered(RoomFact):
    """A room came into another state, as users see it. `code` and `reason` are its first cause, empty while there is none."""

    state: RoomState
    code: str = ""
    reason: str = ""
    limit: str = ""
    """The limit that ended the room, if nothing happened in time."""
    age_s: float = 0.0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    """Tokens of the prompt that decode held already."""
    computed_tokens: int = 0
    """Tokens of the prompt that prefill held already."""
    bytes: int = 0
    """Bytes that have arrived, as far as is known."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """The request id and the trace id of the room's admission, if known."""
    trace: TraceContext | None = None
    """The room's own span; None for a room without a trace."""


class RoomOffered(RoomFact):
    """Prefill: a decode node has said where to send a room, and in which span it waits."""

    trace: TraceContext | None


class RoomBegun(RoomFact):
    """Prefill: an engine has begun to compute a room."""

    engine: str


class RoomFinished(RoomFact):
    """Prefill: an engine has published everything of a room that it had begun."""

    engine: str


class RoomRejected(RoomFact, line="warning room_rejected code reason", problem="room rejected"):
    """Everything of a room was sent, and the decode side could not use it."""

    code: str
    reason: str


class RoomQuarantined(RoomFact, line="error room_quarantined cause reason", problem="room quarantined"):
    """Nobody may use the pages of a room until something is proved; `cause` is one of few words."""

    cause: str
    reason: str


class OrderBegan(RoomFact):
    """A rank worker was told to send a section of a room to `peer`, over `transport`."""

    rank: Rank
    order: int
    transport: str


class OrderEnded(RoomFact):
    """An order has ended, well or badly; each OrderBegan is followed by one, also when the worker ends first."""

    rank: Rank
    order: int
    transport: str
    amounts: Amounts = field(default_factory=dict)
    """Rows and bytes that have arrived, as far as the worker could say."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The order's phases, as the worker has measured them."""
    code: str = ""
    """Why the order has failed; empty when it has not."""


class PhasesEnded(RoomFact):
    """Phases of a room (`PHASES`) are over, and took so long on this node."""

    phases_s: Mapping[str, float]
    trace_id: str = ""


class RankReceived(RoomFact):
    """A rank of `peer` has sent its whole share of a room, and the share has arrived."""

    rank: Rank
    amounts: Amounts
    transport: str
    under_way_ago_s: tuple[tuple[float, float], ...] = ()
    """When the rank was sending: from so many seconds ago until so many."""


class RoomRerouted(RoomFact):
    """Bytes of a room that one transport has not confirmed go over another one; decode shuts out the lost transport."""

    rank: Rank
    lost: str
    over: str = ""
    """Empty on decode, which does not know."""


class SparseDecoded(RoomFact):
    """Rows of an engine's hot buffer for a room, by the names of `SparseRows`."""

    rows: Mapping[str, int]


class PrefixMatched(RoomFact):
    """How much of the prompt of a room with page keys was cached when the room was admitted."""

    hit_tokens: int
    miss_tokens: int
    from_checkpoint: bool = False
    """Whether prefill continues from windows and states that were kept."""
    host_tokens: int = 0
    """The hit tokens that were in host memory alone."""


class PromptNotKept(RoomFact, line="warning prefix_not_kept reason", seldom=""):
    """Nothing more of a room stays for others, though the room has page keys."""

    reason: str


class DisputedPagesDropped(RoomFact, line="warning disputed_pages_dropped page dropped_pages=dropped read_pages=read"):
    """Engines of a room say different tokens from this page on: the room's cached pages from there on are forgotten."""

    page: int
    dropped: int
    """Pages that no request finds any more, including pages of other rooms that continue them."""
    read: int
    """The dropped pages that are still read."""


class PrefixesDropped(Fact, line="info prefixes_dropped pages read_pages=read"):
    """Somebody had every cached prefix forgotten: so many pages, of which so many are still read."""

    pages: int
    read: int


class PagesDiffer(RoomFact):
    """Pages of a component have arrived with other bytes than were sent."""

    component: ComponentKind
    pages: int


class CopyEnded(Fact):
    """An order to copy cached pages has ended; `direction` is `backup` or `load_back`."""

    direction: str
    pages: int
    """Pages of prompts and answers; one is a page of each space that grows with the tokens."""
    bytes: int
    """Bytes copied over all ranks of this node, also when the order has failed."""
    busy_s: float
    """How long the slowest rank was copying."""
    seconds: float
    """From the order to its end."""
    code: str = ""
    """Why the order has failed; empty when it has not."""
    reason: str = ""


class RequestAnswered(Fact):
    """A request for a room has been answered, or its caller has left (`code`); `code` is empty when it was admitted."""

    room: int
    generation: int
    seconds: float
    code: str
    trace: TraceContext | None


class EndReserved(Fact):
    """Bootstrap: a daemon has been asked to reserve one end of a room; `code` says why the daemon has not."""

    room: int
    generation: int
    role: str
    url: str
    seconds: float
    code: str
    trace: TraceContext | None


class PairingEnded(Fact):
    """Bootstrap: a request for a pair has been answered: `paired`, `cancelled` by its caller, or the code of its error."""

    room: int | None
    """None when no ticket was given."""
    generation: int
    seconds: float
    outcome: str
    trace: TraceContext | None


class PrefixGuessed(Fact):
    """Bootstrap: how good the guess was who holds the beginning of a prompt, for one side of a pair."""

    role: str
    guess: str


class RequestRefused(Fact):
    """A request was not admitted; `code` is one of few words."""

    code: str
    client: str = ""


class RoomMessageRefused(RoomFact, line="warning room_message_refused rank code", seldom="code"):
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


class RequestWaited(Fact):
    """A request does not wait for pages any more."""

    outcome: WaitOutcome
    seconds: float
    client: str = ""


class PeerFact(Fact):
    """A fact about a node of the other role. `peer` is its incarnation, or its address while the incarnation is not known."""

    peer: str


class PeerAccepted(PeerFact, line="info peer_accepted features"):
    """A handshake has succeeded, perhaps again: rooms may go between both nodes. `name` is the peer's `instance/node`."""

    name: str
    features: tuple[str, ...]


class PeerRejected(PeerFact, line="warning peer_rejected code reason", problem="peer rejected"):
    """A handshake has failed, on whichever side: no room goes between both nodes (any more)."""

    code: str
    reason: str


class PeerLost(PeerFact, line="warning peer_lost reason", problem="peer lost"):
    """A peer is gone, silent, or another incarnation: rooms do not rely on the peer any more."""

    reason: str


class PathLost(PeerFact, line="warning path_lost rank transport goes_on_over=transports reason", problem="path lost"):
    """Prefill: a rank has lost `transport` to a peer in the middle of a transfer, and continues over `transports`."""

    rank: Rank
    transport: str
    transports: tuple[str, ...]
    reason: str

    @property
    def why(self) -> str:  # noqa: D102 - an override
        return f"{self.transport} of rank {self.rank}: {self.reason}"


class PathsFound(PeerFact, line="info paths_found rank transports standby"):
    """Prefill: a rank reaches a peer by `transports`, and could by those of `standby`."""

    rank: Rank
    transports: tuple[str, ...]
    standby: tuple[str, ...]


class SuccessorsFailed(Fact, problem="transports not built"):
    """A rank worker could not build transports in place of its present ones; it tries again."""

    rank: Rank
    transports: tuple[str, ...]
    reason: str

    @property
    def why(self) -> str:  # noqa: D102 - an override
        return f"{', '.join(self.transports)}: {self.reason}"


class FenceBegan(Fact, line="warning fence_began epoch rooms"):
    """Endpoints of `epoch` replace the earlier ones, because `rooms` rooms have writers that give no proof."""

    epoch: int
    rooms: int


class WritersShutOut(Fact, line="info writers_shut_out epoch rooms"):
    """No writer can use endpoints from before `epoch` any more; `rooms` rooms were waiting for that."""

    epoch: int
    rooms: int


class MessageUndelivered(Fact):
    """A control message was given up unacknowledged."""

    peer: str
    message: str
    age_s: float


class MemoryRegistered(Fact):
    """A rank worker has registered this share of its memory with its transports (0 to 1)."""

    rank: Rank
    share: float


class WorkerStarted(Fact, line="info worker_ready rank pid"):
    """A rank worker is ready (again)."""

    rank: Rank
    pid: int


class WorkerLost(Fact, problem="worker lost"):
    """A rank worker has ended, and with it everything that it had under way."""

    rank: Rank
    cause: str
    """One of few words for a process that is started again; empty for the worker of an engine."""
    reason: str


class EngineFact(Fact):
    """A fact about one engine process, by the name of its connection."""

    engine: str


class EngineAttached(EngineFact, line="info engine_attached engine pid ranks"):
    """An engine has attached to ranks of this node. `pid` is the kernel's word, 0 for another pid namespace."""

    pid: int
    ranks: tuple[Rank, ...]


class EngineLeft(EngineFact, line="info engine_left engine"):
    """An engine has said that it leaves and uses no page any more."""


class EngineLost(EngineFact, line="warning engine_lost engine reason pages_wait", problem="engine lost"):
    """An engine's connection has ended, or the memory that it was attached to is gone."""

    reason: str
    pages_wait: bool = False
    """Whether pages wait for the end of the engine's process."""


class EngineEnded(EngineFact, line="info engine_ended engine"):
    """The process of a lost engine has ended, for whose end pages waited."""

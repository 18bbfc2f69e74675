"""Facts: the kinds of events on a node or on bootstrap, and the stream that hands each fact to its readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.context import TraceContext


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Fact:
    """An event. Each kind is a dataclass, and declares its line of the log and whether it is a problem."""

    line: ClassVar[str] = ""
    """Level, event and keys of the line, as `key=field` where the field has another name; empty: no line."""
    seldom: ClassVar[str | None] = None
    """Field whose words limit the number of lines, each word by itself; "": one limit for all lines; None: no limit."""
    problem: ClassVar[str] = ""
    """Name of the problem in `/status`; empty: no problem."""
    why: ClassVar[str] = "{reason}"
    """Form of the reason in `/status`, with the names of fields."""

    kinds: ClassVar[list[type[Fact]]] = []

    def __init_subclass__(cls, **declared: str) -> None:
        for name, value in declared.items():
            setattr(cls, name, value)
        Fact.kinds.append(dataclass(kw_only=True)(cls))


class FrameRefused(Fact, line="warning frame_refused kind detail", seldom="kind"):
    """A frame or a connection was refused. `kind` is one of few words; people read `detail`."""

    kind: str
    detail: str


class MessagesResent(Fact):
    """Control messages were sent again."""

    count: int


class RoomFact(Fact):
    """A fact about one attempt at one room. `peer` is the other node's incarnation; empty before there is one."""

    room: int
    generation: int
    peer: str = ""


class RoomEntered(RoomFact):
    """A room came into another state. `code`, `reason` and `limit` tell the first cause of its end, if they are not empty."""

    state: RoomState
    code: str = ""
    reason: str = ""
    limit: str = ""
    age_s: float = 0.0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    computed_tokens: int = 0
    """Prompt tokens that prefill held already. Decode held `prefix_tokens`."""
    bytes: int = 0
    """Known bytes that have arrived."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """Request id and trace id of the room's admission, if known."""
    trace: TraceContext | None = None


class RoomOffered(RoomFact):
    """Prefill: a decode node has offered its pages for a room. `trace` is the span in which decode waits."""

    trace: TraceContext | None


class RoomBegun(RoomFact):
    """Prefill: an engine has begun to compute a room."""

    engine: str


class RoomFinished(RoomFact):
    """Prefill: an engine has published everything of a room that it had begun."""

    engine: str


class RoomRejected(RoomFact, line="warning room_rejected code reason", problem="room rejected"):
    """Prefill has sent everything of a room, and decode could not use it."""

    code: str
    reason: str


class RoomQuarantined(RoomFact, line="error room_quarantined cause reason", problem="room quarantined"):
    """Nobody may use the pages of a room before a proof; `cause` says which proof, in one of few words."""

    cause: str
    reason: str


class OrderBegan(RoomFact):
    """A rank worker was told to send a section of a room to `peer`, over `transport`."""

    rank: Rank
    order: int
    transport: str


class OrderEnded(RoomFact):
    """An order has succeeded or failed. One follows each OrderBegan, also when the worker ends first."""

    rank: Rank
    order: int
    transport: str
    amounts: Amounts = field(default_factory=dict)
    """Rows and bytes that the worker knows to have arrived."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each phase of the order."""
    code: str = ""
    """Code of the failure; empty after success."""


class PhasesEnded(RoomFact):
    """Phases of a room (`PHASES`) are over. `phases_s` are their durations on this node."""

    phases_s: Mapping[str, float]
    trace_id: str = ""


class RankReceived(RoomFact):
    """The whole share of a room that a rank of `peer` sends has arrived."""

    rank: Rank
    amounts: Amounts
    transport: str
    under_way_ago_s: tuple[tuple[float, float], ...] = ()
    """Intervals of sending, as (seconds ago, seconds ago)."""


class RoomRerouted(RoomFact):
    """Bytes of a room that the transport `lost` has not confirmed go over another; decode shuts out the lost transport."""

    rank: Rank
    lost: str
    over: str = ""
    """Empty on decode, which does not know."""


class SparseDecoded(RoomFact):
    """Rows of an engine's hot buffer for a room, by the fields of `SparseRows`."""

    rows: Mapping[str, int]


class PrefixMatched(RoomFact):
    """Cached tokens of a room with page keys at its admission; `host_tokens` of the hits were in host memory alone."""

    hit_tokens: int
    miss_tokens: int
    from_checkpoint: bool = False
    host_tokens: int = 0


class PromptNotKept(RoomFact, line="warning prefix_not_kept reason", seldom=""):
    """No further pages of a room are cached, although the room has page keys."""

    reason: str


class DisputedPagesDropped(RoomFact, line="warning disputed_pages_dropped page dropped_pages=dropped read_pages=read"):
    """Engines of a room state different tokens from `page` on, so the cached pages of the room from there on are forgotten."""

    page: int
    dropped: int
    """Pages that no request finds any more, with the pages of other rooms that continue them; rooms still read `read` of them."""
    read: int


class PrefixesDropped(Fact, line="info prefixes_dropped pages read_pages=read"):
    """Every cached prefix was forgotten on request: `pages` in all, of which rooms still read `read`."""

    pages: int
    read: int


class PagesDiffer(RoomFact):
    """Pages of a component have arrived with other bytes than were sent."""

    component: ComponentKind
    pages: int


class CopyEnded(Fact):
    """An order to copy cached pages of prompts and answers has ended; `direction` is `backup` or `load_back`."""

    direction: str
    pages: int
    bytes: int
    """Bytes copied over all ranks of this node, also when the order has failed."""
    busy_s: float
    """Copying time of the slowest rank."""
    seconds: float
    code: str = ""
    reason: str = ""


class RequestAnswered(Fact):
    """A request for a room was answered, or its caller left. `code` is empty after an admission."""

    room: int
    generation: int
    seconds: float
    code: str
    trace: TraceContext | None


class EndReserved(Fact):
    """Bootstrap: a daemon was asked to reserve one end of a room. `code` is that of its refusal; empty: it agreed."""

    room: int
    generation: int
    role: str
    url: str
    seconds: float
    code: str
    trace: TraceContext | None


class PairingEnded(Fact):
    """Bootstrap: a request for a pair was answered: `paired`, `cancelled` by its caller, or an error's code.

    `room` is None without a ticket; `reason` then says why there is none.
    """

    room: int | None
    generation: int
    seconds: float
    outcome: str
    reason: str = ""
    trace: TraceContext | None


class PrefixGuessed(Fact):
    """Bootstrap: result of guessing which instance holds the beginning of a prompt, for one side of a pair."""

    role: str
    guess: str


class RequestRefused(Fact):
    """A request was not admitted; `code` is one of few words."""

    code: str
    client: str = ""


class RoomMessageRefused(RoomFact, line="warning room_message_refused rank code", seldom="code"):
    """A message of a peer, or of the rank worker `rank`, about a room was refused; `code` is one of few words."""

    code: str
    rank: str = ""


class RequestWaited(Fact):
    """A request has ceased to wait for pages: `admitted`, `refused`, `timeout`, or `left` by its client."""

    outcome: str
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
    """A handshake has failed on either side: from now on no room goes between both nodes."""

    code: str
    reason: str


class PeerLost(PeerFact, line="warning peer_lost reason", problem="peer lost"):
    """A peer is gone, silent, or another incarnation; rooms with it have failed."""

    reason: str


class PathLost(PeerFact, line="warning path_lost rank transport goes_on_over=transports reason", problem="path lost"):
    """Prefill: a rank has lost `transport` to a peer in the middle of a transfer, and continues over `transports`."""

    why = "{transport} of rank {rank}: {reason}"
    rank: Rank
    transport: str
    transports: tuple[str, ...]
    reason: str


class PathsFound(PeerFact, line="info paths_found rank transports standby"):
    """Prefill: a rank reaches a peer by `transports`, and could use those of `standby`."""

    rank: Rank
    transports: tuple[str, ...]
    standby: tuple[str, ...]


class SuccessorsFailed(Fact, problem="transports not built"):
    """A rank worker could not build transports in place of its present ones; it tries again."""

    why = "{transports}: {reason}"
    rank: Rank
    transports: tuple[str, ...]
    reason: str


class FenceBegan(Fact, line="warning fence_began epoch rooms"):
    """Endpoints of `epoch` replace the earlier endpoints, because `rooms` rooms have writers that give no proof."""

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
    """A rank worker has ended, and so has all of its work under way."""

    rank: Rank
    cause: str
    """Kind of end of a process that is started again; empty for the worker of an engine."""
    reason: str


class EngineFact(Fact):
    """A fact about one engine process, by the name of its connection."""

    engine: str


class EngineAttached(EngineFact, line="info engine_attached engine pid ranks"):
    """An engine has attached to ranks of this node. `pid` comes from the kernel; 0: another pid namespace."""

    pid: int
    ranks: tuple[Rank, ...]


class EngineLeft(EngineFact, line="info engine_left engine"):
    """An engine has left, and uses no page any more."""


class EngineLost(EngineFact, line="warning engine_lost engine reason pages_wait", problem="engine lost"):
    """An engine's connection has ended, or its memory is gone; `pages_wait`: pages wait for the end of its process."""

    reason: str
    pages_wait: bool = False


class EngineEnded(EngineFact, line="info engine_ended engine"):
    """Pages waited for the end of a lost engine's process, and it has ended."""


Reader = Mapping[type[Fact], Callable[[float, Any], None]]
"""Functions by kind of fact, called with monotonic seconds and the fact. A base class stands for all kinds below it."""


class EventStream:
    """Hands each fact to every reader at once, the reader added first before the others. For the event loop's thread only.

    A reader must not raise, and must not emit.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._readers: list[Reader] = []
        self._calls: dict[type[Fact], tuple[Callable[[float, Any], None], ...]] = {}
        """Functions for each kind that has occurred: few readers want a fact, and a room has many facts."""

    def add_reader(self, reader: Reader) -> None:
        """Hand every fact of the reader's kinds to it from now on."""
        self._readers.append(reader)
        self._calls.clear()

    def frame_refused(self, kind: str, detail: str) -> None:
        """Emit `FrameRefused`, for sockets."""
        self.emit(FrameRefused(kind=kind, detail=detail))

    def emit(self, fact: Fact) -> None:
        """Hand out a fact of this moment."""
        kind, now_s = type(fact), self._clock()
        if kind not in self._calls:
            self._calls[kind] = tuple(
                call for reader in self._readers for known, call in reader.items() if issubclass(kind, known)
            )
        for call in self._calls[kind]:
            call(now_s, fact)

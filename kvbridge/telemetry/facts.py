"""Everything that can happen on a node or on bootstrap, as facts, and the stream that hands each fact to its readers."""

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
    """Something that has happened. Each kind is a dataclass, and declares its line of the log and whether it is a problem."""

    line: ClassVar[str] = ""
    """Level, event and keys of the line, as `key=field` where the field has another name; empty: the log has no line."""
    seldom: ClassVar[str | None] = None
    """The number of lines is limited for each word of this field, or in all (""); None: all lines are written."""
    problem: ClassVar[str] = ""
    """The name of the problem in `/status`; empty: the fact is no problem."""

    kinds: ClassVar[list[type[Fact]]] = []

    def __init_subclass__(cls, **declared: str) -> None:
        for name, value in declared.items():
            setattr(cls, name, value)
        Fact.kinds.append(dataclass(kw_only=True)(cls))

    @property
    def about(self) -> str:
        """The room, engine, peer or rank that the fact is about."""
        return str(next(getattr(self, name) for name in ("room", "engine", "peer", "rank") if hasattr(self, name)))

    @property
    def why(self) -> str:
        """The reason as `/status` shows it."""
        return str(getattr(self, "reason", ""))


class FrameRefused(Fact, line="warning frame_refused kind detail", seldom="kind"):
    """A frame or a connection was refused; `kind` is one of few words, `detail` is for people."""

    kind: str
    detail: str


class MessagesResent(Fact):
    """Control messages were sent again."""

    count: int


class RoomFact(Fact):
    """A fact about one attempt at one room. `peer` is the other node's incarnation; empty: none yet."""

    room: int
    generation: int
    peer: str = ""


class RoomEntered(RoomFact):
    """A room came into another state. `code`, `reason` and `limit` tell the first cause of its end; empty: none."""

    state: RoomState
    code: str = ""
    reason: str = ""
    limit: str = ""
    age_s: float = 0.0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    computed_tokens: int = 0
    """Tokens of the prompt that prefill held already; `prefix_tokens` are those of decode."""
    bytes: int = 0
    """Bytes that have arrived, as far as is known."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """The request id and the trace id of the room's admission, if known."""
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
    """Nobody may use the pages of a room until something is proved; `cause` is one of few words."""

    cause: str
    reason: str


class OrderBegan(RoomFact):
    """A rank worker was told to send a section of a room to `peer`, over `transport`."""

    rank: Rank
    order: int
    transport: str


class OrderEnded(RoomFact):
    """An order has ended, well or badly. Each OrderBegan is followed by one, also when the worker ends first."""

    rank: Rank
    order: int
    transport: str
    amounts: Amounts = field(default_factory=dict)
    """Rows and bytes that have arrived, as far as the worker knows."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Duration of each phase of the order."""
    code: str = ""
    """Why the order failed; empty when it succeeded."""


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
    """Intervals of sending, as (seconds ago, seconds ago)."""


class RoomRerouted(RoomFact):
    """Bytes of a room that one transport has not confirmed go over another; decode shuts out the lost transport."""

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
    """Engines of a room state different tokens from this page on, so its cached pages from there on are forgotten."""

    page: int
    dropped: int
    """Pages that no request finds any more, including pages of other rooms that continue them; `read` of them are still read."""
    read: int


class PrefixesDropped(Fact, line="info prefixes_dropped pages read_pages=read"):
    """Every cached prefix was forgotten on request: `pages` in all, of which `read` are still read."""

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
    """How long the slowest rank was copying."""
    seconds: float
    code: str = ""
    reason: str = ""


class RequestAnswered(Fact):
    """A request for a room was answered, or its caller left; `code` is empty when the room was admitted."""

    room: int
    generation: int
    seconds: float
    code: str
    trace: TraceContext | None


class EndReserved(Fact):
    """Bootstrap: a daemon was asked to reserve one end of a room; `code` says why it refused, empty when it did not."""

    room: int
    generation: int
    role: str
    url: str
    seconds: float
    code: str
    trace: TraceContext | None


class PairingEnded(Fact):
    """Bootstrap: a request for a pair was answered: `paired`, `cancelled` by its caller, or an error's code. No ticket: no room."""

    room: int | None
    generation: int
    seconds: float
    outcome: str
    reason: str = ""
    """Why there is no ticket."""
    trace: TraceContext | None


class PrefixGuessed(Fact):
    """Bootstrap: how good the guess was which instance holds the beginning of a prompt, for one side of a pair."""

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
    """A request has stopped waiting for pages: `admitted`, `refused`, `timeout`, or `left` by its client."""

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
    """A handshake has failed on either side: no room goes between both nodes (any more)."""

    code: str
    reason: str


class PeerLost(PeerFact, line="warning peer_lost reason", problem="peer lost"):
    """A peer is gone, silent, or another incarnation; rooms with it have failed."""

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
    """A word for a process that is started again; empty for the worker of an engine."""
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
"""Functions by kind of fact (a base class stands for all kinds below it), called with monotonic seconds and the fact."""


class EventStream:
    """Hands each fact to every reader at once, in the order in which readers were added. Used from the event loop's thread only.

    A reader must not raise, and must not emit.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._readers: list[Reader] = []
        self._calls: dict[type[Fact], tuple[Callable[[float, Any], None], ...]] = {}
        """The calls for each kind that has occurred; few readers want a fact, and a room has many facts."""

    def add_reader(self, reader: Reader) -> None:
        """Hand every fact of the reader's kinds to it from now on."""
        self._readers.append(reader)
        self._calls.clear()

    def frame_refused(self, kind: str, detail: str) -> None:
        """Emit `FrameRefused`. Sockets call this."""
        self.emit(FrameRefused(kind=kind, detail=detail))

    def emit(self, fact: Fact) -> None:
        """Hand out a fact that has happened now."""
        kind, now_s = type(fact), self._clock()
        if kind not in self._calls:
            self._calls[kind] = tuple(
                call for reader in self._readers for known, call in reader.items() if issubclass(kind, known)
            )
        for call in self._calls[kind]:
            call(now_s, fact)

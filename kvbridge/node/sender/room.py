"""A room on a prefill node."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge.core.errors import ConflictError
from kvbridge.core.geometry.checkpoints import CheckpointCause
from kvbridge.core.ids import PageTable, Rank, Tables
from kvbridge.core.plan.digest_sums import DigestSums
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.progress import RankProgress
from kvbridge.core.session.sender import SENDER_TABLE, SenderSpeaker, SenderState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import MAX_INTERVALS, Abort, Failed, Intend, Offer, WireTable
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.core.wire.worker_messages import MAX_POINTS, Digested, Rerouted, RoomClosed, Sent
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.room import Room, named
from kvbridge.node.rooms import RoomPorts
from kvbridge.tier.keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderPorts(RoomPorts):
    """Everything that a room on this side touches."""

    nodes: DecodeNodes


@dataclass(eq=False)
class RankWork:
    """What one rank has done for one room."""

    progress: RankProgress
    engine: str = ""
    """The engine that began the room on this rank; empty before."""
    finished: bool = False
    written: bool = False
    """Finished, and nothing writes for the engine any more: its GPU, if it has one, is through as well."""
    checkpoints: frozenset[int] = frozenset()
    """Of those that were asked for, the ones that the engine has written, in tokens."""
    metadata: bytes = b""
    end_key: bytes = b""
    """Of the prompt that its engine computes, as that said itself when it began."""
    after: dict[StreamPoint, None] = field(default_factory=dict)
    """Where in the work of the engine's GPU all that is published and not ordered yet is final; a set in order."""
    outstanding: dict[int, str] = field(default_factory=dict)
    """Orders that the worker has not ended, and over which transport each of them goes."""
    transport: str = ""
    """That of the last order."""
    under_way_s: list[tuple[float, float]] = field(default_factory=list)
    """From when until when orders were outstanding, on the service's clock; the last has not ended while one is."""
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    digests: DigestSums | None = None
    """Of what has been sent so far, once a worker has reported any."""
    done: bool = False
    open: bool = False
    """The worker has the room, and has not yet proved that it let it go."""
    further: Tables = field(default_factory=dict)
    """Source pages that the worker has not been told of, since it has the room."""

    def order_began(self, order: int, transport: str, now_s: float) -> None:
        """The worker is told to send something over `transport`."""
        if not self.outstanding:
            if len(self.under_way_s) == MAX_INTERVALS:  # the first ones are taken as one
                self.under_way_s[:2] = [(self.under_way_s[0][0], self.under_way_s[1][1])]
            self.under_way_s.append((now_s, now_s))
        self.outstanding[order] = self.transport = transport

    def order_ended(self, order: int, now_s: float) -> str | None:
        """The worker sends nothing of an order any more. Returns over which transport it went, None if it was not outstanding."""
        transport = self.outstanding.pop(order, None)
        if transport is not None and not self.outstanding:
            self.under_way_s[-1] = (self.under_way_s[-1][0], now_s)
        return transport

    def under_way_ago_s(self, now_s: float) -> tuple[tuple[float, float], ...]:
        """How long ago orders were outstanding, when none is any more."""
        return tuple((now_s - began_s, now_s - ended_s) for began_s, ended_s in self.under_way_s)

    def own_layers(self, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Return the layers of a publication that the rank holds; None stays all of them."""
        return None if layers is None else tuple(layer for layer in layers if layer in self.progress.layers)

    def note_point(self, point: StreamPoint | None) -> None:
        """Keep where a publication is final. The oldest goes when there are too many: later ones of a GPU cover it."""
        if point is None:
            return
        self.after[point] = None
        if len(self.after) > MAX_POINTS:
            del self.after[next(iter(self.after))]


@dataclass(eq=False)
class SenderRoom(Room[SenderState]):
    """A room on the prefill side."""

    final_states = SENDER_TABLE.final
    ranks: dict[Rank, RankWork] = field(default_factory=dict)
    """Empty once the room has been concluded."""
    peer: str = ""
    """The decode node whose intent or offer was taken; empty before."""
    is_offered: bool = False
    """Whether its offer was."""
    destination: tuple[WireTable, ...] = ()
    digest: DigestKind = DigestKind.NONE
    """What the decode node asks for."""
    offered_s: float = 0.0
    checkpoints: dict[int, PageTable] = field(default_factory=dict)
    """Pages for windows and states as they are after so many tokens, which others may start from when the room is over."""
    checkpoint_causes: dict[int, CheckpointCause] = field(default_factory=dict)
    """Why they are wanted."""
    writing: set[str] = field(default_factory=set)
    """Engines that may still write source pages of ours."""
    in_transit: bool = False
    """Something was sent whose arrival was never confirmed, so the receiver has to shut it out."""
    free_wanted: bool = False
    concluded: bool = False
    """Pages are given back; only the receipt is left."""

    @property
    def first_peer(self) -> str:
        """Return the incarnation of the first node at the other end."""
        return self.peer

    @property
    def published_tokens(self) -> int:
        """Of its prompt, what is final from the start: what is loaded from host memory counts only when its engine has said so."""
        return self.computed_tokens - self.host_tokens

    @property
    def begun(self) -> bool:
        """Whether an engine has begun it on any rank."""
        return any(work.engine for work in self.ranks.values())

    @property
    def waits_for(self) -> str:
        """Say what has to happen next."""
        begin = "" if self.begun else "a prefill engine to begin it, and for "
        match self.state:
            case SenderState.ADMITTED | SenderState.AWAITED:
                who = f" {named(self.peers)}" if self.peers else ""
                return f"{begin}the decode node{who} to offer its pages" + (", as it said it will" if who else "")
            case SenderState.SENDING if not self.begun:
                return "a prefill engine to begin it"
            case SenderState.SENDING if not all(work.finished for work in self.ranks.values()):
                tokens = min(work.progress.published_tokens for work in self.ranks.values())
                return f"the prefill engine to publish and finish it ({tokens} of {self.prompt_tokens} tokens are published)"
            case SenderState.SENDING:
                return f"rank workers {named(rank for rank, work in self.ranks.items() if not work.done)} to send it"
            case SenderState.ABORTING | SenderState.FAILING:
                return f"rank workers {named(self.open_ranks)} to be quiet"
            case _:
                return f"engines {named(self.writing)} to let go of its pages" if self.writing else ""

    @property
    def users(self) -> set[str]:
        """Return the engines that may use its pages."""
        return self.writing

    def lose(self, engine: str) -> bool:
        """What it has begun and not finished nobody else will finish."""
        unfinished = any(work.engine == engine and not work.finished for work in self.ranks.values())
        return unfinished or engine in self.writing or engine == self.admitted_by

    def let_go(self, engine: str) -> None:
        """Note that an engine does not use the pages any more."""
        self.writing.discard(engine)

    @property
    def stopping(self) -> bool:
        """Whether it waits until nothing is in flight."""
        return self.state in {SenderState.ABORTING, SenderState.FAILING}

    @property
    def open_ranks(self) -> list[Rank]:
        """Ranks whose worker has not proved that it let the room go."""
        return [rank for rank, work in self.ranks.items() if work.open]

    def require_alive(self) -> None:
        """Raise ConflictError when it is over, or is being stopped."""
        if self.over or self.stopping:
            raise ConflictError(f"room {self.room} is over: {self.reason or user_state(self)}")

    def require_begun(self, engine: str, ranks: tuple[Rank, ...]) -> None:
        """Raise ConflictError unless this engine has begun it on these ranks."""
        for rank in ranks:
            if self.ranks[rank].engine != engine:
                raise ConflictError(f"room {self.room} was not begun on rank {rank} by this engine")

    def forget_details(self) -> None:
        """Keep what a receipt needs."""
        self.tables, self.ranks, self.destination, self.keys = {}, {}, (), Keys()
        self.checkpoint, self.checkpoints, self.load = None, {}, None


FromDecode = Intend | Offer | Abort | Failed
"""What a decode node says of a room."""
FromRank = Digested | Sent | Rerouted | RoomClosed
"""What a rank worker says of a room."""


def speaker_of(room: SenderRoom | None, peer: str, message: FromDecode | FromRank) -> SenderSpeaker | None:
    """Return who says something of a room; None for a rank that it does not concern."""
    if isinstance(message, FromRank):
        if room is None or room.over:
            return SenderSpeaker.CLOSED_RANK
        work = room.ranks.get(message.rank)
        if work is None:
            return None
        ended = isinstance(message, Digested | Sent) and message.order not in work.outstanding
        return SenderSpeaker.OPEN_RANK if work.open and not ended else SenderSpeaker.CLOSED_RANK
    if room is None or room.peer != peer:
        return SenderSpeaker.OTHER_NODE
    return SenderSpeaker.OFFERER if room.is_offered else SenderSpeaker.INTENDER


_OTHER_WORDS = {
    SenderState.AWAITED: RoomState.ADMITTED,
    SenderState.SENDING: RoomState.TRANSFERRING,
    SenderState.FAILING: RoomState.FAILED,
}
_USER_STATE = {state: _OTHER_WORDS.get(state) or RoomState(state.value) for state in SenderState}


def user_state(room: SenderRoom) -> RoomState:
    """What users see: a room that is failing has failed for them, whatever is still to be cleaned up."""
    if room.state is SenderState.SENDING and not room.begun:
        return RoomState.OFFERED
    return _USER_STATE[room.state]

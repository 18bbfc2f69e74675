"""A room on a prefill node, and the work of its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbridge.core.errors import ConflictError
from kvbridge.core.geometry.tiers import CheckpointCause
from kvbridge.core.ids import PageTable, Rank, Tables
from kvbridge.core.plan.digests import DigestKind, DigestSums
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.session.prefill import PREFILL_TABLE, PrefillSpeaker, PrefillState, RankProgress
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import MAX_INTERVALS, Abort, Failed, Intend, Offer, StreamPoint, WireTable
from kvbridge.core.wire.worker_messages import Digested, Rerouted, RoomClosed, Sent
from kvbridge.node.room import Room, named
from kvbridge.tier.keys import NO_KEYS


@dataclass(eq=False)
class RankWork:
    """The work of one rank for one room."""

    progress: RankProgress
    engine: str = ""
    """The engine that began the room on this rank; empty before."""
    finished: bool = False
    written: bool = False
    """Finished, and the engine's GPU is through as well."""
    checkpoints: frozenset[int] = frozenset()
    """The requested checkpoints that the engine has written, in tokens."""
    metadata: bytes = b""
    end_key: bytes = b""
    """The end key of the prompt that the engine computes, as the engine stated it."""
    after: dict[StreamPoint, None] = field(default_factory=dict)
    """Points in the work of the engine's GPU at which published tokens without an order are final; a set in order."""
    outstanding: dict[int, str] = field(default_factory=dict)
    """The transport of each order that the worker has not ended."""
    transport: str = ""
    """The transport of the last order."""
    under_way_s: list[tuple[float, float]] = field(default_factory=list)
    """Intervals in which orders were outstanding, on the service's clock; the last one has no end while an order is."""
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    digests: DigestSums | None = None
    """Digests of the rows sent so far, once a worker has reported any."""
    done: bool = False
    open: bool = False
    """The worker has the room, and has not yet proved that it let it go."""
    further: Tables = field(default_factory=dict)
    """Source pages that the worker has not been told of, although it has the room."""

    def order_began(self, order: int, transport: str, now_s: float) -> None:
        """Note that the worker was told to send over `transport`."""
        if not self.outstanding:
            if len(self.under_way_s) == MAX_INTERVALS:  # the first two become one
                self.under_way_s[:2] = [(self.under_way_s[0][0], self.under_way_s[1][1])]
            self.under_way_s.append((now_s, now_s))
        self.outstanding[order] = self.transport = transport

    def order_ended(self, order: int, now_s: float) -> str | None:
        """Note that an order has ended; return its transport, None if it was not outstanding."""
        transport = self.outstanding.pop(order, None)
        if transport is not None and not self.outstanding:
            self.under_way_s[-1] = (self.under_way_s[-1][0], now_s)
        return transport


_OTHER_WORDS = {
    PrefillState.AWAITED: RoomState.ADMITTED,
    PrefillState.SENDING: RoomState.TRANSFERRING,
    PrefillState.FAILING: RoomState.FAILED,
}
_USER_STATE = {state: _OTHER_WORDS.get(state) or RoomState(state.value) for state in PrefillState}
ALIVE = frozenset({PrefillState.ADMITTED, PrefillState.AWAITED, PrefillState.SENDING})
STOPPING = frozenset({PrefillState.ABORTING, PrefillState.FAILING})
"""States of a room that waits until nothing is in flight."""


@dataclass(eq=False)
class PrefillRoom(Room[PrefillState]):
    """A room on the prefill side."""

    final_states = PREFILL_TABLE.final
    ranks: dict[Rank, RankWork] = field(default_factory=dict)
    """Empty once the room's pages have gone back."""
    is_offered: bool = False
    destination: tuple[WireTable, ...] = ()
    digest: DigestKind = DigestKind.NONE
    """The digest that the decode node asks for."""
    offered_s: float = 0.0
    checkpoints: dict[int, PageTable] = field(default_factory=dict)
    """Pages for the windows and states after so many tokens: later rooms may start there."""
    checkpoint_causes: dict[int, CheckpointCause] = field(default_factory=dict)
    in_transit: bool = False
    """Bytes were sent whose arrival was never confirmed, so decode has to shut them out."""
    free_wanted: bool = False
    """The table has let go of the source pages."""
    concluded: bool = False
    """The pages are given back; only the receipt is left."""

    @property
    def user_state(self) -> RoomState:
        if self.state is PrefillState.SENDING and not self.begun:
            return RoomState.OFFERED
        return _USER_STATE[self.state]

    def start_work(self, layers: Mapping[Rank, tuple[int, ...]]) -> None:
        """Begin the work of these ranks, or begin it anew, behind the tokens that are final from the start.

        Tokens in host memory are final only when the engine has loaded them.
        """
        final_tokens = self.computed_tokens - self.host_tokens
        self.ranks = {
            rank: RankWork(RankProgress(held, prompt_tokens=self.prompt_tokens, computed_tokens=final_tokens))
            for rank, held in layers.items()
        }

    @property
    def asked_checkpoints(self) -> list[int]:
        """The checkpoints that engines are asked to write, in tokens."""
        return sorted(tokens for tokens in self.checkpoints if tokens < self.prompt_tokens)

    @property
    def begun(self) -> bool:
        """Whether an engine has begun it on any rank."""
        return any(work.engine for work in self.ranks.values())

    def lacks(self, ranks: tuple[Rank, ...], prompt_digest: bytes) -> bool:
        return (
            self.state in ALIVE
            and self.begun
            and self.admitted_by.prompt_digest == prompt_digest
            and not any(self.ranks[rank].engine for rank in ranks)
        )

    @property
    def waits_for(self) -> str:
        begin = "" if self.begun else "a prefill engine to begin it, and for "
        match self.state:
            case PrefillState.ADMITTED | PrefillState.AWAITED:
                who = f" {named(self.peers)}" if self.peers else ""
                return f"{begin}the decode node{who} to offer its pages" + (", as it said it will" if who else "")
            case PrefillState.SENDING if not self.begun:
                return "a prefill engine to begin it"
            case PrefillState.SENDING if not all(work.finished for work in self.ranks.values()):
                tokens = min(work.progress.published_tokens for work in self.ranks.values())
                return f"the prefill engine to publish and finish it ({tokens} of {self.prompt_tokens} tokens are published)"
            case PrefillState.SENDING:
                return f"rank workers {named(rank for rank, work in self.ranks.items() if not work.done)} to send it"
            case PrefillState.ABORTING | PrefillState.FAILING:
                return f"rank workers {named(self.open_ranks)} to be quiet"
            case _:
                return f"engines {named(self.users)} to let go of its pages" if self.users else ""

    def lose(self, engine: str) -> bool:
        """Return whether the engine has begun the room and not finished it: no other engine will."""
        unfinished = any(work.engine == engine and not work.finished for work in self.ranks.values())
        return unfinished or engine in self.users or engine == self.admitted_by.name

    @property
    def open_ranks(self) -> list[Rank]:
        """Ranks whose worker has not proved that it let the room go."""
        return [rank for rank, work in self.ranks.items() if work.open]

    def require_alive(self) -> None:
        """Raise ConflictError when the room is over, or is being stopped."""
        if self.state not in ALIVE:
            raise ConflictError(f"room {self.room} is over: {self.reason or self.user_state}")

    def works_of(self, engine: str, ranks: tuple[Rank, ...]) -> dict[Rank, RankWork]:
        """Return the work of these ranks. Raises ConflictError unless this engine has begun the room there, and when it is over."""
        self.require_alive()
        works = {rank: self.ranks[rank] for rank in ranks}
        for rank, work in works.items():
            if work.engine != engine:
                raise ConflictError(f"room {self.room} was not begun on rank {rank} by this engine")
        return works

    def forget_details(self) -> None:
        """Keep the fields of a receipt."""
        self.tables, self.ranks, self.destination, self.keys = {}, {}, (), NO_KEYS
        self.checkpoint, self.checkpoints, self.load = None, {}, None


Asking = Intend | Offer
FromDecode = Asking | Abort | Failed
FromRank = Digested | Sent | Rerouted | RoomClosed
"""Messages about a room: a decode node asks for it; all of decode nodes; all of rank workers."""


def speaker_of(room: PrefillRoom | None, peer: str, message: FromDecode | FromRank) -> PrefillSpeaker | None:
    """Return the speaker of a message about a room; None for a rank that the room does not concern."""
    if isinstance(message, FromRank):
        if room is None or room.over:
            return PrefillSpeaker.CLOSED_RANK
        work = room.ranks.get(message.rank)
        if work is None:
            return None
        ended = isinstance(message, Digested | Sent) and message.order not in work.outstanding
        return PrefillSpeaker.OPEN_RANK if work.open and not ended else PrefillSpeaker.CLOSED_RANK
    if room is None or room.peer != peer:
        return PrefillSpeaker.OTHER_NODE
    return PrefillSpeaker.OFFERER if room.is_offered else PrefillSpeaker.INTENDER

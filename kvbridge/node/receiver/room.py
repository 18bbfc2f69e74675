"""A room on a decode node."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import Rank
from kvbridge.core.plan.accounting import Share
from kvbridge.core.session.receiver import RECEIVER_TABLE, ReceiverSpeaker, ReceiverState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import Digests, Done, Drained, Failed, PathLost
from kvbridge.core.wire.worker_messages import Digested, Verified
from kvbridge.node.handshake.prefill_nodes import KnownNode, PrefillNodes
from kvbridge.node.prompt_keys import Answer
from kvbridge.node.receiver.fence import Fence
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.room import Room, named
from kvbridge.node.rooms import RoomPorts
from kvbridge.tier.keys import Keys


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverPorts(RoomPorts):
    """Everything that a room on this side touches."""

    nodes: PrefillNodes
    fence: Fence


@dataclass(eq=False)
class WriterNode:
    """One prefill node of one room."""

    node: KnownNode
    shares: dict[Rank, Share]
    """What each of its ranks has to send."""
    missing: set[Rank]
    """Ranks that have not reported Done."""
    drained: bool = False
    in_transit: bool = False
    """It has sent something that may still arrive."""
    gone: str = ""
    """Why the node is taken for gone, when it is: it sends us no proof any more."""

    @property
    def quiet(self) -> bool:
        """Whether this node sends nothing any more: it said so, or has finished everything."""
        return self.drained or not self.missing

    @property
    def clean(self) -> bool:
        """Whether nothing of this node can arrive any more by its own account."""
        return self.quiet and not self.in_transit


FromPrefill = Digests | Done | PathLost | Failed | Drained
"""What a prefill node says of a room."""
ASKED = frozenset({ReceiverState.INTENDED, ReceiverState.OFFERED})
"""What prefill nodes have been asked for, and have not done."""
BEFORE_COMMIT = ASKED | {ReceiverState.AWAITING_PAGES, ReceiverState.RESERVED, ReceiverState.VERIFYING}
ARRIVED = frozenset({ReceiverState.COMMITTED, ReceiverState.CLAIMED})
_WAITS_FOR = {
    ReceiverState.AWAITING_PAGES: "the decode engine to name its pages",
    ReceiverState.INTENDED: "the decode engine to name its pages",
    ReceiverState.VERIFYING: "the digests of what has arrived",
    ReceiverState.COMMITTED: "a decode engine to claim it",
    ReceiverState.ABORTING: "its writers to be shut out",
    ReceiverState.FAILING: "its writers to be shut out",
}


@dataclass(eq=False)
class ReceiverRoom(Room[ReceiverState]):
    """A room on the decode side."""

    final_states = RECEIVER_TABLE.final
    addresses: tuple[PeerAddress, ...] = ()
    writers: dict[str, WriterNode] = field(default_factory=dict)
    """By incarnation; empty before every node is known."""
    former_peer: str = ""
    """The first of them, when they are forgotten."""
    metadata: dict[str, bytes] = field(default_factory=dict)
    expected: dict[str, frozenset[Rank]] = field(default_factory=dict)
    """Engines that were attached when the room was first claimed, and the ranks that each serves: every rank is to read it."""
    claimed_by: set[str] = field(default_factory=set)
    claimed_ranks: set[Rank] = field(default_factory=set)
    """Those that the engines serve that have claimed it."""
    released_by: set[str] = field(default_factory=set)
    """Engines that do not read the room any more, though they had claimed it."""
    answers: dict[str, Answer | None] = field(default_factory=dict)
    """What engines have said of the answer when they released it; None: nothing. Those that were refused are not here."""
    answered_by: set[Rank] = field(default_factory=set)
    """The ranks of the engines that have said something of it: in their memory its rows are."""
    shut: bool = False
    """Every way by which its writers could still reach its pages has been shut."""
    arrived: bool = False
    """Every writer has sent everything, and it is what the geometry demands."""
    shutting: set[str] = field(default_factory=set)
    """Transports that writers have lost in the middle, as long as something may still arrive by them."""
    verification: Verification | None = None
    """From the offer on, when digests are wanted."""
    offered_s: float = 0.0
    committed_s: float = 0.0
    claimed_s: float = 0.0
    """By the first engine; 0 before."""
    reserved_tokens: int = 0
    is_same_prompt: bool = True
    """Whether the engines of all writers that are done have computed the prompt that the room's keys name, by their own word.

    Without that nothing of the room is kept: no engine on this side can say what those have computed.
    """
    end_keys: set[bytes] = field(default_factory=set)
    """Those that engines on both sides have stated; the empty one: of one that has not."""

    @property
    def awaits_writers(self) -> bool:
        """Whether it is being stopped and waits until no prefill node writes."""
        return self.state in {ReceiverState.ABORTING, ReceiverState.FAILING}

    @property
    def awaits_readers(self) -> bool:
        """Whether it is being stopped and waits until no engine reads."""
        return self.state in {ReceiverState.ABORTING_CLAIMED, ReceiverState.FAILING_CLAIMED}

    @property
    def first_peer(self) -> str:
        """Return the incarnation of the first node at the other end."""
        return next(iter(self.writers), self.former_peer)

    @property
    def waits_for(self) -> str:
        """Say what has to happen next."""
        match self.state:
            case ReceiverState.OFFERED:
                return self._waits_for_bytes()
            case ReceiverState.CLAIMED | ReceiverState.ABORTING_CLAIMED | ReceiverState.FAILING_CLAIMED:
                return f"engines {named(self.users or self.awaited)} to release it"
            case ReceiverState.ABORTING | ReceiverState.FAILING if self.active:
                nodes = named(writer.node.name for writer in self.active)
                return f"prefill nodes {nodes} to prove that they write nothing more"
            case ReceiverState.RESERVED:
                return f"prefill nodes {named(self.peers)} to answer"
            case _:
                return _WAITS_FOR.get(self.state, "")

    def _waits_for_bytes(self) -> str:
        if self.arrived:
            lost = named(sorted(self.shutting))
            return f"the endpoints of {lost} to be shut, which a writer has lost: what it has sent again may still arrive there"
        missing = ((rank, writer) for writer in self.writers.values() for rank in writer.missing)
        ranks = named(f"{rank} of {writer.node.name}" for rank, writer in missing)
        return f"prefill ranks {ranks} to send everything"

    @property
    def users(self) -> set[str]:
        """Engines that have claimed it and not released it."""
        return self.claimed_by - self.released_by

    @property
    def awaited(self) -> set[str]:
        """Engines that are expected to claim the room: they serve a rank that no engine has claimed it for."""
        return {engine for engine, ranks in self.expected.items() if not ranks <= self.claimed_ranks}

    def lose(self, engine: str) -> bool:
        """One that was only expected is not waited for any more."""
        self.expected.pop(engine, None)
        return engine in self.users or (engine == self.admitted_by and self.state in BEFORE_COMMIT)

    def let_go(self, engine: str) -> None:
        """Note that an engine does not use the pages any more."""
        if engine in self.users:
            self.released_by.add(engine)

    @property
    def released(self) -> bool:
        """Whether a claimed room has no reader left, nor one to come."""
        if self.state is ReceiverState.CLAIMED:
            return not self.users and not self.awaited
        return self.awaits_readers and not self.users

    @property
    def answer(self) -> Answer | None:
        """What every engine that claimed the room has said of its answer; None while one has not, or they differ."""
        said = set(self.answers.values())
        return said.pop() if len(said) == 1 and self.answers.keys() == self.claimed_by else None

    @property
    def active(self) -> list[WriterNode]:
        """Prefill nodes that may still send, and may say that they do not."""
        return [writer for writer in self.writers.values() if not writer.quiet and not writer.gone]

    @property
    def clean(self) -> bool:
        """Whether nothing of any writer can arrive any more by its own account."""
        return all(writer.clean for writer in self.writers.values())

    def forget_details(self) -> None:
        """Keep what a receipt needs."""
        self.former_peer = self.first_peer
        self.tables, self.metadata, self.writers, self.verification = {}, {}, {}, None
        self.keys, self.answers, self.load, self.end_keys = Keys(), {}, None, set()


def speaker_of(
    room: ReceiverRoom | None, peer: str, message: FromPrefill | Digested | Verified
) -> ReceiverSpeaker | None:
    """Return who says something of a room; None for a node that does not write it, or another rank, or digests unasked for."""
    if isinstance(message, Digested | Verified):
        return ReceiverSpeaker.OWN_RANK
    if room is None or room.over:
        return ReceiverSpeaker.ANYBODY
    writer = room.writers.get(peer)
    if writer is None or (isinstance(message, Digests) and room.verification is None):
        return None
    owing = writer.missing
    if isinstance(message, Digests | Done | PathLost):
        if message.writer not in writer.node.ranks:
            return None
        owing = owing & {message.writer}
    if writer.drained:
        return ReceiverSpeaker.HAS_DRAINED
    return ReceiverSpeaker.WRITES if owing else ReceiverSpeaker.IS_DONE


_OTHER_WORDS = {
    ReceiverState.AWAITING_PAGES: RoomState.ADMITTED,
    ReceiverState.INTENDED: RoomState.ADMITTED,
    ReceiverState.RESERVED: RoomState.ADMITTED,
    ReceiverState.VERIFYING: RoomState.TRANSFERRING,
    ReceiverState.FAILING: RoomState.FAILED,
    ReceiverState.FAILING_CLAIMED: RoomState.FAILED,
    ReceiverState.ABORTING_CLAIMED: RoomState.ABORTING,
}
_USER_STATE = {state: _OTHER_WORDS.get(state) or RoomState(state.value) for state in ReceiverState}


def user_state(room: ReceiverRoom) -> RoomState:
    """What users see: a room that is failing has failed for them, whatever is still to be cleaned up."""
    if room.state is ReceiverState.OFFERED and room.amounts:
        return RoomState.TRANSFERRING
    return _USER_STATE[room.state]

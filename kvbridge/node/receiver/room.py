"""A room on a decode node, and what the receiving side asks of its surroundings.

Owns: the facts about one room on this side, who writes it, who reads it, the deadlines' names, the ports. Must not
know: what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from kvbridge.api.rooms import PeerAddress
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import Rank
from kvbridge.core.plan.accounting import Share
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.receiver import RECEIVER_TABLE, ReceiverState
from kvbridge.core.session.states import RoomState
from kvbridge.core.wire.messages import PeerMessage
from kvbridge.node.driver import RankWorkers, RoomPorts, RoomSettings
from kvbridge.node.receiver.verification import Verification
from kvbridge.node.room import Room
from kvbridge.pool.accounts.page_states import Owner


@dataclass(frozen=True)
class KnownNode:
    """A prefill node that has welcomed us."""

    peer: str
    """Its incarnation."""
    instance: str
    node: str
    pp_size: int
    tp_size: int
    stage_boundaries: tuple[int, ...]
    """The first layers of the instance's stages but the first."""
    ranks: tuple[Rank, ...]
    """Those of the instance's ranks that live there."""

    @property
    def name(self) -> str:
        """Instance and node, for people."""
        return f"{self.instance}/{self.node}"

    @property
    def parallelism(self) -> tuple[object, ...]:
        """What all nodes of an instance have in common: its name, its sizes, its stages."""
        return self.instance, self.pp_size, self.tp_size, self.stage_boundaries

    def __str__(self) -> str:
        stages = f", stages from layers {self.stage_boundaries}" if self.stage_boundaries else ""
        ranks = ", ".join(map(str, self.ranks[:8])) + (", ..." if len(self.ranks) > 8 else "")
        return f"{self.name} (ranks {ranks or 'none'} of pp_size {self.pp_size} x tp_size {self.tp_size}{stages})"


class PrefillNodes(Protocol):
    """The prefill nodes that this decode node knows."""

    def known_node(self, address: PeerAddress) -> KnownNode | None:
        """Return the node behind an address if it has welcomed us, else say hello (once) and return None.

        Raises PeerError or FingerprintMismatchError when it has rejected us since the last attempt.
        """

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a reliable message. Never raises."""


class DecodeRanks(RankWorkers, Protocol):
    """The rank workers of this node."""

    def manifests(self) -> tuple[RankManifest, ...]:
        """Of every rank, in the order in which they are introduced to peers."""


class WriterFence(Protocol):
    """What shuts writers out that give no proof themselves. See `fence`."""

    def ask(self, owner: Owner) -> None:
        """Shut every way by which the writers of a room could reach this node; `ReceiverRooms.shut` hears when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverPorts(RoomPorts):
    """Everything that a room on this side touches."""

    workers: DecodeRanks
    nodes: PrefillNodes
    fence: WriterFence


@dataclass(frozen=True)
class ReceiverLimits:
    """The deadlines of the receiving side, in seconds; each is the configuration key `timeouts.<name>`."""

    pages_s: float
    """Adopted pools: the engine names its pages within this time."""
    handshake_s: float
    """Every prefill node has welcomed us within this time."""
    room_s: float
    """From the offer to the commit."""
    claim_s: float
    """A committed room is claimed within this time, else its pages are given back."""
    verify_s: float
    """The digests of a room that has arrived are computed within this time."""
    drain_s: float
    """A room that is being stopped is let go of within this time, else its pages are quarantined until it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverSettings(RoomSettings):
    """What is the same for all rooms on this side."""

    limits: ReceiverLimits
    host: frozenset[ComponentKind] = frozenset()
    """The components that live in the host pool."""
    digest: DigestKind = DigestKind.NONE
    """What writers are asked to compute, our ranks compute once everything has arrived, and a room commits by."""


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


@dataclass(eq=False)
class ReceiverRoom(Room[ReceiverState]):
    """A room on the decode side."""

    addresses: tuple[PeerAddress, ...] = ()
    writers: dict[str, WriterNode] = field(default_factory=dict)
    """By incarnation; empty before every node is known."""
    metadata: dict[str, bytes] = field(default_factory=dict)
    expected_by: set[str] = field(default_factory=set)
    """Engines that were attached when the room was first claimed and are expected to claim it too."""
    claimed_by: set[str] = field(default_factory=set)
    released_by: set[str] = field(default_factory=set)
    """Engines that do not read the room any more, though they had claimed it."""
    shut: bool = False
    """Every way by which its writers could still reach its pages has been shut."""
    verification: Verification | None = None
    """From the offer on, when digests are wanted."""
    offered_s: float = 0.0
    committed_s: float = 0.0
    reserved_tokens: int = 0

    @property
    def over(self) -> bool:
        """Whether the table has ended."""
        return self.state in RECEIVER_TABLE.final

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
        """See Room."""
        return next(iter(self.writers), "")

    @property
    def users(self) -> set[str]:
        """See Room: engines that have claimed it and not released it."""
        return self.claimed_by - self.released_by

    def lose(self, engine: str) -> bool:
        """See Room. One that was only expected is not waited for any more."""
        self.expected_by.discard(engine)
        return engine in self.users

    def let_go(self, engine: str) -> None:
        """See Room."""
        if engine in self.users:
            self.released_by.add(engine)

    @property
    def released(self) -> bool:
        """Whether a claimed room has no reader left, nor one to come."""
        if self.state is ReceiverState.CLAIMED:
            return self.claimed_by | self.expected_by <= self.released_by
        return self.awaits_readers and not self.users

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
        self.tables, self.metadata, self.writers, self.verification = {}, {}, {}, None


_USER_STATE = {
    ReceiverState.AWAITING_PAGES: RoomState.ADMITTED,
    ReceiverState.RESERVED: RoomState.ADMITTED,
    ReceiverState.VERIFYING: RoomState.TRANSFERRING,
    ReceiverState.FAILING: RoomState.FAILED,
    ReceiverState.FAILING_CLAIMED: RoomState.FAILED,
    ReceiverState.ABORTING_CLAIMED: RoomState.ABORTING,
}


def user_state(room: ReceiverRoom) -> RoomState:
    """What users see: a room that is failing has failed for them, whatever is still to be cleaned up."""
    if room.state is ReceiverState.OFFERED and room.amounts:
        return RoomState.TRANSFERRING
    return _USER_STATE.get(room.state) or RoomState(room.state.value)

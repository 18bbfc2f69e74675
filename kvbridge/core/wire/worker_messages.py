"""Messages between a node and its rank workers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank
from kvbridge.core.plan.digests import DigestKind, PageDigests
from kvbridge.core.plan.operations import Amounts, Section
from kvbridge.core.wire.messages import (
    MAX_DIGESTS,
    MAX_ENDPOINTS,
    MAX_NODE_RANKS,
    DeviceAllocationRequest,
    Heartbeat,
    Message,
    Name,
    NodeMemory,
    PackedRank,
    RankDescription,
    RoomMessage,
    SharedRegion,
    StreamPoint,
    Text,
    Trouble,
    WireTable,
)

MAX_POINTS = 8_192
"""The most points that one order waits for: as many as an engine has events."""
MAX_MOVES = 2
"""One for each space of device pages that have host copies."""
TransportNames = Annotated[tuple[Name, ...], Field(max_length=MAX_ENDPOINTS)]


class Outcome(Message):
    """How something ended: well, or with an error."""

    error_code: str = ""
    error: Text = ""


# ---------------------------------------------------------------------------------------------- node to worker


class WorkerSetup(NodeMemory, type="worker_setup"):
    """The rank that the worker is to serve, and its memory. The host copies are for this worker alone."""

    rank: Rank
    layers: tuple[NonNegative, ...]
    """The global layer ids of the rank."""
    device: tuple[SharedRegion, ...]
    """Device memory of the rank that the node has made (device: cpu)."""
    allocate: DeviceAllocationRequest | None = None
    """Device memory that the worker is to make (device: cuda). With neither, the worker adopts an engine's memory."""
    stage_tp_ranks: tuple[NonNegative, ...] = ()
    """The tensor-parallel indices of the ranks of this stage on this node, which share the host copies."""
    transports: Annotated[str, Field(max_length=100_000)]
    """The configuration section of that name, as JSON."""
    transfer_timeout_s: Annotated[float, Field(gt=0)]
    """`timeouts.transfer_s`."""
    epoch: NonNegative = 0
    """The epoch of the endpoints that the worker is to give out."""


class ConnectPeer(Message, type="connect_peer"):
    """Get ready to write to the ranks of a decode node. The message replaces what the worker knew of that node."""

    peer: Name
    """The peer node's incarnation."""
    ranks: Annotated[tuple[PackedRank, ...], Field(max_length=MAX_NODE_RANKS)]


class DisconnectPeer(Message, type="disconnect_peer"):
    """Forget a decode node."""

    peer: Name


class OpenRoom(RoomMessage, type="open_room"):
    """The two ends of a room."""

    peer: Name
    prompt_tokens: Positive
    prefix_tokens: NonNegative
    source: tuple[WireTable, ...]
    destination: tuple[WireTable, ...]
    digest: DigestKind = DigestKind.NONE
    """The digest of each order's pages, which the worker computes and reports before the order ends."""


class Send(RoomMessage, type="send"):
    """Move this section to every rank of the room's peer."""

    order: Positive
    section: Section
    source: tuple[WireTable, ...] = ()
    """Source pages that the room got since the last order, behind those that the worker knows."""
    after: Annotated[tuple[StreamPoint, ...], Field(max_length=MAX_POINTS)] = ()
    """Read nothing of the section before the engine's GPU has reached all of these points."""


class Verify(RoomMessage, type="verify"):
    """On decode: compute the digests of the room's components in the spaces of `tables` from your own memory."""

    prompt_tokens: Positive
    prefix_tokens: NonNegative
    tables: tuple[WireTable, ...]
    host_index: NonNegative
    """This rank's share of the host pool's pages, of `host_count` shares."""
    host_count: Positive


class PageMove(FrozenModel):
    """Pages on the device and their host copies, in the same order."""

    device: WireTable
    twins: WireTable


class CopyPages(Message, type="copy_pages"):
    """Copy your part of these final device pages to host memory; answered by PagesCopied. Ranks of a stage divide whole pages."""

    order: Positive
    moves: Annotated[tuple[PageMove, ...], Field(max_length=MAX_MOVES)]
    link_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the time in which the worker copies at most, since transfers need the link to the device, too."""


class CloseRoom(RoomMessage, type="close_room"):
    """Forget the room and abort what is in flight. RoomClosed proves that the room is quiet."""

    all_sent: bool = False
    """Whether every order of the room has ended well. Then there is nothing to prove, and no answer."""


class RenewEndpoints(Message, type="renew_endpoints"):
    """Give out new endpoints, of this epoch. Those of earlier epochs still work until RevokeEndpoints."""

    epoch: Positive
    transports: TransportNames = ()
    """Endpoints of these transports only; empty: of all."""


class RevokeEndpoints(Message, type="revoke_endpoints"):
    """Let no peer write any more through an endpoint of an earlier epoch."""

    before_epoch: Positive
    transports: TransportNames = ()
    """As in RenewEndpoints."""


class Shutdown(Message, type="shutdown"):
    """End now."""


_AboutPeers = ConnectPeer | DisconnectPeer | RenewEndpoints | RevokeEndpoints
_AboutRooms = OpenRoom | Send | Verify | CloseRoom
NodeToWorker = Annotated[
    WorkerSetup | _AboutPeers | _AboutRooms | CopyPages | Heartbeat | Shutdown, Field(discriminator="type")
]


# ---------------------------------------------------------------------------------------------- worker to node


class WorkerHello(Message, type="worker_hello"):
    """The first message: I serve this rank. An adopted worker is in an engine's process, with the engine's memory."""

    rank: Rank
    pid: Positive
    adopted: bool = False


class WorkerProgress(Message, type="worker_progress"):
    """How far creating and registering memory has come."""

    rank: Rank
    done_bytes: NonNegative
    total_bytes: NonNegative


class WorkerReady(Message, type="worker_ready"):
    """Memory is registered, and peers reach it as described. The message comes again when the endpoints have changed."""

    rank: Rank
    pid: Positive
    description: RankDescription
    epoch: NonNegative = 0
    """The epoch of the endpoints in the description."""
    device: tuple[SharedRegion, ...] = ()
    """The device memory that this worker has made, for engines to open."""


class WorkerFailed(Trouble, type="worker_failed"):
    """I cannot serve my rank; the text gives cause and fix."""

    rank: Rank


class TransportsNotBuilt(Message, type="transports_not_built"):
    """The successors of these transports cannot be built now. The worker tries again, and keeps those that it has."""

    rank: Rank
    transports: tuple[str, ...]
    error_code: Name
    error: Text


class PeerConnected(Outcome, type="peer_connected"):
    """Ready to write to a decode node, or why not."""

    rank: Rank
    peer: Name
    transports: tuple[str, ...] = ()


class PathsChanged(Message, type="paths_changed"):
    """A decode node is reached by other transports than the last message about it said."""

    rank: Rank
    peer: Name
    transports: tuple[str, ...]
    """The transport by which each of the node's ranks is reached now."""
    standby: tuple[str, ...] = ()
    """Transports by which every rank of the node could be reached as well."""
    lost: str = ""
    """The transport that was lost. Empty: one has been found."""
    error: Text = ""


class Sent(RoomMessage, Outcome, type="sent"):
    """How an order ended."""

    rank: Rank
    order: Positive
    amounts: Amounts = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phases of the order: `plan`, `submit`, `first_byte` (from receipt to the end of both), `digest` (computing, while bytes move)
    and `move` (from there to the end of both)."""
    quiet: bool = True
    """False: bytes may still move."""
    in_transit: bool = False
    """Something was sent whose arrival was never confirmed."""


class Rerouted(RoomMessage, type="rerouted"):
    """Ahead of an order's Sent: bytes that `lost` had not confirmed are sent again over another transport.

    The worker reads or sends nothing of the room through the lost endpoint any more, or closes the transport before the Sent.
    """

    rank: Rank
    lost: Name
    over: Name
    epoch: NonNegative
    """The epoch of the lost endpoint."""
    in_transit: bool
    """Something was sent there whose arrival was never confirmed."""
    error: Text = ""


class Digested(RoomMessage, type="digested"):
    """Digests of an order, ahead of its Sent, or those of a Verify, ahead of its Verified."""

    rank: Rank
    order: NonNegative = 0
    """The order of the Send; 0 for Verify."""
    digests: Annotated[tuple[PageDigests, ...], Field(max_length=MAX_DIGESTS)]


class Verified(RoomMessage, Outcome, type="verified"):
    """All digests that Verify asked for have been reported, or the error says why they could not be computed."""

    rank: Rank
    seconds: dict[str, float] = Field(default_factory=dict)
    """`verify`: from the order to its end; `verify_busy`: computing."""


class PagesCopied(Outcome, type="pages_copied"):
    """The end of CopyPages. Without an error the host copies hold, by proof, this rank's part."""

    rank: Rank
    order: Positive
    bytes: NonNegative = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The time of copying, without the pauses that leave the link to others."""
    quiet: bool = True
    """False: the device may still write to the host copies. The same message comes again, with True, when it does not."""


class RoomClosed(RoomMessage, type="room_closed"):
    """The room is forgotten. `quiet`: nothing of it is being read or sent.

    Otherwise something may be, until the transport that `reason` names has been torn down. RoomClosed comes again then.
    """

    rank: Rank
    quiet: bool
    reason: Text = ""


class EndpointsRevoked(Message, type="endpoints_revoked"):
    """No peer can write to this rank through an endpoint of an earlier epoch."""

    rank: Rank
    before_epoch: Positive


class WorkerClosed(Message, type="worker_closed"):
    """From an engine's process: every transport is closed, though the process lives on. Answered by Shutdown."""

    rank: Rank


_OfWorkers = WorkerHello | WorkerProgress | WorkerReady | WorkerFailed | WorkerClosed | TransportsNotBuilt | Heartbeat
_OfPeers = PeerConnected | PathsChanged | EndpointsRevoked
_OfRooms = Rerouted | Digested | Sent | Verified | RoomClosed
WorkerToNode = Annotated[_OfWorkers | _OfPeers | _OfRooms | PagesCopied, Field(discriminator="type")]

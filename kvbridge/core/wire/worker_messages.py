"""What a node and its rank workers say to each other, typed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank
from kvbridge.core.plan.digests import DigestKind, PageDigests
from kvbridge.core.plan.operations import Amounts, Section
from kvbridge.core.wire.messages import (
    MAX_DIGESTS,
    MAX_ENDPOINTS,
    MAX_NODE_RANKS,
    Heartbeat,
    Name,
    PackedRank,
    RankDescription,
    RoomMessage,
    Text,
    WireTable,
)
from kvbridge.core.wire.shared_memory import DeviceAllocationRequest, SharedRegion, StreamPoint

MAX_POINTS = 8_192
"""Points that one order waits for at most: as many as an engine's events."""
TransportNames = Annotated[tuple[Name, ...], Field(max_length=MAX_ENDPOINTS)]
MAX_MOVES = 2
"""One for each space of device pages that have twins."""


class Outcome(FrozenModel):
    """How something ended: well, or with an error."""

    error_code: str = ""
    error: Text = ""


class WorkerHello(FrozenModel):
    """Worker to node, first message: I serve this rank. An adopted worker is in an engine's process, with the engine's memory."""

    type: Literal["worker_hello"] = "worker_hello"
    rank: Rank
    pid: Positive
    adopted: bool = False


class WorkerSetup(FrozenModel):
    """Node to worker: what you are to serve."""

    type: Literal["worker_setup"] = "worker_setup"
    geometry: ModelGeometry
    rank: Rank
    pp_size: Positive
    tp_size: Positive
    layers: tuple[NonNegative, ...]
    """The global layer ids of the rank."""
    device: tuple[SharedRegion, ...]
    """Device memory of the rank that the node has made (device: cpu)."""
    allocate: DeviceAllocationRequest | None = None
    """Device memory that the worker is to make (device: cuda). With neither, the worker adopts an engine's."""
    host: tuple[SharedRegion, ...]
    """The node's host pool; empty when there is none."""
    twins: tuple[SharedRegion, ...] = ()
    """The node's host copies of device pages, for this worker alone: no peer hears of them, and no transport registers them."""
    stage_tp_ranks: tuple[NonNegative, ...] = ()
    """The tensor-parallel indices of the ranks of this stage on this node, which share the host copies."""
    copy_backend: Name = "kernel"
    """`tier.host.backend`: what copies device pages to host memory on a GPU."""
    transports: Annotated[str, Field(max_length=100_000)]
    """The configuration section of that name, as JSON."""
    transfer_timeout_s: Annotated[float, Field(gt=0)]
    """`timeouts.transfer_s`."""
    epoch: NonNegative = 0
    """The epoch of the endpoints that the worker is to give out."""


class WorkerReady(FrozenModel):
    """Worker to node: memory is created and registered; this is how peers reach me.

    Said again with other endpoints, after RenewEndpoints or when a transport had to be replaced.
    """

    type: Literal["worker_ready"] = "worker_ready"
    rank: Rank
    pid: Positive
    description: RankDescription
    epoch: NonNegative = 0
    """The epoch of the endpoints in the description."""
    device: tuple[SharedRegion, ...] = ()
    """The device memory that this worker has made, for engines to open."""


class WorkerProgress(FrozenModel):
    """Worker to node: how far creating and registering memory has come."""

    type: Literal["worker_progress"] = "worker_progress"
    rank: Rank
    done_bytes: NonNegative
    total_bytes: NonNegative


class ConnectPeer(FrozenModel):
    """Node to worker: get ready to write to the ranks of a decode node; replaces what was known of that node."""

    type: Literal["connect_peer"] = "connect_peer"
    peer: Name
    """The peer node's incarnation."""
    ranks: Annotated[tuple[PackedRank, ...], Field(max_length=MAX_NODE_RANKS)]


class WorkerFailed(FrozenModel):
    """Worker to node: I cannot serve my rank; the text gives cause and fix."""

    type: Literal["worker_failed"] = "worker_failed"
    rank: Rank
    code: Name
    message: Text


class TransportsNotBuilt(FrozenModel):
    """Worker to node: the successors of these transports cannot be built now; the worker tries again, and serves by what it has."""

    type: Literal["transports_not_built"] = "transports_not_built"
    rank: Rank
    transports: tuple[str, ...]
    error_code: Name
    error: Text


class PeerConnected(Outcome):
    """Worker to node: ready to write to a decode node, or why not."""

    type: Literal["peer_connected"] = "peer_connected"
    rank: Rank
    peer: Name
    transports: tuple[str, ...] = ()


class PathsChanged(FrozenModel):
    """Worker to node: a decode node is reached by other transports than was said last."""

    type: Literal["paths_changed"] = "paths_changed"
    rank: Rank
    peer: Name
    transports: tuple[str, ...]
    """The transport by which each of the node's ranks is reached now."""
    standby: tuple[str, ...] = ()
    """Transports by which every rank of the node could be reached instead."""
    lost: str = ""
    """The transport that was lost; empty when one has been found."""
    error: Text = ""


class DisconnectPeer(FrozenModel):
    """Node to worker: forget a decode node."""

    type: Literal["disconnect_peer"] = "disconnect_peer"
    peer: Name


class OpenRoom(RoomMessage):
    """Node to worker: the two ends of a room."""

    type: Literal["open_room"] = "open_room"
    peer: Name
    prompt_tokens: Positive
    prefix_tokens: NonNegative
    source: tuple[WireTable, ...]
    destination: tuple[WireTable, ...]
    digest: DigestKind = DigestKind.NONE
    """The digest that the worker computes over each order's pages, and reports before the order ends."""


class Send(RoomMessage):
    """Node to worker: move this section to every rank of the room's peer."""

    type: Literal["send"] = "send"
    order: Positive
    section: Section
    source: tuple[WireTable, ...] = ()
    """Source pages that the room got since the last order; they follow those that the worker knows."""
    after: Annotated[tuple[StreamPoint, ...], Field(max_length=MAX_POINTS)] = ()
    """Read nothing of the section before the engine's GPU has reached all of these points."""


class Sent(RoomMessage, Outcome):
    """Worker to node: how an order ended. `quiet` is False when bytes may still move."""

    type: Literal["sent"] = "sent"
    rank: Rank
    order: Positive
    amounts: Amounts = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phases of the order: `plan`, `submit`, `first_byte` (from receipt to the end of both), `digest` (computing, while bytes move)
    and `move` (from there to the end of both)."""
    quiet: bool = True
    in_transit: bool = False
    """Something was sent whose arrival was never confirmed."""


class Rerouted(RoomMessage):
    """Worker to node, ahead of an order's Sent: what `lost` had not confirmed is sent again over another transport.

    Nothing of the room is read or sent through the lost endpoint any more, or the transport is closed before the Sent.
    """

    type: Literal["rerouted"] = "rerouted"
    rank: Rank
    lost: Name
    over: Name
    epoch: NonNegative
    """The epoch of the lost endpoint."""
    in_transit: bool
    """Something was sent there whose arrival was never confirmed."""
    error: Text = ""


class Verify(RoomMessage):
    """Node to worker, on decode: compute the digests of the room's components in the spaces of `tables`, in your own memory."""

    type: Literal["verify"] = "verify"
    prompt_tokens: Positive
    prefix_tokens: NonNegative
    tables: tuple[WireTable, ...]
    host_index: NonNegative
    """The share of the host pool's pages that this rank looks at."""
    host_count: Positive


class Digested(RoomMessage):
    """Worker to node: digests of an order, ahead of its Sent, or of a Verify, ahead of its Verified."""

    type: Literal["digested"] = "digested"
    rank: Rank
    order: NonNegative = 0
    """The order of the Send; 0 for Verify."""
    digests: Annotated[tuple[PageDigests, ...], Field(max_length=MAX_DIGESTS)]


class Verified(RoomMessage, Outcome):
    """Worker to node: all digests that Verify asked for have been reported, or why they could not be computed."""

    type: Literal["verified"] = "verified"
    rank: Rank
    seconds: dict[str, float] = Field(default_factory=dict)
    """`verify`: from the order to its end; `verify_busy`: computing."""


class PageMove(FrozenModel):
    """Pages on the device and their host copies, in the same order."""

    device: WireTable
    twins: WireTable


class CopyPages(FrozenModel):
    """Node to worker: copy your part of device pages to host memory; answered by PagesCopied.

    The device pages are final. The ranks of a stage divide among them what each of them holds whole.
    """

    type: Literal["copy_pages"] = "copy_pages"
    order: Positive
    moves: Annotated[tuple[PageMove, ...], Field(max_length=MAX_MOVES)]
    link_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Copy for at most this share of the time, since transfers need the link to the device, too."""


class PagesCopied(Outcome):
    """Worker to node: how CopyPages ended. Without an error the host copies hold, by proof, this rank's part."""

    type: Literal["pages_copied"] = "pages_copied"
    rank: Rank
    order: Positive
    bytes: NonNegative = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The time during which something was being copied, without the pauses that leave the link to others."""
    quiet: bool = True
    """False: the device may still write to the host copies. The same answer comes again, with True, when it does not."""


class CloseRoom(RoomMessage):
    """Node to worker: forget the room and abort what is in flight; RoomClosed proves that the room is quiet."""

    type: Literal["close_room"] = "close_room"
    all_sent: bool = False
    """Every order of the room has ended well, so there is nothing to prove, and no answer."""


class RoomClosed(RoomMessage):
    """Worker to node: the room is forgotten, and nothing of it is being read or sent (`quiet`).

    Not `quiet`: something may be, until the transport that `reason` names has been torn down. RoomClosed comes again then.
    """

    type: Literal["room_closed"] = "room_closed"
    rank: Rank
    quiet: bool
    reason: Text = ""


class RenewEndpoints(FrozenModel):
    """Node to worker: give out new endpoints, of this epoch. Those of earlier epochs still work until RevokeEndpoints."""

    type: Literal["renew_endpoints"] = "renew_endpoints"
    epoch: Positive
    transports: TransportNames = ()
    """Endpoints of these transports only; empty: of all."""


class RevokeEndpoints(FrozenModel):
    """Node to worker: let nobody write any more through an endpoint of an earlier epoch."""

    type: Literal["revoke_endpoints"] = "revoke_endpoints"
    before_epoch: Positive
    transports: TransportNames = ()
    """As in RenewEndpoints."""


class EndpointsRevoked(FrozenModel):
    """Worker to node: nobody can write to this rank through an endpoint of an earlier epoch."""

    type: Literal["endpoints_revoked"] = "endpoints_revoked"
    rank: Rank
    before_epoch: Positive


class WorkerClosed(FrozenModel):
    """Worker to node, from an engine's process: every transport is closed, though the process lives on. Answered by Shutdown."""

    type: Literal["worker_closed"] = "worker_closed"
    rank: Rank


class Shutdown(FrozenModel):
    """Node to worker: end now."""

    type: Literal["shutdown"] = "shutdown"


NodeToWorker = Annotated[
    WorkerSetup
    | ConnectPeer
    | DisconnectPeer
    | OpenRoom
    | Send
    | Verify
    | CopyPages
    | CloseRoom
    | RenewEndpoints
    | RevokeEndpoints
    | Heartbeat
    | Shutdown,
    Field(discriminator="type"),
]
WorkerToNode = Annotated[
    WorkerHello
    | WorkerReady
    | WorkerFailed
    | WorkerProgress
    | PeerConnected
    | PathsChanged
    | Rerouted
    | Digested
    | Sent
    | Verified
    | PagesCopied
    | TransportsNotBuilt
    | RoomClosed
    | EndpointsRevoked
    | WorkerClosed
    | Heartbeat,
    Field(discriminator="type"),
]

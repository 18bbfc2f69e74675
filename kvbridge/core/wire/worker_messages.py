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


class WorkerHello(FrozenModel):
    """Worker to node, first message: I serve this rank. A worker in an engine's process brings its own device memory."""

    type: Literal["worker_hello"] = "worker_hello"
    rank: Rank
    pid: Positive
    adopted: bool = False


class WorkerSetup(FrozenModel):
    """Node to worker: what you are to serve. `transports` is the configuration section of that name, as JSON."""

    type: Literal["worker_setup"] = "worker_setup"
    geometry: ModelGeometry
    rank: Rank
    pp_size: Positive
    tp_size: Positive
    layers: tuple[NonNegative, ...]
    """The global layer ids of the rank."""
    device: tuple[SharedRegion, ...]
    """Device memory of this rank that the node has made (device: cpu)."""
    allocate: DeviceAllocationRequest | None = None
    """Device memory of this rank that the worker is to make (device: cuda). With neither, it adopts an engine's."""
    host: tuple[SharedRegion, ...]
    """The node's host pool; empty when there is none."""
    twins: tuple[SharedRegion, ...] = ()
    """The node's twins of device pages, for this worker's copies alone: no peer hears of them, and no transport registers them."""
    stage_tp_ranks: tuple[NonNegative, ...] = ()
    """The tensor-parallel indices of the ranks of this worker's stage on this node, who share the twins."""
    copy_backend: Name = "kernel"
    """`tier.host.backend`: what copies pages to their twins on a GPU."""
    transports: Annotated[str, Field(max_length=100_000)]
    transfer_timeout_s: Annotated[float, Field(gt=0)]
    """`timeouts.transfer_s`."""
    epoch: NonNegative = 0
    """Of the endpoints that the worker is to give out."""


class WorkerReady(FrozenModel):
    """Worker to node: memory is created and registered; this is how peers reach me.

    Said again with other endpoints, after RenewEndpoints or when a transport had to be replaced.
    """

    type: Literal["worker_ready"] = "worker_ready"
    rank: Rank
    pid: Positive
    description: RankDescription
    epoch: NonNegative = 0
    """Of the endpoints in the description."""
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


class PeerConnected(FrozenModel):
    """Worker to node: ready (`error` empty), or why not."""

    type: Literal["peer_connected"] = "peer_connected"
    rank: Rank
    peer: Name
    transports: tuple[str, ...] = ()
    error_code: str = ""
    error: Text = ""


class PathsChanged(FrozenModel):
    """Worker to node: a decode node is reached otherwise than was said last."""

    type: Literal["paths_changed"] = "paths_changed"
    rank: Rank
    peer: Name
    transports: tuple[str, ...]
    """By what each of its ranks is reached now."""
    standby: tuple[str, ...] = ()
    """Transports by which every one of its ranks could be reached instead."""
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
    """What is computed over each order's pages and reported before it ends."""


class Send(RoomMessage):
    """Node to worker: move this section to every rank of the room's peer."""

    type: Literal["send"] = "send"
    order: Positive
    section: Section
    source: tuple[WireTable, ...] = ()
    """Source pages that the room has got since; they follow those that the worker knows."""
    after: Annotated[tuple[StreamPoint, ...], Field(max_length=MAX_POINTS)] = ()
    """Read nothing of it before the engine's GPU has reached all of these."""


class Sent(RoomMessage):
    """Worker to node: how an order ended. `quiet` is False when bytes may still move."""

    type: Literal["sent"] = "sent"
    rank: Rank
    order: Positive
    amounts: Amounts = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phases of the order: `plan`, `submit`, `first_byte` (monotonic seconds from receipt to the end of both), `digest` (computing,
    while bytes move) and `move` (from there to the end of both)."""
    error_code: str = ""
    error: Text = ""
    quiet: bool = True
    in_transit: bool = False
    """Something was sent whose arrival was never confirmed."""


class Rerouted(RoomMessage):
    """Worker to node, ahead of an order's Sent: what `lost` had not confirmed is sent again over another transport.

    Nothing of the room is read or sent by means of the lost endpoint any more, or its transport is closed before the Sent.
    """

    type: Literal["rerouted"] = "rerouted"
    rank: Rank
    lost: Name
    over: Name
    epoch: NonNegative
    """Of the endpoint that was lost."""
    in_transit: bool
    """Something was sent there whose arrival was never confirmed."""
    error: Text = ""


class Verify(RoomMessage):
    """Node to worker, on decode: compute the digests of what has arrived for a room in your own memory.

    Those of components in the spaces of `tables`.
    """

    type: Literal["verify"] = "verify"
    prompt_tokens: Positive
    prefix_tokens: NonNegative
    tables: tuple[WireTable, ...]
    host_index: NonNegative
    """Which share of the host pool's pages is this rank's to look at."""
    host_count: Positive


class Digested(RoomMessage):
    """Worker to node: digests that an order has led to, ahead of its Sent; or Verify, ahead of its Verified."""

    type: Literal["digested"] = "digested"
    rank: Rank
    order: NonNegative = 0
    """That of Send; 0 for Verify."""
    digests: Annotated[tuple[PageDigests, ...], Field(max_length=MAX_DIGESTS)]


class Verified(RoomMessage):
    """Worker to node: all digests that Verify asked for have been reported, or why they could not be computed."""

    type: Literal["verified"] = "verified"
    rank: Rank
    seconds: dict[str, float] = Field(default_factory=dict)
    """`verify`: from the order to its end; `verify_busy`: computing."""
    error_code: str = ""
    error: Text = ""


class PageMove(FrozenModel):
    """Pages on the device and their twins in host memory, in the same order."""

    device: WireTable
    twins: WireTable


class CopyPages(FrozenModel):
    """Node to worker: copy what device pages hold to their twins, as far as that is yours; answered by PagesCopied.

    What was to be written to the device pages has been. Of what every rank of a stage holds whole, each copies its share.
    """

    type: Literal["copy_pages"] = "copy_pages"
    order: Positive
    moves: Annotated[tuple[PageMove, ...], Field(max_length=MAX_MOVES)]
    link_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Copy at most so much of the time: the link to the device is there for transfers, too."""


class PagesCopied(FrozenModel):
    """Worker to node: how an order to copy pages ended. Without an error the twins hold, by proof, what is this rank's to copy."""

    type: Literal["pages_copied"] = "pages_copied"
    rank: Rank
    order: Positive
    bytes: NonNegative = 0
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """While a part of it was being copied; without the pauses that leave the link to others."""
    error_code: str = ""
    error: Text = ""
    quiet: bool = True
    """False: the device may still write to the twins. The same answer comes again, with True, as soon as it does not."""


class CloseRoom(RoomMessage):
    """Node to worker: forget the room; what is in flight is aborted, and RoomClosed is the proof that it is quiet."""

    type: Literal["close_room"] = "close_room"
    all_sent: bool = False
    """Every order of the room has ended well, so there is nothing to prove: it is forgotten, and not answered."""


class RoomClosed(RoomMessage):
    """Worker to node: the room is forgotten and nothing of it is being read or sent (`quiet`).

    Or something may be until a transport that would not become quiet has been torn down (`reason` says which); it is said
    again then, with `quiet`.
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
    """Those of these transports; empty: of all."""


class RevokeEndpoints(FrozenModel):
    """Node to worker: let nobody write any more by means of an endpoint of an epoch earlier than this one."""

    type: Literal["revoke_endpoints"] = "revoke_endpoints"
    before_epoch: Positive
    transports: TransportNames = ()
    """As in RenewEndpoints."""


class EndpointsRevoked(FrozenModel):
    """Worker to node: nobody can write to this rank by means of an endpoint of an epoch earlier than this one."""

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

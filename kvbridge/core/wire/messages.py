"""Every message between kvbridge processes, typed.

Owns: names, fields, limits. Must not know: sockets, encoding, who is connected to whom.

Three conversations share these types. *Peers* (decode node <-> prefill node) meet, offer, send and drain. *Workers* (node <->
its rank workers) execute. *Engines* (node <-> engine ranks) begin, publish, claim. A closed union for each direction; what is
not in the union is refused at the door.

Page tables travel as little-endian int32 bytes, not as lists: a million-token request has 4,096 ids in each space.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import AfterValidator, Field

from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region
from kvbridge.core.ids import FrozenModel, IndexSpace, NonNegative, PageTable, Positive, Rank, Role, Tables, Uint64
from kvbridge.core.plan.digests import DigestKind, PageDigests
from kvbridge.core.plan.operations import Amounts, Section

PROTOCOL_VERSION = 1
MAX_METADATA_BYTES = 64 * 1024
MAX_TABLE_BYTES = 4 * 65_536
MAX_NODE_RANKS = 256
"""Ranks of one node; each costs whoever meets the node a look at its manifest, so a peer may not name any number."""
MAX_ENDPOINTS = 16
MAX_PHASES = 64
MAX_DIGESTS = 1_024
"""Components, lanes and groups of layers that one message carries digests of."""
MAX_AMOUNT = 2**50
"""Rows, bytes or operations of a component that one message may report; sums of a room's messages stay in bounds."""

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=4_000)]
Metadata = Annotated[bytes, Field(max_length=MAX_METADATA_BYTES)]
Phases = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[float, Field(allow_inf_nan=False)]],
    Field(max_length=MAX_PHASES),
]


def _check_amounts(amounts: Amounts) -> Amounts:
    if any(max(amount.lane_rows, amount.bytes, amount.operations) > MAX_AMOUNT for amount in amounts.values()):
        raise ValueError(f"an amount is larger than {MAX_AMOUNT}")
    return amounts


ReportedAmounts = Annotated[Amounts, AfterValidator(_check_amounts)]


class WireTable(FrozenModel):
    """A `PageTable` on the wire."""

    space: IndexSpace
    first_page: NonNegative = 0
    ids: Annotated[bytes, Field(max_length=MAX_TABLE_BYTES)]
    """int32, little-endian."""


def to_wire(tables: Tables) -> tuple[WireTable, ...]:
    """Encode tables for a message."""
    return tuple(
        WireTable(space=table.space, first_page=table.first_page, ids=table.ids.astype("<i4").tobytes())
        for table in tables.values()
    )


def from_wire(tables: tuple[WireTable, ...]) -> Tables:
    """Decode the tables of a message. Raises InvalidInputError (through PageTable) or ValueError on malformed ids."""
    return {
        table.space: PageTable(table.space, np.frombuffer(table.ids, dtype="<i4").astype(np.int32), table.first_page)
        for table in tables
    }


class RoomMessage(FrozenModel):
    """What every message about a room carries."""

    room: Uint64
    generation: Positive


class TransportEndpoint(FrozenModel):
    """One transport of one rank: `data` is the backend's own."""

    transport: Name
    data: Annotated[bytes, Field(max_length=1 << 20)]


class RankDescription(FrozenModel):
    """All that a peer needs in order to write to a rank, or to expect writes from it."""

    manifest: RankManifest
    endpoints: Annotated[tuple[TransportEndpoint, ...], Field(max_length=MAX_ENDPOINTS)]


class NodeDescription(FrozenModel):
    """One daemon, as it introduces itself to a peer."""

    instance: Name
    node: Name
    role: Role
    incarnation: Name
    geometry: ModelGeometry
    ranks: Annotated[tuple[RankDescription, ...], Field(max_length=MAX_NODE_RANKS)]


# ---------------------------------------------------------------------------------------------- peers


class Hello(FrozenModel):
    """Decode to prefill, first message and again after either side changed: who I am and where my memory is."""

    type: Literal["hello"] = "hello"
    node: NodeDescription


class Welcome(FrozenModel):
    """Prefill to decode: accepted; these are the ranks that will write to you, and over what."""

    type: Literal["welcome"] = "welcome"
    instance: Name
    node: Name
    incarnation: Name
    ranks: Annotated[tuple[Rank, ...], Field(max_length=MAX_NODE_RANKS)]


class Rejected(FrozenModel):
    """Prefill to decode: we cannot work together; `message` names the first difference."""

    type: Literal["rejected"] = "rejected"
    code: Name
    message: Text


class Offer(RoomMessage):
    """Decode to prefill: write this request's state here. Grants the lease on the pages until Done or Drained."""

    type: Literal["offer"] = "offer"
    prompt_tokens: Positive
    prefix_tokens: NonNegative = 0
    tables: Annotated[tuple[WireTable, ...], Field(max_length=len(IndexSpace))]
    digest: DigestKind = DigestKind.NONE
    """What the writers are to compute over the pages that they fill."""


class Abort(RoomMessage):
    """Either side: stop. The sender of pages answers Drained once nothing of the room is in flight."""

    type: Literal["abort"] = "abort"
    code: Name
    message: Text


class Digests(RoomMessage):
    """Prefill to decode, ahead of a writer's Done: digests of what it has sent, in as many parts as they take."""

    type: Literal["digests"] = "digests"
    writer: Rank
    part: Annotated[int, Field(ge=0, lt=MAX_AMOUNT)]
    """From 0."""
    digests: Annotated[tuple[PageDigests, ...], Field(max_length=MAX_DIGESTS)]


class Done(RoomMessage):
    """Prefill to decode: this writer has sent everything that was its to send, and it has arrived."""

    type: Literal["done"] = "done"
    writer: Rank
    amounts: ReportedAmounts
    phases_s: Phases
    metadata: Metadata = b""
    digest_parts: NonNegative = 0
    """How many Digests of this writer there were."""


class Failed(RoomMessage):
    """Prefill to decode: the room will not be completed; Drained follows when its pages are quiet.

    Decode to prefill: everything was sent, and the room has failed all the same; nothing follows.
    """

    type: Literal["failed"] = "failed"
    code: Name
    message: Text


class Drained(RoomMessage):
    """Prefill to decode: this node sends nothing of the room any more, nor ever will.

    `in_transit`: it has sent something whose arrival was never confirmed, so it may still arrive; the receiver has to
    shut that way before it uses the pages again.
    """

    type: Literal["drained"] = "drained"
    in_transit: bool = False


class Heartbeat(FrozenModel):
    """Either side: this incarnation lives."""

    type: Literal["heartbeat"] = "heartbeat"


PeerMessage = Annotated[
    Hello | Welcome | Rejected | Offer | Abort | Digests | Done | Failed | Drained | Heartbeat, Field(discriminator="type")
]


# ---------------------------------------------------------------------------------------------- workers


class SharedRegion(FrozenModel):
    """A region as another process of the node can map it.

    `extent_addresses` of `region` are offsets, each into the shared file of the same position in `paths`.
    """

    region: Region
    paths: tuple[str, ...]


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
    """Owned device memory of this rank; empty when the worker adopts an engine's."""
    host: tuple[SharedRegion, ...]
    """The node's host pool; empty when there is none."""
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
    ranks: tuple[RankDescription, ...]


class WorkerFailed(FrozenModel):
    """Worker to node: I cannot serve my rank; the text gives cause and fix."""

    type: Literal["worker_failed"] = "worker_failed"
    rank: Rank
    code: Name
    message: Text


class PeerConnected(FrozenModel):
    """Worker to node: ready (`error` empty), or why not."""

    type: Literal["peer_connected"] = "peer_connected"
    rank: Rank
    peer: Name
    transports: tuple[str, ...] = ()
    error_code: str = ""
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


class Sent(RoomMessage):
    """Worker to node: how an order ended. `quiet` is False when bytes may still move."""

    type: Literal["sent"] = "sent"
    rank: Rank
    order: Positive
    amounts: Amounts = Field(default_factory=dict)
    seconds: dict[str, float] = Field(default_factory=dict)
    """Phases of the order: `plan`, `first_byte` (monotonic seconds from receipt to first submit), `digest` (computing,
    while bytes move) and `move` (from there to the end of both)."""
    error_code: str = ""
    error: Text = ""
    quiet: bool = True
    in_transit: bool = False
    """Something was sent whose arrival was never confirmed."""


class Verify(RoomMessage):
    """Node to worker, on decode: compute the digests of what has arrived for a room, in your own memory."""

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
    """0 for Verify."""
    digests: Annotated[tuple[PageDigests, ...], Field(max_length=MAX_DIGESTS)]


class Verified(RoomMessage):
    """Worker to node: all digests that Verify asked for have been reported, or why they could not be computed."""

    type: Literal["verified"] = "verified"
    rank: Rank
    seconds: dict[str, float] = Field(default_factory=dict)
    """`verify`: from the order to its end; `verify_busy`: computing."""
    error_code: str = ""
    error: Text = ""


class CloseRoom(RoomMessage):
    """Node to worker: forget the room; what is in flight is aborted, and RoomClosed is the proof that it is quiet."""

    type: Literal["close_room"] = "close_room"


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


class RevokeEndpoints(FrozenModel):
    """Node to worker: let nobody write any more by means of an endpoint of an epoch earlier than this one."""

    type: Literal["revoke_endpoints"] = "revoke_endpoints"
    before_epoch: Positive


class EndpointsRevoked(FrozenModel):
    """Worker to node: nobody can write to this rank by means of an endpoint of an epoch earlier than this one."""

    type: Literal["endpoints_revoked"] = "endpoints_revoked"
    rank: Rank
    before_epoch: Positive


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
    | Digested
    | Sent
    | Verified
    | RoomClosed
    | EndpointsRevoked
    | Heartbeat,
    Field(discriminator="type"),
]

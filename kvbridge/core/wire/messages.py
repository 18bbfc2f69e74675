"""Messages between nodes, and the types that all conversations share.

A decode node and a prefill node are *peers*. A node also talks with its rank workers (`worker_messages`) and with engine ranks
(`engine_messages`). Each direction is a closed union: a receiver refuses any other message. Page tables travel as int32 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field

from kvbridge.core.errors import FeatureError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region
from kvbridge.core.ids import (
    MOST_PAGES,
    REQUEST_SPACES,
    FrozenModel,
    IndexSpace,
    NonNegative,
    Positive,
    Rank,
    Role,
    RoomId,
    Tables,
)
from kvbridge.core.plan.digests import DigestKind, PageDigests
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.prefixes import ModelIdentity

PROTOCOL_VERSION = 1
MAX_METADATA_BYTES = 64 * 1024
MAX_TABLE_BYTES = 4 * MOST_PAGES
MAX_PAGE_HASHES_BYTES = 16 * 65_536
"""Page keys of a request, for 65,536 pages."""
MAX_ROOM_METADATA_BYTES = 24 * MAX_METADATA_BYTES
"""From all writers of one room: a claim is answered with it and five full tables, in one frame."""
REASON_CHARS = 2_000
"""A reason is cut to this length. Messages carry up to 4,000 characters, so that a hop can still say whose reason it is."""
MAX_NODE_RANKS = 256
"""A node reads the manifest of each rank of its peers, so a peer may not name any number of ranks."""
MAX_PACKED_RANK_BYTES = 1 << 20
MAX_PACKED_NODE_BYTES = 3_000_000
"""All ranks of a node in one frame: 256 ranks have 11 KB each. A rank needs 2 to 4 KB, 8 bytes an extent, and registrations."""
MAX_STAGES = 256
"""Pipeline stages of one instance."""
MAX_INSTANCE_NODES = 32
"""Nodes of one instance, and so prefill addresses of one room. A decode node opens a link to each of them."""
MAX_ENDPOINTS = 16
MAX_PHASES = 64
MAX_INTERVALS = 32
MAX_AGO_S = 86_400.0
MAX_DIGESTS = 1_024
"""Entries of one message: components, lanes and groups of layers."""
MAX_CHECKPOINTS = 256
MAX_RESTORABLE = 65_536
"""Checkpoints of one room, and places at which its engine can start."""
MAX_AMOUNT = 2**50
"""Rows, bytes or operations of a component that one message may report, so that sums of messages stay in bounds."""

Name = Annotated[str, Field(min_length=1, max_length=200)]
Text = Annotated[str, Field(max_length=4_000)]
PageHashes = Annotated[bytes, Field(max_length=MAX_PAGE_HASHES_BYTES, repr=False)]
"""Page keys in the order of the pages, 16 bytes each."""
EndKey = Annotated[bytes, Field(max_length=16, repr=False)]
"""The key of a prompt's tokens behind its last whole page (`tier/keys.py`). Empty: no such tokens, or not stated."""
KeysDigest = Annotated[bytes, Field(max_length=32)]
"""The digest of a list of page keys (`tier/keys.py`). Empty: of no keys."""
Metadata = Annotated[bytes, Field(max_length=MAX_METADATA_BYTES)]
Phases = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[float, Field(allow_inf_nan=False)]],
    Field(max_length=MAX_PHASES),
]

PromptDigest = Annotated[bytes, Field(max_length=32)]
"""Names the prompt of a room that an engine admits itself. Empty: not stated. Both sides of a room state the same."""
Traceparent = Annotated[str, Field(max_length=200)]
"""W3C's header of that name. Empty: no trace; a malformed one counts as empty."""
Ago = Annotated[float, Field(ge=0, le=MAX_AGO_S, allow_inf_nan=False)]
"""Seconds before the message."""


def _check_amounts(amounts: Amounts) -> Amounts:
    if any(max(amount.lane_rows, amount.bytes, amount.operations) > MAX_AMOUNT for amount in amounts.values()):
        raise ValueError(f"an amount is larger than {MAX_AMOUNT}")
    return amounts


ReportedAmounts = Annotated[Amounts, AfterValidator(_check_amounts)]


class Message(FrozenModel):
    """A message of a union. The head of its class names its `type`, which becomes a field. A base of messages names none."""

    if TYPE_CHECKING:
        type: ClassVar[str]

    def __init_subclass__(cls, *, type: str = "", **kwargs: Any) -> None:  # noqa: A002, ANN401 - as on the wire; pydantic's
        super().__init_subclass__(**kwargs)
        if type:
            cls.__annotations__ = {"type": Literal[type], **vars(cls).get("__annotations__", {})}
            cls.type = type


class RoomMessage(Message):
    """A message about a room."""

    room: RoomId
    generation: Positive


class Trouble(Message):
    """A message that says what went wrong."""

    code: Name
    message: Text


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


class TransportEndpoint(FrozenModel):
    """One transport of one rank: `data` is the backend's own."""

    transport: Name
    data: Annotated[bytes, Field(max_length=1 << 20)]
    epoch: NonNegative = 0
    """Rises with each endpoint that the transport gives out after a fence."""


class RankDescription(FrozenModel):
    """The memory of a rank, and the ways to write there."""

    manifest: RankManifest
    endpoints: Annotated[tuple[TransportEndpoint, ...], Field(max_length=MAX_ENDPOINTS)]


PackedRank = Annotated[bytes, Field(max_length=MAX_PACKED_RANK_BYTES)]
"""A RankDescription as bytes (`codec.pack_rank`)."""


class NodeDescription(FrozenModel):
    """One daemon, as it introduces itself to a peer."""

    instance: Name
    node: Name
    role: Role
    incarnation: Name
    model_identity: ModelIdentity | None = None
    """The model that the node's `tier` section names. None: not stated."""
    geometry: ModelGeometry
    ranks: Annotated[tuple[PackedRank, ...], Field(max_length=MAX_NODE_RANKS)]


# ---------------------------------------------------------------------------------------------- shared memory

HANDLE_BYTES = 64
"""Length of CUDA's interprocess handles, of memory and of events."""

IpcHandle = Annotated[bytes, Field(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
DeviceUuid = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
"""Names a GPU in every process of the host; ordinals depend on CUDA_VISIBLE_DEVICES."""


class FileOrigin(FrozenModel):
    """Memory behind a shared file."""

    kind: Literal["file"] = "file"
    path: str


class CudaOrigin(FrozenModel):
    """Memory in a device allocation of another process, to be opened by CUDA IPC."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")  # added to FrozenModel's

    kind: Literal["cuda"] = "cuda"
    handle: IpcHandle
    device_uuid: DeviceUuid
    length_bytes: Positive
    """Length of the whole allocation."""


Origin = Annotated[FileOrigin | CudaOrigin, Field(discriminator="kind")]
"""Memory that another process of the host has made."""


class SharedRegion(FrozenModel):
    """A region as another process of the node reaches it.

    `extent_addresses` of `region` are offsets, each into the memory of the same position in `origins`. A region of VRAM has CUDA
    origins only, and its `device` is the ordinal of the process that made it.
    """

    region: Region
    origins: tuple[Origin, ...]


class DeviceAllocationRequest(FrozenModel):
    """The device memory that a rank worker is to allocate, as `pool.memory.layout.device_placement` lays it out."""

    device: NonNegative
    """CUDA ordinal, as the node and its workers count."""
    page_counts: dict[IndexSpace, Positive]
    exclude: tuple[ComponentKind, ...] = ()
    """Components that live in the node's host pool instead."""
    page_first: bool = False
    """Whether a page of all layers is one stretch of memory."""


class NodeMemory(Message):
    """The form and the shared memory of a node, for its rank workers and engines."""

    geometry: ModelGeometry
    pp_size: Positive
    tp_size: Positive
    host: tuple[SharedRegion, ...] = ()
    """The node's host pool; empty: there is none."""
    own_host: tuple[ComponentKind, ...] = ()
    """Components that an engine brings in host memory of its own, where the node has no host pool."""
    twins: tuple[SharedRegion, ...] = ()
    """The node's host copies of device pages. Peers do not hear of them, and no transport registers them."""
    copy_backend: Name = "kernel"
    """`tier.host.backend`: copies pages between device and host copy."""


class StreamPoint(FrozenModel):
    """An interprocess event in the work of an engine's GPU. Recorded again, an event is reached later, which is still right."""

    model_config = ConfigDict(ser_json_bytes="hex", val_json_bytes="hex")

    ring: Annotated[str, Field(min_length=1, max_length=100)]
    """Names the set of events and the incarnation of the process that made them."""
    handle: IpcHandle
    device_uuid: DeviceUuid


# ---------------------------------------------------------------------------------------------- features

# Each side says in its first message what it has and what it requires of the other. Both sides decide, since an older release does
# not know what a later one requires of it. Names on the wire are plain texts, because a later release has others.

_Names = Annotated[tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")], ...], Field(max_length=64)]


class Features(FrozenModel):
    """The features that one side of a conversation names."""

    has: _Names = ()
    requires: _Names = ()
    """The other side must have these."""


FEATURES = Features()
"""The features of this release in every conversation: none, since no other release lacks any."""


def agree(ours: Features, theirs: Features, *, us: str, them: str) -> tuple[str, ...]:
    """Return what both sides have; `us` and `them` name them for people. Raises FeatureError, which names the side to upgrade."""
    for requiring, wanted, lacking, there in ((us, ours, them, theirs), (them, theirs, us, ours)):
        missing = sorted({*wanted.requires} - {*there.has})
        if missing:
            named = f"feature{'s' * (len(missing) > 1)} {', '.join(map(repr, missing[:8]))}"
            raise FeatureError(
                f"{requiring} requires {named}, which {lacking} does not have: upgrade {lacking}, or change what is required "
                f"in the configuration of {requiring}"
            )
    return tuple(sorted({*ours.has} & {*theirs.has}))


# ---------------------------------------------------------------------------------------------- decode to prefill


class Hello(Message, type="hello"):
    """My name and my memory. It is the first message, and comes again when either side has changed."""

    node: NodeDescription
    features: Features = Features()


class Coming(RoomMessage):
    """A decode node comes for a room."""

    prompt_tokens: Positive
    prompt_digest: PromptDigest = b""
    held: bool = False
    """Whether our engine was told that the room is there. Prefill then does not wait long for an unknown room."""


class Intend(Coming, type="intend"):
    """Our engine has no pages yet: hold this room until our Offer, an Abort of either side, or the end of the conversation."""


class Offer(Coming, type="offer"):
    """Write this request's state here. The offer grants the lease on the pages until Done or Drained."""

    prefix_tokens: NonNegative = 0
    tables: Annotated[tuple[WireTable, ...], Field(max_length=len(REQUEST_SPACES))]
    digest: DigestKind = DigestKind.NONE
    """The digest that writers compute over the pages that they fill."""
    traceparent: Traceparent = ""
    """The parent of the spans of sending."""


class Welcome(Message, type="welcome"):
    """You are accepted; these ranks will write to you."""

    instance: Name
    node: Name
    incarnation: Name
    model_identity: ModelIdentity | None = None
    """As in NodeDescription."""
    pp_size: Positive
    tp_size: Positive
    stage_boundaries: Annotated[tuple[Positive, ...], Field(max_length=MAX_STAGES - 1)] = ()
    """The first layer of each stage but the first; with the sizes, they tell which layers each rank sends."""
    ranks: Annotated[tuple[Rank, ...], Field(max_length=MAX_NODE_RANKS)]
    features: Features = Features()

    @property
    def name(self) -> str:
        """Instance and node, for people."""
        return f"{self.instance}/{self.node}"


class Rejected(Trouble, type="rejected"):
    """We cannot work together; `message` names the first difference."""


class Digests(RoomMessage, type="digests"):
    """Digests of what a writer has sent, in parts, ahead of its Done."""

    writer: Rank
    part: Annotated[int, Field(ge=0, lt=MAX_AMOUNT)]
    """From 0."""
    digests: Annotated[tuple[PageDigests, ...], Field(max_length=MAX_DIGESTS)]


class Done(RoomMessage, type="done"):
    """Everything that this writer owes has arrived."""

    writer: Rank
    amounts: ReportedAmounts
    phases_s: Phases
    metadata: Metadata = b""
    digest_parts: NonNegative = 0
    """Number of Digests that this writer has sent."""
    transport: Annotated[str, Field(max_length=200)] = ""
    """The transports that the writer has used, joined by '+'."""
    keys_digest: KeysDigest = b""
    """The digest of the page keys that the rank's engine stated for the prompt that it computed. Empty: not asked for."""
    end_key: EndKey = b""
    """The key that the same engine stated."""
    under_way_ago_s: Annotated[tuple[tuple[Ago, Ago], ...], Field(max_length=MAX_INTERVALS)] = ()
    """When the writer was sending: pairs (begin, end)."""


class PathLost(RoomMessage, type="path_lost"):
    """A writer has lost a transport in the middle of a room, and goes on over another one.

    The writer sends nothing more through the lost endpoint. Earlier bytes may still arrive, so the receiver shuts the endpoint
    before the room can be read.
    """

    writer: Rank
    transport: Name
    epoch: NonNegative
    """The epoch of the endpoint that was written to."""


class Drained(RoomMessage, type="drained"):
    """This node sends nothing of the room now, nor later."""

    in_transit: bool = False
    """Whether something was sent whose arrival was not confirmed. The receiver then shuts the endpoint before the pages are used
    again."""


# ---------------------------------------------------------------------------------------------- either way


class Abort(RoomMessage, Trouble, type="abort"):
    """Stop. The sender of pages answers Drained once nothing of the room is in flight."""


class Failed(RoomMessage, Trouble, type="failed"):
    """From prefill: the room will not be completed; Drained follows when its pages are quiet.

    From decode: everything was sent, and the room has failed all the same; nothing follows.
    """


class Heartbeat(Message, type="heartbeat"):
    """This incarnation lives."""


_Meetings = Hello | Welcome | Rejected | Heartbeat
_OfRooms = Intend | Offer | Abort | Digests | Done | PathLost | Failed | Drained
PeerMessage = Annotated[_Meetings | _OfRooms, Field(discriminator="type")]

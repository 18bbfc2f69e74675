"""Messages between an engine rank and its node.

Every call carries a number that its answer repeats. The node answers calls at once; a `RoomEvent` tells later how long work ended.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank, Role, RoomId
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.prefixes import ModelIdentity, Namespace, Retention
from kvbridge.core.wire.messages import (
    MAX_CHECKPOINTS,
    MAX_INSTANCE_NODES,
    MAX_RESTORABLE,
    EndKey,
    Features,
    Heartbeat,
    Message,
    Metadata,
    Name,
    PageHashes,
    PromptDigest,
    SharedRegion,
    StreamPoint,
    Text,
    Traceparent,
    WireTable,
)

# ---------------------------------------------------------------------------------------------- calls


class Call(Message):
    """A call of an engine."""

    call: Positive


class RoomCall(Call):
    """A call about a room."""

    room: RoomId


class Attach(Call, type="attach"):
    """The first call: the ranks that this engine process serves (empty: every rank of the node)."""

    role: Role
    ranks: tuple[Rank, ...] = ()
    brings_memory: bool = False
    """Adopted pools: this process has the memory of the ranks. Any other engine attaches when the memory of all ranks is there."""
    features: Features = Features()


class Detach(Call, type="detach"):
    """The last call: this engine and its GPUs use no page any more. Rooms that the engine has begun or claimed and not ended fail.

    The pages of an engine that leaves without this call wait for the end of its process.
    """


class Admit(RoomCall, type="admit"):
    """Admit a room from the engine itself, as `POST /v1/requests` does."""

    generation: Positive = 1
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    page_hashes: PageHashes = b""
    namespace: Namespace = ""
    """Any: an engine maps the node's pools, so it can read every prefix in them."""
    retention: Retention | None = None


class Hold(RoomCall, type="hold"):
    """Prefill, adopted pools: admit a room for a prompt that this engine computes or has computed, and hold its pages for decode.

    Engines of other ranks of the node say the same of the room, in any order: the first one admits it, the others begin it as well.
    Stands for admission, Begin, Publish and Finish, as far as each is known. A refused Hold leaves nothing behind.
    """

    generation: Positive = 1
    prompt_tokens: Positive
    prompt_digest: PromptDigest = b""
    tables: tuple[WireTable, ...] | None = None
    """The pages so far, as in Begin; None: not begun yet."""
    computed_tokens: NonNegative = 0
    published_tokens: NonNegative = 0
    """As in Publish; the whole prompt means finished too."""
    metadata: Metadata = b""


PrefillNodes = Annotated[tuple[PeerAddress, ...], Field(min_length=1, max_length=MAX_INSTANCE_NODES)]
"""The nodes of one prefill instance."""


class Fetch(RoomCall, type="fetch"):
    """Decode, adopted pools: admit a room that these prefill nodes hold or will hold. They hear at once that we will come for it.

    Stands for admission and Provide. A refused Fetch leaves nothing behind.
    """

    generation: Positive = 1
    prompt_tokens: Positive
    prompt_digest: PromptDigest = b""
    prefill: PrefillNodes
    held: bool = False
    """The prefill engine has said that it holds the room, so its node refuses an unknown room without a long wait."""
    tables: tuple[WireTable, ...] | None = None
    """As in Provide; None: Provide follows when the engine has pages for the room."""
    prefix_tokens: NonNegative = 0


class Begin(RoomCall, type="begin"):
    """Prefill: start to compute an admitted room."""

    prompt_tokens: Positive
    page_hashes: PageHashes = b""
    """The keys of the tokens that the engine computes; equal to those of the room's admission."""
    end_key: EndKey = b""
    """The key of the same tokens."""
    tables: tuple[WireTable, ...] = ()
    """Adopted pools: the engine's pages so far."""
    at_most: NonNegative | None = None
    """The engine starts at this token at the latest."""
    computed_tokens: NonNegative = 0
    """Adopted pools: tokens from the prompt's start in the engine's own prefix cache; their whole pages are only read."""
    by_gpu: bool = False
    """A GPU writes asynchronously, so this call does not imply that earlier attempts at the room are no longer written."""


class AskRestorable(RoomCall, type="ask_restorable"):
    """Prefill: ask at which tokens the engine of a room can start here."""


class Publish(RoomCall, type="publish"):
    """Prefill: the first `upto_token` tokens are final in memory, on all layers or on some."""

    upto_token: NonNegative
    layers: tuple[NonNegative, ...] | None = None
    tables: tuple[WireTable, ...] = ()
    """Adopted pools: further pages, behind those of the room; pages of published tokens alone are only read."""
    after: dict[str, StreamPoint] = Field(default_factory=dict)
    """For each rank whose pages a GPU writes, keyed by `str(rank)`: the point in the GPU's work at which the pages are final."""


class Finish(RoomCall, type="finish"):
    """Prefill: everything is published; `metadata` (first token, log-probabilities) travels with Done."""

    metadata: Metadata = b""
    by_gpu: bool = False
    """A GPU may still have to write what was published, so the engine lets go of the pages by Release."""
    checkpoints: Annotated[tuple[Positive, ...], Field(max_length=MAX_CHECKPOINTS)] = ()
    """The wanted checkpoints that were written before the last publication, in tokens."""


class Provide(RoomCall, type="provide"):
    """Decode, adopted pools: the device pages that the engine gives to a room that asked for them."""

    tables: tuple[WireTable, ...]
    prefix_tokens: NonNegative = 0
    """Tokens from the prompt's start whose rows are in these pages already. The rows are not sent again, and the pages are only
    read, so other rooms may have them too."""


class Claim(RoomCall, type="claim"):
    """Decode: take a committed room."""

    page_hashes: PageHashes = b""
    """The keys of the tokens of the engine's request; equal to those of the room's admission."""
    end_key: EndKey = b""
    """The key of the same tokens. Its page, and the answer behind that page, are kept only where all engines state the same key."""


class Loaded(RoomCall, type="loaded"):
    """Everything that the answer to Begin or Claim said to load is in the room's own pages, on every rank of this engine."""

    generation: Positive
    bytes: NonNegative = 0
    """Over all ranks of this engine."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The time that the slowest rank was copying."""


class Extend(RoomCall, type="extend"):
    """Decode: the request will hold `tokens` tokens in all; reserve the missing pages and return their tables."""

    tokens: Positive


class SparseRows(FrozenModel):
    """The work of sparse decode for a request, in rows over all layers of a rank."""

    hit: NonNegative = 0
    """Selected rows that were in a hot slot, each step's distinct ones; rows of the ring are not counted."""
    loaded: NonNegative = 0
    """Selected rows that had to be loaded from the host."""
    preloaded: NonNegative = 0
    """Rows that were loaded when the request was admitted to the hot buffer."""
    backed_up: NonNegative = 0
    """New rows that were written to the host."""


class Release(RoomCall, type="release"):
    """Decode: the request is over, and its pages can be used again. Prefill: the engine's GPU is through with a finished room."""

    generation: NonNegative = 0
    """On prefill, the attempt that was finished."""
    valid_tokens: NonNegative = 0
    """On decode: the pages hold all rows of this many tokens, those of the prompt and those that were fed after it. 0: not said."""
    page_hashes: PageHashes = b""
    """On decode: the keys of all whole pages of those tokens."""
    sparse: SparseRows | None = None
    """On decode with a hot buffer."""


class AbortRoom(RoomCall, type="abort_room"):
    """Either side: stop this room."""

    reason: Text
    load_failed: bool = False
    """The engine could not load what the answer to Begin or Claim said."""
    again: bool = False
    """Prefill: the engine computes the prompt once more, and holds the room's next generation. The room fails as `withdrawn`."""


EngineToNode = Annotated[
    Attach
    | Detach
    | Admit
    | Hold
    | Fetch
    | AskRestorable
    | Begin
    | Publish
    | Finish
    | Provide
    | Claim
    | Loaded
    | Extend
    | Release
    | AbortRoom
    | Heartbeat,
    Field(discriminator="type"),
]


# ---------------------------------------------------------------------------------------------- answers and events


class Answer(Message):
    """The answer to the call of that number."""

    call: Positive


class Accepted(Answer, type="accepted"):
    """The node has carried out the call."""


class Refused(Answer, type="refused"):
    """The node has not carried out the call."""

    code: Name
    message: Text
    retry_after_s: float = 0.0


class Attached(Answer, type="attached"):
    """The answer to Attach: everything that an engine needs to find its memory."""

    instance: Name
    incarnation: Name
    geometry: ModelGeometry
    model_identity: ModelIdentity | None = None
    """The model that the node states; page keys begin with it."""
    ranks: tuple[Rank, ...]
    layers: dict[str, tuple[int, ...]]
    """The global layer ids of each rank, keyed by `str(rank)`."""
    pp_size: Positive
    tp_size: Positive
    device: dict[str, tuple[SharedRegion, ...]] = Field(default_factory=dict)
    """The device regions of each rank, keyed by `str(rank)`; missing for adopted ranks."""
    host: tuple[SharedRegion, ...] = ()
    """The node's host pool."""
    own_host: tuple[ComponentKind, ...] = ()
    """Components that an engine brings in host memory of its own, where the node has no host pool."""
    twins: tuple[SharedRegion, ...] = ()
    """The node's host copies of device pages, from which an engine loads what `Pages.load` says."""
    copy_backend: Name = "kernel"
    """`tier.host.backend`: what copies them."""
    features: Features = Features()


class Restorable(Answer, type="restorable"):
    """The answer to AskRestorable: the tokens at which the engine can start, 0 among them."""

    tokens: Annotated[tuple[NonNegative, ...], Field(max_length=MAX_RESTORABLE)]
    """Ascending."""


class Checkpoint(FrozenModel):
    """Pages of windows and states as they are after exactly this many tokens of a prompt."""

    tokens: Positive
    table: WireTable


class Pages(Answer, type="pages"):
    """The answer to Begin, Claim and Extend: the tables of a room."""

    room: RoomId
    generation: Positive
    prompt_tokens: Positive
    prefix_tokens: NonNegative = 0
    """Tokens that decode held already; they are not sent."""
    computed_tokens: NonNegative = 0
    """On prefill: where the engine starts to compute."""
    host_tokens: NonNegative = 0
    """How many of the last cached tokens are in host memory only; `load` says how to copy them."""
    tables: tuple[WireTable, ...]
    restore: Checkpoint | None = None
    """On begin: the windows and states that the engine starts from, to be read only; None where the model has none."""
    checkpoints: Annotated[tuple[Checkpoint, ...], Field(max_length=MAX_CHECKPOINTS)] = ()
    """On begin: windows and states that the engine is asked to write when it gets there; ascending."""
    load: tuple[WireTable, ...] = ()
    """On begin and claim: host pages that the engine copies into the room's own pages before anything reads those: `full_twin` into
    `full` from the same page on, `swa_twin` into `restore`."""
    metadata: dict[str, bytes] = Field(default_factory=dict)
    """On claim: the metadata of each writer rank, keyed by `str(rank)`."""
    amounts: Amounts = Field(default_factory=dict)
    phases_s: dict[str, float] = Field(default_factory=dict)
    traceparent: Traceparent = ""
    """On begin and claim: the room's span, to which the engine may add."""


class RoomEvent(Message, type="room_event"):
    """Pushed to every engine of the node when a room changes in a way that engines must know."""

    room: RoomId
    generation: NonNegative
    """On `refused`: the generation that the message named, or 0."""
    kind: Literal["wanted", "committed", "completed", "aborted", "failed", "cancel", "refused"]
    """wanted: decode asks for pages (adopted). committed: the room can be claimed; or, where the node owns no page of it (adopted,
    without a host pool), the room is the engine's from now on, and nothing follows. completed, aborted, failed: over, the pages are
    free again. cancel: release the claimed room soon. refused: a call that nobody waits for changed nothing (made by the link)."""
    prompt_tokens: NonNegative = 0
    prefix_tokens: NonNegative = 0
    """As in Pages."""
    computed_tokens: NonNegative = 0
    """As in Pages."""
    max_new_tokens: NonNegative = 0
    code: str = ""
    reason: Text = ""
    metadata: dict[str, bytes] = Field(default_factory=dict)
    """On a `committed` that hands the room over: the metadata of each writer rank, keyed by `str(rank)`."""
    amounts: Amounts = Field(default_factory=dict)
    phases_s: dict[str, float] = Field(default_factory=dict)


class Detached(Message, type="detached"):
    """Pushed to an engine whose device memory is gone with the process that made it: let go and attach again."""

    reason: Text


NodeToEngine = Annotated[
    Accepted | Refused | Attached | Restorable | Pages | RoomEvent | Detached, Field(discriminator="type")
]

"""Messages between an engine rank and its node.

Each call has a number, which its answer repeats. The node answers calls at once; a `RoomEvent` tells later how work has ended.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbridge.core.addresses import PeerAddress
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
    NodeMemory,
    PageHashes,
    PromptDigest,
    SharedRegion,
    StreamPoint,
    Text,
    Traceparent,
    Trouble,
    WireTable,
)

# ---------------------------------------------------------------------------------------------- calls


class Call(Message):
    """A call of an engine."""

    call: Positive


class RoomCall(Call):
    """A call about a room."""

    room: RoomId


class RoomAdmission(RoomCall):
    """A call that admits a room."""

    generation: Positive = 1
    prompt_tokens: Positive


class Attach(Call, type="attach"):
    """The first call: the ranks that this engine process serves. Empty: every rank of the node."""

    role: Role
    ranks: tuple[Rank, ...] = ()
    brings_memory: bool = False
    """Adopted pools: this process has the memory of the ranks. Other engines attach only when the memory of all ranks is there."""
    features: Features = Features()


class Detach(Call, type="detach"):
    """The last call: this engine and its GPUs use no page any more. Rooms that the engine has begun or claimed and not ended fail.

    The pages of an engine that leaves without this call wait for the end of its process.
    """


class Admit(RoomAdmission, type="admit"):
    """Admit a room from the engine itself, as `POST /v1/requests` does."""

    max_new_tokens: NonNegative = 0
    page_hashes: PageHashes = b""
    namespace: Namespace = ""
    """Any namespace: an engine maps the node's pools, so it can read every prefix in them."""
    retention: Retention | None = None


class Hold(RoomAdmission, type="hold"):
    """Prefill, adopted pools: admit a room for a prompt that this engine computes or has computed, and hold its pages for decode.

    Engines of the node's other ranks say the same of the room, in any order: the first Hold admits it, the others begin it as well.
    A Hold stands for admission, Begin, Publish and Finish, as far as each is known. A refused Hold leaves nothing behind.
    """

    prompt_digest: PromptDigest = b""
    tables: tuple[WireTable, ...] | None = None
    """The pages so far, as in Begin. None: not begun yet."""
    computed_tokens: NonNegative = 0
    published_tokens: NonNegative = 0
    """As in Publish. The whole prompt also means that the engine has finished."""
    metadata: Metadata = b""


PrefillNodes = Annotated[tuple[PeerAddress, ...], Field(min_length=1, max_length=MAX_INSTANCE_NODES)]
"""The nodes of one prefill instance."""


class Fetch(RoomAdmission, type="fetch"):
    """Decode, adopted pools: admit a room that these prefill nodes hold or will hold. They hear at once that we will come for it.

    A Fetch stands for admission and Provide. A refused Fetch leaves nothing behind.
    """

    prompt_digest: PromptDigest = b""
    prefill: PrefillNodes
    held: bool = False
    """The prefill engine has said that it holds the room, so its node refuses an unknown room without a long wait."""
    tables: tuple[WireTable, ...] | None = None
    """As in Provide. None: Provide follows when the engine has pages for the room."""
    prefix_tokens: NonNegative = 0


class Begin(RoomCall, type="begin"):
    """Prefill: start to compute an admitted room."""

    prompt_tokens: Positive
    page_hashes: PageHashes = b""
    """The keys of the tokens that the engine computes. They must equal those of the room's admission."""
    end_key: EndKey = b""
    tables: tuple[WireTable, ...] = ()
    """Adopted pools: the engine's pages so far."""
    at_most: NonNegative | None = None
    """The last token at which the engine can start."""
    computed_tokens: NonNegative = 0
    """Adopted pools: the prompt's first tokens that the engine's own prefix cache has; their whole pages are only read."""
    by_gpu: bool = False
    """Whether a GPU writes asynchronously. This call then does not imply that earlier attempts at the room are quiet."""


class AskRestorable(RoomCall, type="ask_restorable"):
    """Prefill: ask at which tokens the engine of a room can start here."""


class Publish(RoomCall, type="publish"):
    """Prefill: the first `upto_token` tokens are final in memory, on all layers or on some."""

    upto_token: NonNegative
    layers: tuple[NonNegative, ...] | None = None
    tables: tuple[WireTable, ...] = ()
    """Adopted pools: further pages, behind those of the room. Pages that hold published tokens only are only read."""
    after: dict[str, StreamPoint] = Field(default_factory=dict)
    """The point in the GPU's work at which the pages are final, by `str(rank)`, for each rank whose pages a GPU writes."""


class Finish(RoomCall, type="finish"):
    """Prefill: everything is published; `metadata` (first token, log-probabilities) travels with Done."""

    metadata: Metadata = b""
    by_gpu: bool = False
    """Whether a GPU may still have to write published pages. The engine then lets go of the pages by Release."""
    checkpoints: Annotated[tuple[Positive, ...], Field(max_length=MAX_CHECKPOINTS)] = ()
    """The wanted checkpoints that were written before the last publication, in tokens."""


class Provide(RoomCall, type="provide"):
    """Decode, adopted pools: the device pages that the engine gives to a room that asked for them."""

    tables: tuple[WireTable, ...]
    prefix_tokens: NonNegative = 0
    """The prompt's first tokens whose rows these pages hold already. The rows are not sent again, and the pages are only read, so
    other rooms may have them too."""


class Claim(RoomCall, type="claim"):
    """Decode: take a committed room."""

    page_hashes: PageHashes = b""
    """The keys of the tokens of the engine's request. They must equal those of the room's admission."""
    end_key: EndKey = b""
    """The page of this key, and the answer behind that page, are kept only where all engines state the same key."""


class Loaded(RoomCall, type="loaded"):
    """On every rank of this engine, the room's own pages have everything that the answer to Begin or Claim said to load."""

    generation: Positive
    bytes: NonNegative = 0
    """The bytes of all ranks of this engine."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """The copying time of the slowest rank."""


class Extend(RoomCall, type="extend"):
    """Decode: the request will hold `tokens` tokens in all. Reserve the missing pages and return their tables."""

    tokens: Positive


class SparseRows(FrozenModel):
    """The work of sparse decode for a request, in rows over all layers of a rank."""

    hit: NonNegative = 0
    """Distinct rows of each step that were in a hot slot, without rows of the ring."""
    loaded: NonNegative = 0
    """Selected rows that were loaded from the host."""
    preloaded: NonNegative = 0
    """Rows that were loaded at the request's admission to the hot buffer."""
    backed_up: NonNegative = 0
    """New rows that were written to the host."""


class Release(RoomCall, type="release"):
    """Decode: the request is over, and its pages can be used again. Prefill: the engine's GPU is through with a finished room."""

    generation: NonNegative = 0
    """On prefill, the attempt that was finished."""
    valid_tokens: NonNegative = 0
    """On decode: tokens, of the prompt and fed after it, of which the pages hold all rows. 0: not stated."""
    page_hashes: PageHashes = b""
    """On decode: the keys of all whole pages of these tokens."""
    sparse: SparseRows | None = None
    """On decode with a hot buffer."""


class AbortRoom(RoomCall, type="abort_room"):
    """Either side: stop this room."""

    reason: Text
    load_failed: bool = False
    """Whether the engine could not load the pages that the answer to Begin or Claim named."""
    again: bool = False
    """On prefill: whether the engine computes the prompt again, for the room's next generation. This one fails as `withdrawn`."""


_OfPrefill = Hold | AskRestorable | Begin | Publish | Finish
_OfDecode = Fetch | Provide | Claim | Extend
_OfEither = Attach | Detach | Admit | Loaded | Release | AbortRoom | Heartbeat
EngineToNode = Annotated[_OfPrefill | _OfDecode | _OfEither, Field(discriminator="type")]

# ---------------------------------------------------------------------------------------------- answers and events


class Answer(Message):
    """The answer to the call of that number."""

    call: Positive


class Accepted(Answer, type="accepted"):
    """The node has carried out the call."""


class Refused(Answer, Trouble, type="refused"):
    """The node has not carried out the call."""

    retry_after_s: float = 0.0


class Attached(Answer, NodeMemory, type="attached"):
    """The answer to Attach: the memory of the engine, and where it is."""

    instance: Name
    incarnation: Name
    model_identity: ModelIdentity | None = None
    """The model that the node states; page keys begin with it."""
    ranks: tuple[Rank, ...]
    layers: dict[str, tuple[int, ...]]
    """The global layer ids of each rank, by `str(rank)`."""
    device: dict[str, tuple[SharedRegion, ...]] = Field(default_factory=dict)
    """The device regions of each rank, by `str(rank)`; adopted ranks have none."""
    features: Features = Features()


class Restorable(Answer, type="restorable"):
    """The answer to AskRestorable: the tokens at which the engine can start, ascending, from 0."""

    tokens: Annotated[tuple[NonNegative, ...], Field(max_length=MAX_RESTORABLE)]


class Checkpoint(FrozenModel):
    """Pages of windows and states as they are after exactly this many tokens of a prompt."""

    tokens: Positive
    table: WireTable


class RoomReport(Message):
    """A room as engines hear of it."""

    room: RoomId
    generation: NonNegative
    prompt_tokens: NonNegative = 0
    prefix_tokens: NonNegative = 0
    """Tokens that decode held already; they are not sent."""
    computed_tokens: NonNegative = 0
    """On prefill: the token at which the engine starts to compute."""
    metadata: dict[str, bytes] = Field(default_factory=dict)
    """The metadata of each writer rank, by `str(rank)`, when decode's engine gets the room."""
    amounts: Amounts = Field(default_factory=dict)
    phases_s: dict[str, float] = Field(default_factory=dict)


class Pages(Answer, RoomReport, type="pages"):
    """The answer to Begin, Claim and Extend: the tables of a room."""

    generation: Positive
    prompt_tokens: Positive
    host_tokens: NonNegative = 0
    """The number of the last cached tokens that are in host memory only; `load` says how to copy them."""
    tables: tuple[WireTable, ...]
    restore: Checkpoint | None = None
    """On begin: the windows and states from which the engine starts, and which it only reads. None: the model has none."""
    checkpoints: Annotated[tuple[Checkpoint, ...], Field(max_length=MAX_CHECKPOINTS)] = ()
    """On begin: windows and states that the engine is asked to write when it gets there; ascending."""
    load: tuple[WireTable, ...] = ()
    """On begin and claim: host pages that the engine copies into the room's own pages before anything reads these: `full_twin` into
    `full` from the same page on, `swa_twin` into `restore`."""
    traceparent: Traceparent = ""
    """On begin and claim: the room's span, to which the engine may add."""


class RoomEvent(RoomReport, type="room_event"):
    """Pushed to every engine of the node when a room changes in a way that engines must know.

    wanted: decode asks for pages (adopted). committed: the room can be claimed; where the node owns no page of it (adopted, without
    a host pool), the room is the engine's from now on, and nothing follows. completed, aborted, failed: over, the pages are free
    again. cancel: release the claimed room soon. refused: a call whose answer nobody awaits changed nothing (made by the link). On
    `refused`, `generation` is the one that the call named, or 0.
    """

    kind: Literal["wanted", "committed", "completed", "aborted", "failed", "cancel", "refused"]
    max_new_tokens: NonNegative = 0
    code: str = ""
    reason: Text = ""


class Detached(Message, type="detached"):
    """Pushed to an engine whose device memory has ended with the process that made it: let go and attach again."""

    reason: Text


NodeToEngine = Annotated[
    Accepted | Refused | Attached | Restorable | Pages | RoomEvent | Detached, Field(discriminator="type")
]

"""What an engine rank and its node say to each other.

Every call carries a number that its answer repeats. Calls are answered at once: what takes long is told later by a `RoomEvent`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, Rank, Role, RoomId
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.prefixes import ModelIdentity, Namespace, Retention
from kvbridge.core.wire.features import Features
from kvbridge.core.wire.messages import (
    MAX_CHECKPOINTS,
    MAX_INSTANCE_NODES,
    MAX_RESTORABLE,
    EndKey,
    Heartbeat,
    Metadata,
    Name,
    PageHashes,
    PromptDigest,
    Text,
    Traceparent,
    WireTable,
)
from kvbridge.core.wire.shared_memory import SharedRegion, StreamPoint

# ---------------------------------------------------------------------------------------------- calls


class Call(FrozenModel):
    """What every call carries."""

    call: Positive


class Attach(Call):
    """First call: which ranks this engine process serves (empty: every rank of the node)."""

    type: Literal["attach"] = "attach"
    role: Role
    ranks: tuple[Rank, ...] = ()
    features: Features = Features()


class Detach(Call):
    """Last call: this engine's GPUs are through with every page, and it uses none any more.

    What it has begun or claimed and not ended fails. Pages of an engine that leaves without this call wait for the end of its
    process.
    """

    type: Literal["detach"] = "detach"


class Admit(Call):
    """Admit a room from the engine itself, as `POST /v1/requests` does."""

    type: Literal["admit"] = "admit"
    room: RoomId
    generation: Positive = 1
    prompt_tokens: Positive
    max_new_tokens: NonNegative = 0
    page_hashes: PageHashes = b""
    namespace: Namespace = ""
    """Any: an engine maps the node's pools, so it can read every prefix in them."""
    retention: Retention | None = None


class Hold(Call):
    """Prefill, adopted pools: admit a room for a prompt that this engine computes or has computed, and hold its pages for decode.

    In one message what admission, Begin, Publish and Finish say, as far as it is known. What is refused leaves nothing behind.
    """

    type: Literal["hold"] = "hold"
    room: RoomId
    generation: Positive = 1
    prompt_tokens: Positive
    prompt_digest: PromptDigest = b""
    tables: tuple[WireTable, ...] | None = None
    """The pages so far, as in Begin; none: not begun yet."""
    computed_tokens: NonNegative = 0
    published_tokens: NonNegative = 0
    """As in Publish; the whole prompt: finished, too."""
    metadata: Metadata = b""


PrefillNodes = Annotated[tuple[PeerAddress, ...], Field(min_length=1, max_length=MAX_INSTANCE_NODES)]
"""The nodes of one prefill instance."""


class Fetch(Call):
    """Decode, adopted pools: admit a room that these prefill nodes hold or will hold. They hear at once that we will come for it.

    In one message what admission and Provide say. What is refused leaves nothing behind.
    """

    type: Literal["fetch"] = "fetch"
    room: RoomId
    generation: Positive = 1
    prompt_tokens: Positive
    prompt_digest: PromptDigest = b""
    prefill: PrefillNodes
    held: bool = False
    """The prefill engine has said that it holds the room: one that its node does not know is refused without a long wait."""
    tables: tuple[WireTable, ...] | None = None
    """As in Provide; none: it follows when the engine has pages for the room."""
    prefix_tokens: NonNegative = 0


class Begin(Call):
    """Prefill: start to compute an admitted room. Adopted pools name their pages here, those that there are."""

    type: Literal["begin"] = "begin"
    room: RoomId
    prompt_tokens: Positive
    page_hashes: PageHashes = b""
    """The keys of the tokens that the engine computes, which have to be those that the room was admitted with."""
    end_key: EndKey = b""
    """Of the same tokens."""
    tables: tuple[WireTable, ...] = ()
    at_most: NonNegative | None = None
    """The engine is to start at no more than so many tokens."""
    computed_tokens: NonNegative = 0
    """Adopted pools: tokens from the prompt's start that the engine's own prefix cache holds; pages of only these are only read."""
    by_gpu: bool = False
    """A GPU writes for this engine, so that with this call it has not let go of an earlier attempt at the room."""


class AskRestorable(Call):
    """Prefill: at which tokens can the engine of a room start here?"""

    type: Literal["ask_restorable"] = "ask_restorable"
    room: RoomId


class Publish(Call):
    """Prefill: the first `upto_token` tokens are final in memory, on all layers or on some."""

    type: Literal["publish"] = "publish"
    room: RoomId
    upto_token: NonNegative
    layers: tuple[NonNegative, ...] | None = None
    tables: tuple[WireTable, ...] = ()
    """Adopted pools: further pages of the room, behind those that it has; only read where they hold published tokens only."""
    after: dict[str, StreamPoint] = Field(default_factory=dict)
    """For each rank whose pages a GPU writes, keyed by `str(rank)`: where in its work they are final."""


class Finish(Call):
    """Prefill: everything is published; `metadata` (first token, log-probabilities) travels with Done."""

    type: Literal["finish"] = "finish"
    room: RoomId
    metadata: Metadata = b""
    by_gpu: bool = False
    """A GPU may still have to write what was published: the engine lets go of the pages by Release."""
    checkpoints: Annotated[tuple[Positive, ...], Field(max_length=MAX_CHECKPOINTS)] = ()
    """Of the checkpoints that were wanted, those that were written before the last publication, in tokens."""


class Provide(Call):
    """Decode, adopted pools: the device pages that the engine gives to a room that asked for them."""

    type: Literal["provide"] = "provide"
    room: RoomId
    tables: tuple[WireTable, ...]
    prefix_tokens: NonNegative = 0
    """Tokens from the start of the prompt whose rows are in these pages already: they are not sent again, and their pages are only
    read, so that other rooms may have them too."""


class Claim(Call):
    """Decode: take a committed room."""

    type: Literal["claim"] = "claim"
    room: RoomId
    page_hashes: PageHashes = b""
    """The keys of the tokens of the engine's request, which have to be those that the room was admitted with."""
    end_key: EndKey = b""
    """Of the same tokens. The page that it is of, and the answer behind it, are kept only where all engines state the same one."""


class Loaded(Call):
    """What the answer to begin or claim said is to be loaded is in the room's own pages, on every rank of this engine."""

    type: Literal["loaded"] = "loaded"
    room: RoomId
    generation: Positive
    bytes: NonNegative = 0
    """Over all these ranks."""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """While the slowest of them was copying."""


class Extend(Call):
    """Decode: the request will hold `tokens` tokens in all; reserve what is missing and return the tables for it."""

    type: Literal["extend"] = "extend"
    room: RoomId
    tokens: Positive


class SparseRows(FrozenModel):
    """What sparse decode did for a request, in rows over all layers of a rank."""

    hit: NonNegative = 0
    """Selected rows that were in a hot slot, each step's distinct ones; rows of the ring are not counted."""
    loaded: NonNegative = 0
    """Selected rows that had to be loaded from the host."""
    preloaded: NonNegative = 0
    """Rows that were loaded when the request was admitted to the hot buffer."""
    backed_up: NonNegative = 0
    """New rows that were written to the host."""


class Release(Call):
    """Decode: the request is over, its pages can be used again. Prefill: the engine's GPU is through with a finished room."""

    type: Literal["release"] = "release"
    room: RoomId
    generation: NonNegative = 0
    """On prefill, the attempt that was finished."""
    valid_tokens: NonNegative = 0
    """On decode: of so many tokens, the prompt's and those that were fed after it, all rows are in the pages. 0: not said."""
    page_hashes: PageHashes = b""
    """On decode: the keys of all whole pages of those tokens."""
    sparse: SparseRows | None = None
    """On decode with a hot buffer: what it did for the request."""


class AbortRoom(Call):
    """Either side: stop this room."""

    type: Literal["abort_room"] = "abort_room"
    room: RoomId
    reason: Text
    load_failed: bool = False
    """Since what the answer to begin or claim said is to be loaded could not be."""
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


class Answer(FrozenModel):
    """What every answer carries."""

    call: Positive


class Accepted(Answer):
    """The call was carried out; there is nothing to tell."""

    type: Literal["accepted"] = "accepted"


class Refused(Answer):
    """The call was not carried out."""

    type: Literal["refused"] = "refused"
    code: Name
    message: Text
    retry_after_s: float = 0.0


class Attached(Answer):
    """Everything that an engine needs to find its memory."""

    type: Literal["attached"] = "attached"
    instance: Name
    incarnation: Name
    geometry: ModelGeometry
    model_identity: ModelIdentity | None = None
    """Which model the node says it holds; page keys begin with it."""
    ranks: tuple[Rank, ...]
    layers: dict[str, tuple[int, ...]]
    """The global layer ids of each rank, keyed by `str(rank)`."""
    pp_size: Positive
    tp_size: Positive
    device: dict[str, tuple[SharedRegion, ...]] = Field(default_factory=dict)
    """The device regions of each rank, keyed by `str(rank)`; missing for adopted ranks."""
    host: tuple[SharedRegion, ...] = ()
    """The node's host pool."""
    twins: tuple[SharedRegion, ...] = ()
    """The node's twins of device pages, from which an engine loads what its rooms are told to."""
    copy_backend: Name = "kernel"
    """What copies them (`tier.host.backend`)."""
    features: Features = Features()


class Restorable(Answer):
    """Where the engine of a room can start: 0, and as many tokens as its node holds to go on from."""

    type: Literal["restorable"] = "restorable"
    tokens: Annotated[tuple[NonNegative, ...], Field(max_length=MAX_RESTORABLE)]
    """Ascending."""


class Checkpoint(FrozenModel):
    """Pages for windows and states as they are after exactly so many tokens of a prompt."""

    tokens: Positive
    table: WireTable


class Pages(Answer):
    """The tables of a room, for begin, claim and extend."""

    type: Literal["pages"] = "pages"
    room: RoomId
    generation: Positive
    prompt_tokens: Positive
    prefix_tokens: NonNegative = 0
    """What decode held already, and is not sent."""
    computed_tokens: NonNegative = 0
    """On prefill: where the engine starts to compute."""
    host_tokens: NonNegative = 0
    """Of what this node held of the prompt, the last so many tokens, which `load` is about."""
    tables: tuple[WireTable, ...]
    restore: Checkpoint | None = None
    """On begin: the windows and states that the engine starts from, to be read only; none where the model has none."""
    checkpoints: Annotated[tuple[Checkpoint, ...], Field(max_length=MAX_CHECKPOINTS)] = ()
    """On begin: windows and states that the engine is asked to write when it stands there; ascending."""
    load: tuple[WireTable, ...] = ()
    """On begin and claim: pages of the node's host memory that the engine copies into the room's own pages, before anything reads
    them: of `full_twin` into those of `full` from the same page on, of `swa_twin` into those of `restore`."""
    metadata: dict[str, bytes] = Field(default_factory=dict)
    """On claim: what each writer rank sent along, keyed by `str(rank)`."""
    amounts: Amounts = Field(default_factory=dict)
    phases_s: dict[str, float] = Field(default_factory=dict)
    traceparent: Traceparent = ""
    """On begin and claim: the room's span, which the engine may go on with; empty when there is no trace."""


class RoomEvent(FrozenModel):
    """Pushed to every engine of the node when a room changes in a way that an engine must know."""

    type: Literal["room_event"] = "room_event"
    room: RoomId
    generation: NonNegative
    """Of a refused message, the one that it named; 0: it named none."""
    kind: Literal["wanted", "committed", "completed", "aborted", "failed", "cancel", "refused"]
    """wanted: decode asks for pages (adopted). committed: can be claimed, or is the engine's from now on where no page of it is the
    node's (adopted, without a host pool): then nothing follows. completed, aborted, failed: over, the pages are free again. cancel:
    the claimed room is to be released soon. refused: a message whose answer nobody waits for changed nothing (made by the link)."""
    prompt_tokens: NonNegative = 0
    prefix_tokens: NonNegative = 0
    """What decode held already, and is not sent."""
    computed_tokens: NonNegative = 0
    """On prefill: where the engine starts to compute."""
    max_new_tokens: NonNegative = 0
    code: str = ""
    reason: Text = ""
    metadata: dict[str, bytes] = Field(default_factory=dict)
    """On committed, where the room is handed over by this event: what each writer rank sent along, keyed by `str(rank)`."""
    amounts: Amounts = Field(default_factory=dict)
    phases_s: dict[str, float] = Field(default_factory=dict)


class Detached(FrozenModel):
    """Pushed to an engine whose device memory is gone with the process that made it. It is to let go and attach again."""

    type: Literal["detached"] = "detached"
    reason: Text


NodeToEngine = Annotated[
    Accepted | Refused | Attached | Restorable | Pages | RoomEvent | Detached, Field(discriminator="type")
]

"""What the demo and its engine processes say to one another.

Owns: the job that all of them read, the orders that they take, the events that they report. Must not know: how these
travel, what an engine does with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter

from kvbridge.core.geometry.components import Encoding
from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.core.ids import FrozenModel, NonNegative, Positive, RoomId, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.testbed.engines.channel import Channel
from kvbridge.testbed.engines.messages import Attached, Computed, EngineJob, Failed, Finished, RoomEnded

Pages = dict[str, tuple[int, ...]]
"""Page ids by index space."""


Text = tuple[NonNegative, ...]
"""Token ids."""


def page_ids(tables: Tables) -> Pages:
    """Return the page ids of a request by the name of their space."""
    return {space.value: tuple(table.ids.tolist()) for space, table in tables.items()}


class Job(EngineJob):
    """The same for every process, so that they compute the same."""

    hf_config: Path
    encoding: Encoding
    requests: Positive
    """So many, numbered from 1."""
    steps: Positive
    device: str = "cpu"
    """Where the models compute, as torch names it."""
    sparse: SparseSettings | None = None
    """The hot buffer that decode uses; None: decode keeps whole caches."""
    logits_dir: Path

    def logits_file(self, who: str, number: int) -> Path:
        """Where a process puts a request's logits: float32 [positions, vocabulary] as .npy."""
        return self.logits_dir / f"{number:04d}-{who}.npy"

    def trace_file(self, who: str, number: int) -> Path:
        """Where a process puts the trace of a request's decode steps: .npz."""
        return self.logits_dir / f"{number:04d}-{who}-trace.npz"


class SparseFigures(FrozenModel):
    """What sparse decode did for one request, all C4 layers together. A selected row is one row of one layer in one step."""

    selected: NonNegative
    in_ring: NonNegative
    """Selected rows that were in the ring of new rows."""
    in_hot_slots: NonNegative
    """Selected rows that were in hot slots already."""
    loaded: NonNegative
    """Selected rows that came from the host pool."""
    evicted: NonNegative
    """Rows that gave way to these."""
    backed_up: NonNegative
    """New rows that went to the host pool, by whole pages."""
    rows: NonNegative
    """Of the context in the end, in one layer."""


class FirstToken(FrozenModel):
    """What the prefill engine gives to `finish`, and the decode engine gets with the claim."""

    number: Positive
    first_token: NonNegative
    weights: str
    """Digest of the model that computed the prompt; decode refuses another one's cache."""


# ---------------------------------------------------------------------------------------------- orders


class Attach(FrozenModel):
    """The daemons are ready: attach to yours."""

    type: Literal["attach"] = "attach"


class Serve(FrozenModel):
    """Prefill: compute this prompt into this room. Decode: this is what the room will bring."""

    type: Literal["serve"] = "serve"
    number: Positive
    room: RoomId
    prompt: Text
    page_keys: bool
    """Whether the room has keys: whoever begins or claims it has to show those of the prompt."""


class Compute(FrozenModel):
    """The model alone: compute this prompt and generate."""

    type: Literal["compute"] = "compute"
    number: Positive
    prompt: Text
    previous: NonNegative = 0
    """The request whose prompt and answer this one begins with; 0: none."""
    kept_tokens: NonNegative = 0
    """So much of it decode had kept from then, rows of the answer included, and did not take from prefill."""


# ---------------------------------------------------------------------------------------------- events


class Loaded(FrozenModel):
    """The model is in memory."""

    type: Literal["loaded"] = "loaded"
    weights: str
    versions: dict[str, str]


class Began(FrozenModel):
    """Prefill: a room has begun, with these pages."""

    type: Literal["began"] = "began"
    number: Positive
    pages: Pages
    computed_tokens: NonNegative
    """Where prefill started to compute."""
    host_tokens: NonNegative = 0
    """Of these, what was loaded from host memory."""


class Claimed(FrozenModel):
    """Decode: a request has arrived."""

    type: Literal["claimed"] = "claimed"
    number: Positive
    room: RoomId
    pages: Pages
    prefix_tokens: NonNegative
    """What decode held already."""
    host_tokens: NonNegative = 0
    """Of these, what was loaded from host memory."""
    amounts: Amounts
    phases_s: dict[str, float]
    claimed_s: float
    """On the machine's monotonic clock."""


class Stepped(FrozenModel):
    """Decode or the model alone: so many tokens were generated since the last time."""

    type: Literal["stepped"] = "stepped"
    steps: Positive


class Decoded(FrozenModel):
    """Decode or the model alone: a request is through, its logits are written."""

    type: Literal["decoded"] = "decoded"
    number: Positive
    tokens: tuple[int, ...]
    """The tokens that were fed, the first of them the prompt's."""
    sparse: SparseFigures | None = None
    """Decode, when it was sparse."""
    mean_kl: float | None = None
    """The model alone, when rows are quantised or decode is sparse: divergence from the model as it is, in nats a step."""
    top1_agreement: float | None = None
    share_of_rounding: float | None = None
    """The model alone, when decode is sparse: its largest difference from dense attention, as a share of what rounding explains."""


Event = (
    Loaded | Attached | Began | Computed | Finished | Claimed | Stepped | Decoded | RoomEnded | Failed
)  # fmt: skip
Order: TypeAlias = Attach | Serve | Compute
ORDERS: TypeAdapter[Order] = TypeAdapter(Annotated[Order, Field(discriminator="type")])
EVENTS: TypeAdapter[Any] = TypeAdapter(Annotated[Event, Field(discriminator="type")])


DemoChannel: TypeAlias = Channel[Order]

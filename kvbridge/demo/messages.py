"""What the demo and its processes with a model tell one another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbridge.core.geometry.components import Encoding
from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.core.ids import Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.demo.prompts import Text

Pages = dict[str, list[int]]
"""Page ids by index space."""
Logits = npt.NDArray[np.float32]
"""[positions, vocabulary]."""


def page_ids(tables: Tables) -> Pages:
    """Return the page ids of a request by the name of their space."""
    return {space.value: table.ids.tolist() for space, table in tables.items()}


@dataclass(frozen=True)
class Job:
    """The same for every process, so that they compute the same."""

    prefill_runtime_dir: Path
    decode_runtime_dir: Path
    model: dict[str, Any]
    """The facts of its config.json."""
    model_name: str
    encoding: Encoding
    requests: int
    """So many, numbered from 1."""
    steps: int
    chunk_tokens: int
    device: str
    """Where the models compute, as torch names it."""
    sparse: SparseSettings | None
    """The hot buffer that decode uses; None: decode keeps whole caches."""


@dataclass(frozen=True)
class Attach:
    """An order: the daemons are ready, attach to yours."""


@dataclass(frozen=True)
class Serve:
    """An order. Prefill: compute this prompt into this room. Decode: this is what the room will bring."""

    number: int
    room: int
    prompt: Text
    page_keys: bool
    """Whether the room has keys: whoever begins or claims it has to show those of the prompt."""


@dataclass(frozen=True)
class Compute:
    """An order to the model alone: compute this prompt and generate."""

    number: int
    prompt: Text
    previous: int = 0
    """The request whose prompt and answer this one begins with; 0: none."""
    kept_tokens: int = 0
    """So much of it decode had kept from then, rows of the answer included, and did not take from prefill."""


@dataclass(frozen=True)
class Loaded:
    """The model is in memory."""

    weights: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Prefilled:
    """Prefill has computed and published a prompt."""

    number: int
    pages: Pages
    computed_tokens: int
    """Where prefill started to compute."""
    host_tokens: int
    """Of these, what was loaded from host memory."""
    finished_s: float
    """On the machine's monotonic clock, just before `finish`."""
    logits: Logits


@dataclass(frozen=True)
class SparseFigures:
    """What sparse decode did for one request, all C4 layers together. A selected row is one row of one layer in one step."""

    selected: int
    in_hot_slots: int
    """Selected rows that were in hot slots already."""
    loaded: int
    """Selected rows that came from the host pool; the others were in the ring of new rows."""
    rows: int
    """Of the context in the end, in one layer."""


@dataclass(frozen=True)
class Decoded:
    """Decode has claimed a request and generated its answer."""

    number: int
    pages: Pages
    prefix_tokens: int
    """What decode held already."""
    host_tokens: int
    """Of these, what was loaded from host memory."""
    amounts: Amounts
    claimable_s: float
    """When the room could be claimed, on the machine's monotonic clock."""
    tokens: Text
    """The tokens that were fed, the first of them the prompt's."""
    logits: Logits
    sparse: SparseFigures | None


@dataclass(frozen=True)
class Computed:
    """The model alone has computed a request."""

    number: int
    logits: Logits
    share_of_rounding: float | None = None
    """When decode is sparse: the largest difference from dense attention, as a share of what rounding explains."""

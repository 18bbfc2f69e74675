"""Whether two processes computed the very same logits, and if not, what was the first that they saw differently.

Owns: the comparison and its words. Must not know: which processes, how the cache got from one to the other, torch.

There is no tolerance: `reference` says why none is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import FrozenModel, NonNegative, Positive
from kvbridge.testbed.demo.trace import Trace

Logits = npt.NDArray[np.float32]
"""[positions, vocabulary]."""


class Comparison(FrozenModel):
    """One request: what came over the bridge against the model alone."""

    number: Positive
    positions: Positive
    """All that were compared: the prompt's last one and every decoded one."""
    first_difference: NonNegative | None = None
    """The first position with another logit, or at which a layer held or read other numbers; 0 is the prompt's."""
    component: str | None = None
    """What the two held or read differently there, first of all; None: nothing that the trace sees."""
    largest_difference: float = 0.0
    """Of all logits of all positions."""

    @property
    def equal(self) -> bool:
        """Whether every logit and all that was read for it are the same bits."""
        return self.first_difference is None

    def in_words(self) -> str:
        """Say what differs, for a person."""
        if self.equal:
            return f"request {self.number}: equal"
        where = "the prompt's own logits" if self.first_difference == 0 else f"decode step {self.first_difference}"
        what = f" in {self.component}" if self.component else ""
        return f"request {self.number}: first at {where}{what}, logits by up to {self.largest_difference:.3g}"


def compare(number: int, ours: Logits, alone: Logits, *, traces: tuple[Trace, Trace]) -> Comparison:
    """Compare logits of one request, and the traces (ours, alone) of its decode steps. Not-a-number equals nothing.

    Position 0 is the prompt's; the steps of the traces are the positions after it. Raises InvalidInputError when the two sides
    have other shapes, or nothing in them.
    """
    if ours.shape != alone.shape or ours.ndim != 2 or not ours.size or ours.dtype != alone.dtype:
        raise InvalidInputError(
            f"request {number}: logits of {ours.dtype} {ours.shape} cannot be compared with {alone.dtype} {alone.shape}"
        )
    if len(ours) != 1 + len(traces[0].sums):
        raise InvalidInputError(f"request {number}: a trace of {len(traces[0].sums)} steps for {len(ours)} positions")
    with np.errstate(invalid="ignore"):
        apart = np.abs(ours - alone)
    positions = [int(position) for position in np.flatnonzero((ours != alone).any(axis=1))[:1]]
    read = traces[0].first_difference(traces[1])
    if read is not None:
        positions.append(1 + read.step)
    first = min(positions, default=None)
    return Comparison(
        number=number,
        positions=len(ours),
        first_difference=first,
        component=read.component if read is not None and first == 1 + read.step else None,
        largest_difference=float(np.where(ours == alone, 0.0, apart).max()),
    )


def read_logits(*files: Path) -> Logits:
    """Return the logits in .npy files, joined by position."""
    return np.concatenate([np.load(file, allow_pickle=False) for file in files])


def verdict_line(comparisons: Sequence[Comparison], *, reference: str) -> str:
    """Return the one line that says how it ended. `reference` names what was compared with."""
    differing = [comparison for comparison in comparisons if not comparison.equal]
    if comparisons and not differing:
        return f"EQUAL: {len(comparisons)} of {len(comparisons)} requests gave the very logits of {reference}"
    first = f" ({differing[0].in_words()})" if differing else ""
    return f"DIFFERENT: {len(differing)} of {len(comparisons)} requests gave other logits than {reference}{first}"

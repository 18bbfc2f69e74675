"""Whether two processes computed the very same logits.

Owns: the comparison and its words. Must not know: which processes, how the cache got from one to the other, torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import FrozenModel, NonNegative, Positive

Logits = npt.NDArray[np.float32]
"""[positions, vocabulary]."""


class Comparison(FrozenModel):
    """One request: what came over the bridge against the model alone."""

    number: Positive
    positions: Positive
    """Compared: the prompt's last one and every decoded one."""
    first_difference: NonNegative | None = None
    """The first position whose logits differ; 0 is the prompt's."""
    largest_difference: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether every logit is the same number."""
        return self.first_difference is None

    def in_words(self) -> str:
        """Say what differs, for a person."""
        if self.equal:
            return f"request {self.number}: equal"
        where = "the prompt's own logits" if self.first_difference == 0 else f"decode step {self.first_difference}"
        return f"request {self.number}: first at {where}, by up to {self.largest_difference:.3g}"


def compare(number: int, ours: Logits, alone: Logits) -> Comparison:
    """Compare logits of one request. Not-a-number equals nothing, itself neither.

    Raises InvalidInputError when they have different shapes or nothing in them.
    """
    if ours.shape != alone.shape or ours.ndim != 2 or not ours.size or ours.dtype != alone.dtype:
        raise InvalidInputError(
            f"request {number}: logits of {ours.dtype} {ours.shape} cannot be compared with {alone.dtype} {alone.shape}"
        )
    different = np.flatnonzero((ours != alone).any(axis=1))
    if not len(different):
        return Comparison(number=number, positions=len(ours))
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(ours - alone).max())
    return Comparison(
        number=number, positions=len(ours), first_difference=int(different[0]), largest_difference=largest
    )


def read_logits(*files: Path) -> Logits:
    """Return the logits in .npy files, joined by position."""
    return np.concatenate([np.load(file, allow_pickle=False) for file in files])


def verdict_line(comparisons: Sequence[Comparison], *, reference: str) -> str:
    """Return the one line that says how it ended. `reference` names what was compared with."""
    equal = sum(comparison.equal for comparison in comparisons)
    if equal == len(comparisons) and comparisons:
        return f"EQUAL: {equal} of {len(comparisons)} requests gave the very logits of {reference}"
    differing = [comparison for comparison in comparisons if not comparison.equal]
    first = f" ({differing[0].in_words()})" if differing else ""
    return f"DIFFERENT: {len(differing)} of {len(comparisons)} requests gave other logits than {reference}{first}"

"""Whether two processes computed the same logits: the very same, or the same tokens and logits within a tolerance.

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
    """Compared: the prompt's last one and every decoded one, up to a tie."""
    tied_step: NonNegative | None = None
    """The decode step from which the two select other rows, for their scores are as near as rounding; see `ties`."""
    tolerance: float = 0.0
    """Up to so much a logit may differ; 0: they must be the same number."""
    first_difference: NonNegative | None = None
    """The first position whose logits differ by more than that, or whose most likely token is another; 0 is the prompt's."""
    largest_difference: float = 0.0
    """Of all positions, within the tolerance or not."""

    @property
    def equal(self) -> bool:
        """Whether every logit is the same number, or near enough, and every token the same."""
        return self.first_difference is None

    def in_words(self) -> str:
        """Say what differs, for a person."""
        if self.equal:
            return f"request {self.number}: equal"
        where = "the prompt's own logits" if self.first_difference == 0 else f"decode step {self.first_difference}"
        return f"request {self.number}: first at {where}, by up to {self.largest_difference:.3g}"


def compare(
    number: int, ours: Logits, alone: Logits, *, tolerance: float = 0.0, tied_step: int | None = None
) -> Comparison:
    """Compare logits of one request. Not-a-number equals nothing, itself neither.

    With a tolerance the tokens (the most likely one of each position) must be the same all the same. What follows from
    a tie in step `tied_step` is left out: position 0 is the prompt's, so that is all from `tied_step` + 1. Raises
    InvalidInputError when they have different shapes or nothing in them.
    """
    if ours.shape != alone.shape or ours.ndim != 2 or not ours.size or ours.dtype != alone.dtype:
        raise InvalidInputError(
            f"request {number}: logits of {ours.dtype} {ours.shape} cannot be compared with {alone.dtype} {alone.shape}"
        )
    if tied_step is not None:
        ours, alone = ours[: tied_step + 1], alone[: tied_step + 1]
    with np.errstate(invalid="ignore"):
        apart = np.abs(ours - alone)
    near = (ours == alone) | (apart <= tolerance)
    different = np.flatnonzero(~near.all(axis=1) | (ours.argmax(axis=1) != alone.argmax(axis=1)))
    return Comparison(
        number=number,
        positions=len(ours),
        tied_step=tied_step,
        tolerance=tolerance,
        first_difference=int(different[0]) if len(different) else None,
        largest_difference=float(np.where(ours == alone, 0.0, apart).max()),
    )


def read_logits(*files: Path) -> Logits:
    """Return the logits in .npy files, joined by position."""
    return np.concatenate([np.load(file, allow_pickle=False) for file in files])


def verdict_line(comparisons: Sequence[Comparison], *, reference: str) -> str:
    """Return the one line that says how it ended. `reference` names what was compared with."""
    equal = sum(comparison.equal for comparison in comparisons)
    tolerance = max((comparison.tolerance for comparison in comparisons), default=0.0)
    if equal == len(comparisons) and comparisons:
        if not tolerance:
            return f"EQUAL: {equal} of {len(comparisons)} requests gave the very logits of {reference}"
        largest = max(comparison.largest_difference for comparison in comparisons)
        return (
            f"EQUAL: {equal} of {len(comparisons)} requests gave the very tokens of {reference}, and its logits within "
            f"{tolerance:.0e} (at most {largest:.1e} apart)"
        )
    differing = [comparison for comparison in comparisons if not comparison.equal]
    first = f" ({differing[0].in_words()})" if differing else ""
    return f"DIFFERENT: {len(differing)} of {len(comparisons)} requests gave other logits than {reference}{first}"

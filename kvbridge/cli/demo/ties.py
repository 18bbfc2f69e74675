"""Where two runs of a sparse model part for no reason but rounding.

Owns: the rule. Must not know: torch, where the selections come from.

An indexer takes the k rows of the highest scores. Two runs that sum in another order agree on them, except where the k-th score
and the next one are nearer than the rounding: then each may take another row, and from there on both are right and differ. A
tiny model comes near such a tie once in some thousand selections. What tells it from the work of a wrong row are the scores:
those of the two runs are still the same, but for rounding, and the last two are as near as that.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError

NEAR = 1e-5
"""Scores of sparse and dense decode in fp32 differ by some 2e-6."""


class SelectedRows(NamedTuple):
    """What one request selected in its decode steps."""

    rows: npt.NDArray[np.int32]
    """[steps, C4 layers, k], ascending; -1 where there are fewer rows than k."""
    scores: npt.NDArray[np.float32]
    """[steps, C4 layers, k + 1], falling: of the selected rows, then the best one that was not; -inf where there are fewer."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read what a process of the demo wrote."""
        with np.load(file, allow_pickle=False) as held:
            return cls(rows=held["rows"], scores=held["scores"])


def tied_step(ours: SelectedRows, alone: SelectedRows) -> int | None:
    """Return the step from which two runs select different rows, if that is for a tie; None when they agree, or for no tie.

    Looked at is the first layer that differs, since later ones follow from it. Raises InvalidInputError when the runs have other
    shapes.
    """
    if ours.rows.shape != alone.rows.shape or ours.scores.shape != alone.scores.shape:
        raise InvalidInputError(
            f"selections of shape {ours.rows.shape} cannot be compared with {alone.rows.shape}; one process did not see all steps"
        )
    differs = (ours.rows != alone.rows).any(axis=2)
    steps = np.flatnonzero(differs.any(axis=1))
    if not len(steps):
        return None
    step = int(steps[0])
    layer = int(differs[step].argmax())
    scores, others = ours.scores[step, layer], alone.scores[step, layer]
    same = np.allclose(scores, others, rtol=0, atol=NEAR)
    near = all(each[-1] + NEAR >= each[-2] > -np.inf for each in (scores, others))
    return step if same and near else None

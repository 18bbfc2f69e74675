"""What every layer of a model held and read in each decode step, as checksums: where two runs first differ.

Owns: the form, and finding the first difference. Must not know: torch, where the sums come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError


class Difference(NamedTuple):
    """Where two traces first differ."""

    step: int
    """From 0."""
    component: str


class Trace(NamedTuple):
    """One request's decode steps."""

    components: tuple[str, ...]
    """As a person reads them ("c4_kv of layer 2"), in the order in which a step computes them."""
    sums: npt.NDArray[np.uint32]
    """[steps, components]: CRC-32 of the numbers, as the model reads them."""

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read what `write` wrote."""
        with np.load(file, allow_pickle=False) as held:
            return cls(tuple(held["components"].tolist()), held["sums"])

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the steps of several, one after another."""
        return cls(parts[0].components, np.concatenate([part.sums for part in parts]))

    def write(self, file: Path) -> None:
        """Write an .npz file."""
        np.savez(file, components=np.array(self.components), sums=self.sums)

    def first_difference(self, other: Trace) -> Difference | None:
        """Return the first step that differs and its first component; None: all are the same.

        What comes later follows from that one. Raises InvalidInputError when the two have other components or steps.
        """
        if self.components != other.components or self.sums.shape != other.sums.shape:
            raise InvalidInputError(
                f"{len(self.sums)} steps of {len(self.components)} components cannot be compared with {len(other.sums)} steps of "
                f"{len(other.components)}; one process did not see all steps"
            )
        found = np.argwhere(self.sums != other.sums)
        return Difference(int(found[0, 0]), self.components[found[0, 1]]) if len(found) else None

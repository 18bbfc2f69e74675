"""A section of a request, and the plan that moves it: arrays of addresses and lengths, and the amounts by component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, RowInterval
from kvbridge.core.ids import FrozenModel, NonNegative

AddressArray = npt.NDArray[np.uint64]
IntegerArray = npt.NDArray[np.integer]

CUT_ALIGNMENT_BYTES = 4_096
"""Longer operations are cut at multiples of this from their beginning, where the limit allows."""


@dataclass(frozen=True, slots=True, eq=False)
class Operations:
    """Copies to make, in no particular order; none overlaps another's destination.

    Three one-dimensional uint64 arrays of equal length: virtual addresses in the source process and in the destination process, and
    bytes (never 0). Not written after construction.
    """

    source: AddressArray
    destination: AddressArray
    length: AddressArray

    def __post_init__(self) -> None:
        for array in (self.source, self.destination, self.length):
            if array.dtype != np.uint64 or array.shape != (self.length.size,):
                raise InvalidInputError(
                    f"operation arrays are uint64, one-dimensional and equally long, got {array.dtype} of shape {array.shape}"
                )

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        """Sum of all lengths."""
        return int(self.length.sum(dtype=np.uint64))

    def __getitem__(self, part: slice) -> Operations:
        return Operations(self.source[part], self.destination[part], self.length[part])

    def taken(self, parts: Sequence[slice]) -> Operations:
        """Return those of some parts."""
        if len(parts) == 1:
            return self[parts[0]]
        columns = (self.source, self.destination, self.length)
        return Operations(*(np.concatenate([column[:0], *(column[part] for part in parts)]) for column in columns))

    def cut(self, max_bytes: int) -> Operations:
        """Return the same copies, each cut into the fewest pieces of at most `max_bytes` that alignment allows."""
        if int(self.length.max(initial=0)) <= max_bytes:
            return self
        parts, size = cut_sizes(self.length, max_bytes)
        of = np.repeat(np.arange(len(self)), parts)
        nth = np.arange(len(of)) - np.repeat(np.cumsum(parts) - parts, parts)
        offset = (nth * size[of]).astype(np.uint64)
        length = np.minimum(size[of].astype(np.uint64), self.length[of] - offset)
        return Operations(self.source[of] + offset, self.destination[of] + offset, length)


def cut_sizes(length: IntegerArray, max_bytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return into how many pieces copies of these lengths are cut, and the size of each copy's pieces but for the last one."""
    whole = length.astype(np.int64)
    if not len(whole) or whole.max() <= max_bytes:
        return np.ones_like(whole), whole
    alignment = CUT_ALIGNMENT_BYTES if max_bytes >= CUT_ALIGNMENT_BYTES else 1
    limit = max_bytes - max_bytes % alignment
    parts = np.where(whole > max_bytes, -(-whole // limit), 1)
    aligned = -(-whole // (parts * alignment)) * alignment
    size = np.where(parts > 1, aligned, whole)
    return -(-whole // size), size


class Amount(FrozenModel):
    """The amount of one component that was planned or sent."""

    lane_rows: NonNegative = 0
    """Rows times lanes, summed over layers and destinations. They decide a commit: chunks do not change them."""
    bytes: NonNegative = 0
    """Bytes on the wire; a completed page counts with its padding."""
    operations: NonNegative = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            lane_rows=self.lane_rows + other.lane_rows,
            bytes=self.bytes + other.bytes,
            operations=self.operations + other.operations,
        )


Amounts = dict[ComponentKind, Amount]


def add_amounts(left: Amounts, right: Amounts) -> Amounts:
    """Return the sums, component by component."""
    return {kind: left.get(kind, Amount()) + right.get(kind, Amount()) for kind in left.keys() | right.keys()}


@dataclass(frozen=True, slots=True)
class Plan:
    """The copies of one rank to one peer rank for one section of one request."""

    operations: Operations
    amounts: Amounts = field(default_factory=dict)


class Section(FrozenModel):
    """The tokens [start_token, stop_token) of some layers; the last section takes windows, tails and whole rows along."""

    prompt_tokens: NonNegative
    prefix_tokens: NonNegative = 0
    """Tokens from the start that decode already holds; a multiple of the geometry's tokens_per_page."""
    start_token: NonNegative
    stop_token: NonNegative
    layers: tuple[NonNegative, ...] | None = None
    """Global layer ids, or None for every layer of the rank."""

    def added_rows(self, component: Component) -> RowInterval:
        """Return the rows that the section adds to those of its predecessors; possibly none (count 0)."""
        published = partial(
            component.published_rows, prompt_tokens=self.prompt_tokens, prefix_tokens=self.prefix_tokens
        )
        before, after = published(self.start_token), published(self.stop_token)
        return RowInterval(start=max(before.stop, after.start), stop=after.stop)

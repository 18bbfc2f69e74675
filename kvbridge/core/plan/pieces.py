"""The copies of one layer, relative to where its memory begins, and their spread over many layers.

Owns: `Pieces`, the cut at a backend's largest operation, the arithmetic of addresses.
Must not know: pages, rows, components.

Layers of one form differ in base addresses only. So everything is computed once for one layer, on arrays as long as the
layer has pieces, and only the last step, an addition into the finished arrays, is as long as the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvbridge.core.plan.operations import AddressArray, Operations
from kvbridge.core.plan.runs import IndexArray

CUT_ALIGNMENT_BYTES = 4_096
"""Longer operations are cut at multiples of this from their beginning, where the limit allows."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where pieces lie on one side, relative to a layer's base addresses."""

    extent: IndexArray | None
    """Which base address counts; None where a layer has only one."""
    offset: IndexArray
    """Bytes behind it, int64."""

    def shifted(self, index: IndexArray, offset: IndexArray) -> Places:
        """Places `offset` bytes behind those that `index` selects."""
        return Places(None if self.extent is None else self.extent[index], self.offset[index] + offset)

    def write(self, bases: AddressArray, out: AddressArray) -> None:
        """Write the addresses for every layer of `bases`, shape (layers, extents), to `out`, shape (layers, pieces)."""
        offset = self.offset.view(np.uint64)
        if self.extent is None:
            np.add(bases, offset, out=out)
        else:
            np.take(bases, self.extent, axis=1, out=out, mode="clip")
            out += offset


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Copies of one layer: contiguous on both sides, int64 arrays of equal length."""

    source: Places
    destination: Places
    length: IndexArray

    def __len__(self) -> int:
        return len(self.length)

    def cut(self, max_bytes: int) -> Pieces:
        """Return the same copies in pieces of at most `max_bytes`.

        What is too long is cut into the fewest pieces that alignment allows, all but the last of one size.
        """
        if not len(self) or self.length.max() <= max_bytes:
            return self
        alignment = CUT_ALIGNMENT_BYTES if max_bytes >= CUT_ALIGNMENT_BYTES else 1
        limit = max_bytes - max_bytes % alignment
        parts = np.where(self.length > max_bytes, -(-self.length // limit), 1)
        aligned = -(-self.length // (parts * alignment)) * alignment
        size = np.where(parts > 1, aligned, self.length)
        parts = -(-self.length // size)
        index = np.repeat(np.arange(len(self)), parts)
        nth = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
        offset = nth * size[index]
        return Pieces(
            self.source.shifted(index, offset),
            self.destination.shifted(index, offset),
            np.minimum(size[index], self.length[index] - offset),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Pieces, and the base addresses of every layer that they are to be made for: uint64 of shape (layers, extents)."""

    source_bases: AddressArray
    destination_bases: AddressArray
    pieces: Pieces

    @property
    def operations(self) -> int:
        """How many operations it makes."""
        return len(self.source_bases) * len(self.pieces)

    @property
    def total_bytes(self) -> int:
        """How many bytes they move."""
        return len(self.source_bases) * int(self.pieces.length.sum())


def write_batches(batches: list[Batch]) -> Operations:
    """Write all operations of `batches`, in that order, into arrays made for them once."""
    out = np.empty((3, sum(batch.operations for batch in batches)), dtype=np.uint64)
    written = 0
    for batch in batches:
        shape = (len(batch.source_bases), len(batch.pieces))
        source, destination, length = out[:, written : written + batch.operations]
        batch.pieces.source.write(batch.source_bases, source.reshape(shape))
        batch.pieces.destination.write(batch.destination_bases, destination.reshape(shape))
        length.reshape(shape)[:] = batch.pieces.length.view(np.uint64)
        written += batch.operations
    return Operations(*out)

"""Copying scattered rows of many layers in one go, between device and host memory in either direction.

Owns: `RowCopier` in two forms that agree bit by bit: `CudaRowCopier` (`csrc/copy_rows.cu`), and `ReferenceRowCopier`, which a build
without a GPU uses. Must not know: what rows hold, which request they belong to.

Rows and pages are two operations with two names: no count of rows is ever taken for whole pages. A copier is built once for a
list of `RowPair`s, then told which rows each time: one launch for all layers and rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.kernels.copier import Copier
from kvbridge.kernels.cuda import buffers, programs, runtime
from kvbridge.kernels.places import IdPairs, RowPair, part_offsets, row_addresses
from kvbridge.kernels.reference import copy_operations

MOST_PARTS = 4
MOST_ITEMS = 1 << 31
"""The kernel counts rows times layers in 32 bits."""
MOST_WARPS = 16
"""Of a block."""
WIDTHS_BYTES = (16, 8, 4)
"""What a thread copies at once: the widest that divides everything about a part."""

_PAIR = np.dtype([("source", buffers.SIDE), ("destination", buffers.SIDE)])
"""`struct RowPair` in `csrc/copy_rows.cu`."""


class RowCopier(Copier):
    """Copies the same rows of several pairs. Each `copy` begins and ends in the order of its stream."""

    def __init__(self, pairs: Sequence[RowPair]) -> None:
        if not pairs:
            raise InvalidInputError("a row copier needs at least one pair of regions")
        self.pairs = tuple(pairs)

    @abstractmethod
    def copy(self, rows: IdPairs, *, stream: int = 0) -> None:
        """Copy these rows (ids: page * slots a page + slot, on each side with its own slots) of every pair; -1 is left out.

        Streams, ids that do not exist and CUDA graphs: as in `PageCopier.copy`.
        """


class ReferenceRowCopier(RowCopier):
    """By address on the CPU; every copy is done when `copy` returns."""

    def copy(self, rows: IdPairs, *, stream: int = 0) -> None:
        """Copy now; there is no stream."""
        del stream
        source, destination = rows.read()
        for pair in self.pairs:
            copy_rows(pair, source, destination)


def copy_rows(pair: RowPair, source: npt.NDArray[np.integer], destination: npt.NDArray[np.integer]) -> None:
    """Copy rows by their ids, in memory of this process. Raises PageOutOfBoundsError."""
    sides = ((pair.source, source, pair.source_slots), (pair.destination, destination, pair.destination_slots))
    parts = [row_addresses(memory, rows, slots, pair.row_parts_bytes) for memory, rows, slots in sides]
    for part_bytes, sources, destinations in zip(pair.row_parts_bytes, *parts, strict=True):
        copy_operations(sources, destinations, np.full(len(source), part_bytes, dtype=np.uint64))


class CudaRowCopier(RowCopier):
    """By one kernel, a warp for each row of each layer. Memory: device, or host that is registered with CUDA.

    The kernel is made for the form of the rows (parts and slots), which all pairs share. Holds their description on the device
    (64 bytes a pair).
    """

    _buffers: buffers.CopierBuffers

    def __init__(self, device: int, pairs: Sequence[RowPair], *, blocks: int = 0) -> None:
        """`blocks`: the most blocks that copy; 0 for one a multiprocessor.

        Raises UnsupportedError for rows of more than four parts, for pairs of several forms, or for addresses or strides that
        are no multiples of 4; RegistrationError for memory that the device does not reach.
        """
        super().__init__(pairs)
        compiled = source(self.pairs)
        for pair in self.pairs:
            for memory in (pair.source, pair.destination):
                for address in memory.extent_addresses:
                    buffers.is_host(device, address, what="a region of a row copy")
        self.device = device
        self._blocks = blocks or runtime.device_facts(device).multiprocessors
        self._kernel = programs.kernel(compiled, "copy_rows", device)
        table = np.zeros(len(self.pairs), dtype=_PAIR)
        self._buffers = buffers.CopierBuffers(device, self.pairs, table, what="row")

    def copy(self, rows: IdPairs, *, stream: int = 0) -> None:
        """Launch; nothing on the host waits."""
        if not rows.count:
            return
        items = rows.count * len(self.pairs)
        if items >= MOST_ITEMS:
            raise InvalidInputError(
                f"{rows.count} rows of {len(self.pairs)} layers are too many for one launch; split them"
            )
        description, state = self._buffers.addresses
        arguments = [description, len(self.pairs), state]
        arguments += [rows.source_address, rows.destination_address, rows.count, rows.count_address]
        grid = min(self._blocks, items)
        block = 32 * min(MOST_WARPS, -(-items // grid))  # no larger than it has work for
        self._kernel.launch(arguments, grid=grid, block=block, stream=stream)


def row_copier(device: int | None, pairs: Sequence[RowPair]) -> RowCopier:
    """Return the copier for a CUDA ordinal, or the reference for None, which takes memory of the CPU only."""
    return ReferenceRowCopier(pairs) if device is None else CudaRowCopier(device, pairs)


def source(pairs: Sequence[RowPair]) -> programs.Source:
    """What is compiled for pairs of one form. Raises UnsupportedError."""
    form = pairs[0]
    if any(_form(pair) != _form(form) for pair in pairs):
        raise UnsupportedError(
            "the pairs of one row copy differ in the parts of their rows or in slots; build a copier for each form"
        )
    if len(form.row_parts_bytes) > MOST_PARTS:
        raise UnsupportedError(f"rows of {len(form.row_parts_bytes)} parts; the GPU copies at most {MOST_PARTS}")
    defines = {"MOST_WARPS": MOST_WARPS, "SOURCE_SLOTS": form.source_slots, "DESTINATION_SLOTS": form.destination_slots}
    widths = _widths(pairs)
    for part in range(MOST_PARTS):
        there = part < len(widths)
        defines[f"PART{part}_BYTES"] = form.row_parts_bytes[part] if there else 0
        defines[f"PART{part}_WIDTH"] = widths[part] if there else WIDTHS_BYTES[-1]
    return programs.Source("copy_rows", tuple(defines.items()))


# ------------------------------------------------------------------------------------------- inside


def _form(pair: RowPair) -> tuple[tuple[int, ...], int, int]:
    return pair.row_parts_bytes, pair.source_slots, pair.destination_slots


def _widths(pairs: Sequence[RowPair]) -> list[int]:
    """The widest access that every address of each part allows."""
    form = pairs[0]
    parts = form.row_parts_bytes
    places = {
        number
        for pair in pairs
        for memory in (pair.source, pair.destination)
        for number in (*memory.extent_addresses, memory.page_stride_bytes)
    }
    offsets = zip(part_offsets(parts, form.source_slots), part_offsets(parts, form.destination_slots), strict=True)
    return [_widest(places | {part_bytes, *both}) for part_bytes, both in zip(parts, offsets, strict=True)]


def _widest(numbers: set[int]) -> int:
    for width in WIDTHS_BYTES:
        if not any(number % width for number in numbers):
            return width
    raise UnsupportedError(
        f"rows cannot be copied by the GPU at addresses, strides or parts that are no multiples of {WIDTHS_BYTES[-1]}: "
        f"{sorted(number for number in numbers if number % WIDTHS_BYTES[-1])}"
    )

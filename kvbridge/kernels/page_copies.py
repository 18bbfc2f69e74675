"""Copying scattered pages of many layers in one go, between device and host memory in either direction.

`CudaPageCopier` (`csrc/copy_pages.cu`) and `ReferencePageCopier` agree bit by bit. A copier is built once for a list of
`PagePair`s, then told which pages each time: one launch for all layers and pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from kvbridge.core.closing import Closing
from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError, UnsupportedError
from kvbridge.kernels.cuda import buffers, programs, runtime
from kvbridge.kernels.cuda.buffers import DeviceBytes
from kvbridge.kernels.places import IdPairs, PagePair, most_tables
from kvbridge.kernels.reference import copy_operations

MOST_TABLES = 4
"""As many as there are index spaces."""
LOADS = 4
"""Loads of 16 bytes that a thread has in flight."""
SEGMENT_BYTES = LOADS * 512
"""What a warp has in flight; pages are cut into such segments."""
THREADS = 1024
FROM_HOST_BLOCKS = 64
"""Reads of host memory need many blocks in flight; writes to it do not, and leave the device to others."""
TO_HOST_BLOCKS = 16
ALIGNMENT_BYTES = 16
MOST_ITEMS = 1 << 31
"""The kernel counts the segments of a pair in 32 bits."""

_SIDE = np.dtype(
    [
        ("first_extent", "<u8"),
        ("extents", "<u8"),
        ("page_stride", "<u8"),
        ("pages_per_extent", "<u4"),
        ("page_count", "<u4"),
    ]
)
"""`struct Side` in `csrc/copies.cuh`."""
_PAIR = np.dtype(
    [
        ("source", _SIDE),
        ("destination", _SIDE),
        ("page_bytes", "<u8"),
        ("group", "<u4"),
        ("table", "<u4"),
        ("segments", "<u4"),
        ("unused", "<u4", (3,)),
    ]
)
"""`struct PagePair` in `csrc/copy_pages.cu`."""


class PageCopier(Closing, ABC):
    """Copies pages of some pairs. Each `copy` is one step: it begins and ends in the order of its stream.

    The caller orders the copies of one copier among themselves (one stream, or events between streams).
    """

    def __init__(self, pairs: Sequence[PagePair]) -> None:
        if not pairs:
            raise InvalidInputError("a page copier needs at least one pair of regions")
        self.pairs = tuple(sorted(pairs, key=lambda pair: pair.group))
        self.tables = most_tables(self.pairs)
        """How many lists `copy` takes."""
        self.groups = tuple(sorted({pair.group for pair in self.pairs}))

    @abstractmethod
    def copy(self, lists: Sequence[IdPairs], *, stream: int = 0) -> None:
        """Copy the pages that the lists name, of every pair its table's; pages of -1 are left out.

        `stream`: handle of the stream on which it happens; the reference has none and is done when it returns. A page id that
        does not exist is never copied: the reference raises PageOutOfBoundsError, on a GPU `check` does.
        """

    @abstractmethod
    def wait_group(self, group: int, *, stream: int, sequence: int | None = None) -> None:
        """Have another stream wait until a copy is done with a group, before it is done with all.

        `sequence`: which copy, counted from 1 on; None for the latest. Call it after that `copy`; waits that overtake their copy
        never end. Needs `signals`.
        """

    def check(self) -> None:
        """Wait for all copies; raise PageOutOfBoundsError if any of them met an id that does not exist."""

    def close(self) -> None:
        """Free the copier's buffers. Its copies have ended. Harmless when closed."""

    def _check_lists(self, lists: Sequence[IdPairs]) -> None:
        if len(lists) != self.tables:
            raise InvalidInputError(f"these pages are named by {self.tables} lists, got {len(lists)}")

    def _check_group(self, group: int) -> None:
        if group not in self.groups:
            raise InvalidInputError(f"no pages are copied in group {group}; there are {self.groups}")


class ReferencePageCopier(PageCopier):
    """By address on the CPU; every copy is done when `copy` returns."""

    def copy(self, lists: Sequence[IdPairs], *, stream: int = 0) -> None:
        """Copy now; there is no stream."""
        del stream
        self._check_lists(lists)
        ids = [each.read() for each in lists]
        for pair in self.pairs:
            source, destination = ids[pair.table]
            lengths = np.full(len(source), pair.page_bytes, dtype=np.uint64)
            copy_operations(pair.source.addresses(source), pair.destination.addresses(destination), lengths)

    def wait_group(self, group: int, *, stream: int, sequence: int | None = None) -> None:
        """There is nothing to wait for."""
        del stream, sequence
        self._check_group(group)


class CudaPageCopier(PageCopier):
    """By one kernel for all pages of all layers. Memory: device, or host that is registered with CUDA.

    Holds the description of the pairs on the device (96 bytes a pair). With `signals`, each warp waits for its writes to a
    group while it reads of the next one; without, `wait_group` is refused.
    """

    def __init__(self, device: int, pairs: Sequence[PagePair], *, blocks: int = 0, signals: bool = False) -> None:
        """`blocks`: how many blocks of 1,024 threads copy; 0 for the default of the direction.

        Raises UnsupportedError for addresses, strides or sizes that are no multiples of 16, and for more than four tables;
        RegistrationError for memory that the device does not reach.
        """
        super().__init__(pairs)
        _check_form(self.pairs)
        self.device = device
        self._signals = signals
        self._from_host = _side_is_host(device, self.pairs, "source")
        to_host = _side_is_host(device, self.pairs, "destination")
        self._blocks = blocks or _default_blocks(device, from_host=self._from_host, to_host=to_host)
        each = [[_segments(pair) for pair in self.pairs if pair.table == table] for table in range(self.tables)]
        self._segments = [(sum(of_pairs), max(of_pairs, default=0)) for of_pairs in each]
        """For each list: of a page of all its pairs together, and of the longest page."""
        self._kernel = programs.kernel(source(), "copy_pages", device)
        self._shared_bytes = len(self.pairs) * _PAIR.itemsize
        self._kernel.allow_shared(self._shared_bytes)
        self._sequence = 0
        """Copies that were launched."""
        self._description = _described(device, self.pairs, self.groups)
        self._state = DeviceBytes(device, 8 + 12 * len(self.groups))
        """`struct State` in `csrc/copies.cuh`: refused ids (uint32), unused (uint32), then for each group the segments done in the
        present launch (uint64), then for each group its flag (uint32)."""
        self._state.write(np.zeros(self._state.length_bytes, dtype=np.uint8))

    def copy(self, lists: Sequence[IdPairs], *, stream: int = 0) -> None:
        """Launch; nothing on the host waits."""
        self._check_lists(lists)
        most = max(each.count * longest for each, (_, longest) in zip(lists, self._segments, strict=True))
        if most >= MOST_ITEMS:
            raise InvalidInputError(
                f"{most * SEGMENT_BYTES} bytes of one region are too many for one launch; split them"
            )
        segments = sum(each.count * of_page for each, (of_page, _) in zip(lists, self._segments, strict=True))
        if not segments and not self._signals:
            return
        unused = IdPairs(0, 0, 0)
        arguments: list[int] = [self._description.address, len(self.pairs), self._state.address]
        arguments += [len(self.groups) if self._signals else 0, int(self._from_host)]
        for each in [*lists, *[unused] * (MOST_TABLES - len(lists))]:
            arguments += [each.source_address, each.destination_address, each.count]
        grid = max(1, min(self._blocks, segments))
        self._kernel.launch(arguments, grid=grid, block=THREADS, stream=stream, shared_bytes=self._shared_bytes)
        self._sequence += 1

    def wait_group(self, group: int, *, stream: int, sequence: int | None = None) -> None:
        """The stream's hardware waits; no thread and no block does."""
        self._check_group(group)
        if not self._signals:
            raise UnsupportedError("this page copier was built without signals, so no stream can wait for a group")
        number = self._sequence if sequence is None else sequence
        if not 0 <= number <= self._sequence:
            raise InvalidInputError(f"a stream cannot wait for page copy {number}: {self._sequence} were launched")
        if number:
            flag = self._state.address + 8 + 8 * len(self.groups) + 4 * self.groups.index(group)
            buffers.wait_value(self.device, flag, number, stream)

    def check(self) -> None:
        """The count of refused ids is read from the device."""
        refused = int(self._state.read(0, 4).view(np.uint32)[0])
        if refused:
            raise PageOutOfBoundsError(
                f"{refused} times a page copy on cuda:{self.device} was given a page id that its region does not have; those pages "
                "were not copied"
            )

    def close(self) -> None:
        """The device does not use the buffers any more."""
        self._description.close()
        self._state.close()


def page_copier(device: int | None, pairs: Sequence[PagePair]) -> PageCopier:
    """Return the copier for a CUDA ordinal, or the reference for None, which takes memory of the CPU only."""
    return ReferencePageCopier(pairs) if device is None else CudaPageCopier(device, pairs)


def source() -> programs.Source:
    """Return the kernel's source."""
    return programs.Source("copy_pages", (("LOADS", LOADS), ("MOST_TABLES", MOST_TABLES)))


# ------------------------------------------------------------------------------------------- inside


def _segments(pair: PagePair) -> int:
    """Segments begin at cache lines, so an unaligned page may touch one more."""
    return -(-(pair.page_bytes + 128 - ALIGNMENT_BYTES) // SEGMENT_BYTES)


def _check_form(pairs: Sequence[PagePair]) -> None:
    if most_tables(pairs) > MOST_TABLES:
        raise UnsupportedError(
            f"a page copy takes at most {MOST_TABLES} lists of pages, these pairs name {most_tables(pairs)}"
        )
    for pair in pairs:
        for memory in (pair.source, pair.destination):
            numbers = (*memory.extent_addresses, memory.page_stride_bytes, pair.page_bytes)
            if any(number % ALIGNMENT_BYTES for number in numbers):
                raise UnsupportedError(
                    f"pages of {pair.page_bytes} bytes at {memory.extent_addresses[0]:#x}, {memory.page_stride_bytes} bytes "
                    f"apart, cannot be copied by the GPU: addresses, strides and sizes must be multiples of {ALIGNMENT_BYTES}"
                )


def _side_is_host(device: int, pairs: Sequence[PagePair], side: str) -> bool:
    memories = [getattr(pair, side) for pair in pairs]
    return any(
        buffers.is_host(device, address, what=f"the {side} of a page copy")
        for memory in memories
        for address in memory.extent_addresses
    )


def _default_blocks(device: int, *, from_host: bool, to_host: bool) -> int:
    if from_host:
        return FROM_HOST_BLOCKS
    return TO_HOST_BLOCKS if to_host else runtime.device_facts(device).multiprocessors


def _described(device: int, pairs: Sequence[PagePair], groups: Sequence[int]) -> DeviceBytes:
    """Put the description on the device: a table of pairs, then the extents that their sides refer to."""
    table = np.zeros(len(pairs), dtype=_PAIR)
    sides = [memory for pair in pairs for memory in (pair.source, pair.destination)]
    extents = np.array([address for memory in sides for address in memory.extent_addresses], dtype=np.uint64)
    uploaded = DeviceBytes(device, table.nbytes + extents.nbytes)
    place = uploaded.address + table.nbytes
    for row, pair in zip(table, pairs, strict=True):
        row["page_bytes"], row["segments"] = pair.page_bytes, _segments(pair)
        row["group"], row["table"] = groups.index(pair.group), pair.table
        for side, memory in (("source", pair.source), ("destination", pair.destination)):
            first, stride = memory.extent_addresses[0], memory.page_stride_bytes
            row[side] = (first, place, stride, memory.pages_per_extent, memory.page_count)
            place += 8 * len(memory.extent_addresses)
    uploaded.write(table)
    uploaded.write(extents, offset_bytes=table.nbytes)
    return uploaded

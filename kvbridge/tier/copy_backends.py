"""Three ways to carry out the copies of `TwinCopier`: by the processor, by the kernel, by the copy engines."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvbridge.core.closing import Closing
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import PageIdArray
from kvbridge.core.plan.operations import Operations
from kvbridge.core.plan.runs import find_runs
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.segments import StagingPool
from kvbridge.kernels.page_copies import CudaPageCopier
from kvbridge.kernels.places import IdPairs, PagePair
from kvbridge.kernels.reference import copy_each

IdLists = Sequence[tuple[PageIdArray, PageIdArray]]
"""For each list that pairs name: ids of the pages that are read and of those that are written."""
AddressArray = npt.NDArray[np.uint64]
IntArray = npt.NDArray[np.object_]

RING = 32
"""Copies whose lists of ids can be on their way before more page-locked memory is made for them, which may wait for the device."""
RING_BYTES = 64 * 1024
NOTHING = np.empty(0, dtype=np.uint64)
NO_IDS = np.empty(0, dtype=np.int32)


class PageCopies(Closing):
    """Copies pages of some pairs. Tickets count its copies from 1 on."""

    @abstractmethod
    def copy(self, lists: IdLists, *, stream: int) -> int:
        """Begin to copy, in the order of a stream; ids exist. The arrays may be dropped at once."""

    def wait_group(self, group: int, ticket: int, *, stream: int) -> None:
        """Have a stream wait until a copy is done with a group at least: with all groups, unless copies tell of each."""
        del group
        self.wait(ticket, stream=stream)

    @abstractmethod
    def wait(self, ticket: int, *, stream: int) -> None:
        """Have a stream wait until a copy is done."""

    @abstractmethod
    def done(self, ticket: int) -> bool:
        """Return whether a copy is done; never waits. Raises TransportError when the device failed."""


class ReferenceCopies(PageCopies):
    """By the processor: done when `copy` returns, so nobody waits for anything."""

    def __init__(self, pairs: Sequence[PagePair]) -> None:
        self._addresses = _Addresses(pairs)
        self._last = 0

    def copy(self, lists: IdLists, *, stream: int) -> int:
        del stream
        for addresses, lengths in self._addresses.columns(lists, as_ints=True):
            sources, destinations = addresses.tolist()
            copy_each(sources, destinations, lengths.tolist())
        self._last += 1
        return self._last

    def wait(self, ticket: int, *, stream: int) -> None:
        del stream
        self.done(ticket)

    def done(self, ticket: int) -> bool:
        _require_known(ticket, self._last)
        return True

    def close(self) -> None:
        pass


class DeviceCopies(PageCopies):
    """On a GPU: an event behind each copy, used again. No copy is done before all that were begun earlier."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._pending: deque[tuple[int, runtime.Event]] = deque()
        self._free: list[runtime.Event] = []
        self._last = self._done = 0

    def wait(self, ticket: int, *, stream: int) -> None:
        if not self.done(ticket):
            self._pending[ticket - self._pending[0][0]][1].hold(stream)

    def done(self, ticket: int) -> bool:
        _require_known(ticket, self._last)
        while self._pending and self._pending[0][1].reached():
            self._free_first()
        return ticket <= self._done

    def close(self) -> None:
        """Wait for what was begun. Harmless when closed."""
        self._settle()
        while self._free:
            self._free.pop().close()

    def _record(self, stream: int) -> int:
        """Return the ticket of what a stream has been given so far."""
        event = self._free.pop() if self._free else runtime.Event.create(self._device)
        event.record(stream)
        self._last += 1
        self._pending.append((self._last, event))
        return self._last

    def _settle(self) -> None:
        while self._pending:
            self._pending[0][1].synchronize()
            self._free_first()

    def _free_first(self) -> None:
        self._done, event = self._pending.popleft()
        self._free.append(event)


class KernelCopies(DeviceCopies):
    """By one launch of the page copy kernel. Memory: device, or host that is registered with CUDA."""

    def __init__(self, device: int, pairs: Sequence[PagePair], *, blocks: int, signals: bool) -> None:
        """`signals`: whether streams wait for single groups, else for copies as a whole. Raises as `CudaPageCopier` does."""
        super().__init__(device)
        self._copier = CudaPageCopier(device, pairs, blocks=blocks, signals=signals)
        self._signals = signals
        self._staging = StagingPool(device)
        self._staging.reserve(RING_BYTES, RING)
        if signals:
            # The first launch of a kernel loads it, and waits for all that the device is doing; those who wait for layers must not.
            self.copy([(NO_IDS, NO_IDS)] * self._copier.tables, stream=0)
            self._settle()  # of another stream than those that follow, which would not be done before it

    def copy(self, lists: IdLists, *, stream: int) -> int:
        """Put the ids into page-locked memory, from there to the device, and launch."""
        arrays = [np.asarray(ids) for pair in lists for ids in pair]
        staging = self._staging.take(sum(-(-array.nbytes // 8) * 8 for array in arrays))
        addresses = staging.put(arrays)
        staging.send(stream=stream)
        named = zip(addresses[::2], addresses[1::2], (len(source) for source, _ in lists), strict=True)
        self._copier.copy([IdPairs(*each) for each in named], stream=stream)
        staging.record(stream)
        return self._record(stream)

    def wait_group(self, group: int, ticket: int, *, stream: int) -> None:
        """The stream's hardware waits for the group's flag, or for the launch's end without signals."""
        if not self._signals:
            self.wait(ticket, stream=stream)
        elif not self.done(ticket):
            self._copier.wait_group(group, stream=stream, sequence=ticket)

    def close(self) -> None:
        """Wait for what was launched, and give everything back. Harmless when closed."""
        super().close()
        self._staging.close()
        self._copier.close()


class DirectCopies(DeviceCopies):
    """By the copy engines, in one batch; a copy is done with all groups at once."""

    def __init__(self, device: int, pairs: Sequence[PagePair]) -> None:
        super().__init__(device)
        self._addresses = _Addresses(pairs)

    def copy(self, lists: IdLists, *, stream: int) -> int:
        """Submit one batch; `stream` is not the default one."""
        runtime.copy_batch(self._addresses.operations(lists), device=self._device, stream=stream)
        return self._record(stream)


def joined(pairs: Sequence[PagePair]) -> list[PagePair]:
    """Make one pair of those whose bytes follow each other in every page on both sides."""
    found: list[PagePair] = []
    ordered = sorted(pairs, key=lambda pair: (pair.group, pair.table, pair.source.extent_addresses))
    for pair in ordered:
        if found and _follows(found[-1], pair):
            last = found.pop()
            whole = last.page_bytes + pair.page_bytes
            pair = PagePair(last.source, last.destination, whole, last.group, last.table)  # noqa: PLW2901 - what was two is one
        found.append(pair)
    return found


# ------------------------------------------------------------------------------------------- inside


def _follows(first: PagePair, second: PagePair) -> bool:
    sides = ((first.source, second.source), (first.destination, second.destination))
    whole = first.page_bytes + second.page_bytes
    return (first.group, first.table) == (second.group, second.table) and all(
        (one.pages_per_extent, one.page_stride_bytes, one.page_count)
        == (other.pages_per_extent, other.page_stride_bytes, other.page_count)
        and whole <= one.page_stride_bytes
        and all(
            begin + first.page_bytes == next_begin
            for begin, next_begin in zip(one.extent_addresses, other.extent_addresses, strict=True)
        )
        for one, other in sides
    )


class _Group:
    """Pairs of one list that are alike in how their pages are addressed, and whether neighbours are one stretch on both sides."""

    def __init__(self, pairs: Sequence[PagePair], *, dense: bool) -> None:
        self.table = pairs[0].table
        sides = [[pair.source for pair in pairs], [pair.destination for pair in pairs]]
        most = max(len(memory.extent_addresses) for side in sides for memory in side)
        self._extents = np.zeros((2, len(pairs), most), dtype=np.uint64)
        for row, memory in zip(self._extents.reshape(-1, most), sides[0] + sides[1], strict=True):
            row[: len(memory.extent_addresses)] = memory.extent_addresses
        self._per_extent = np.array([[[memory.pages_per_extent] for memory in side] for side in sides], dtype=np.int64)
        self._strides = np.array([[[memory.page_stride_bytes] for memory in side] for side in sides], dtype=np.uint64)
        self._lengths = np.array([pair.page_bytes for pair in pairs], dtype=np.uint64)
        self._ints = self._lengths.astype(object)
        """The same, made once: to make an int anew for every copy costs a tenth of copying eight pages."""
        self._dense = dense

    def columns(
        self, source: PageIdArray, destination: PageIdArray, *, as_ints: bool
    ) -> tuple[AddressArray, AddressArray | IntArray]:
        """Return addresses uint64 [2, copies] of sources and destinations, and how long they are: uint64 [copies], or ints."""
        pages = np.array((source, destination), dtype=np.int64)
        if self._dense and ((pages[:, 1:] - pages[:, :-1]) == 1).all(axis=0).any():
            runs = find_runs(*pages)
            pages = np.array((runs.source, runs.destination))
            lengths = np.outer(self._lengths, runs.pages.astype(np.uint64)).ravel()
        else:
            lengths = np.repeat(self._ints if as_ints else self._lengths, len(source))
        pages = pages[:, None, :]
        if self._extents.shape[2] == 1:
            addresses = self._extents + pages.astype(np.uint64) * self._strides
        else:
            extent, within = np.divmod(pages, self._per_extent)
            addresses = np.take_along_axis(self._extents, extent, axis=2) + within.astype(np.uint64) * self._strides
        return addresses.reshape(2, -1), lengths


class _Addresses:
    """The copies of listed pages, by address, in any order."""

    def __init__(self, pairs: Sequence[PagePair]) -> None:
        ordered = sorted(pairs, key=_form)
        self._groups = [_Group(list(alike), dense=form[1]) for form, alike in groupby(ordered, key=_form)]

    def columns(
        self, lists: IdLists, *, as_ints: bool = False
    ) -> Iterator[tuple[AddressArray, AddressArray | IntArray]]:
        """Yield parts of it, as `_Group.columns` returns them."""
        for group in self._groups:
            if len(lists[group.table][0]):
                yield group.columns(*lists[group.table], as_ints=as_ints)

    def operations(self, lists: IdLists) -> Operations:
        """Return all of it."""
        found = [(NOTHING[None].repeat(2, axis=0), NOTHING), *self.columns(lists)]
        source, destination = np.concatenate([each for each, _ in found], axis=1)
        return Operations(source, destination, np.concatenate([lengths for _, lengths in found]))


def _form(pair: PagePair) -> tuple[int, bool]:
    sides = pair.source, pair.destination
    dense = all(len(side.extent_addresses) == 1 and side.page_stride_bytes == pair.page_bytes for side in sides)
    return pair.table, dense


def _require_known(ticket: int, last: int) -> None:
    if not 1 <= ticket <= last:
        raise InvalidInputError(f"there is no copy {ticket} among the {last} that were begun")

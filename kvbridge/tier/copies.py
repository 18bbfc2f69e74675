"""Copies between device pages and their host copies: all layers and components of a rank at once.

A page of `full` and its host copy are the same bytes; a host copy of a page of `swa` has the rows that are live at a page's end
(`core.geometry.tiers`). Both directions do the same with the sides exchanged. The processor, the kernel or the copy engines copy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.closing import Closing
from kvbridge.core.errors import ConfigError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.tiers import copy_pieces
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, PageMoves
from kvbridge.core.plan.operations import Operations
from kvbridge.core.plan.runs import find_runs
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.segments import StagingPool
from kvbridge.kernels.page_copies import CudaPageCopier
from kvbridge.kernels.places import IdPairs, PageMemory, PagePair
from kvbridge.kernels.reference import copy_each
from kvbridge.pool.memory.layout import RankPart

IdLists = Sequence[tuple[PageIdArray, PageIdArray]]
"""For each list that pairs name: ids of the pages that are read and of those that are written."""

DEFAULT_BLOCKS = 4
"""Blocks of the copy kernel, on as many multiprocessors, that copies beside compute use in either direction."""
RING = 32
"""Copies whose lists of ids can be on their way before more page-locked memory is made for them, which may wait for the device."""
RING_BYTES = 64 * 1024
NO_IDS = np.empty(0, dtype=np.int32)


class Direction(StrEnum):
    """The way that pages go."""

    BACKUP = "backup"
    """From the device to the host."""
    LOAD_BACK = "load_back"
    """From the host to a device."""


def copy_backend(wish: CopyBackend | None, *, host: HostLayout, device: DeviceLayout) -> CopyBackend:
    """Return the backend for these layouts: the copy engines where a page is one stretch on both sides, else the kernel.

    Raises ConfigError with the reason when a wish cannot be met.
    """
    is_stretch = host is HostLayout.PAGE_FIRST and device is DeviceLayout.PAGE_FIRST
    if wish is CopyBackend.DIRECT and not is_stretch:
        raise ConfigError(
            f"tier.host.backend direct needs page_first on both sides, but tier.host.layout is {host} and pools.device_layout is "
            f"{device}: the copy engines take about a microsecond for each stretch of memory, and layer_first on either side makes "
            "a stretch of every layer of every page, tens of thousands for a prompt; set both to page_first, or the backend to null"
        )
    return wish or (CopyBackend.DIRECT if is_stretch else CopyBackend.KERNEL)


@dataclass(frozen=True, slots=True)
class CopyMeans:
    """The means by which copies are made."""

    backend: CopyBackend = CopyBackend.KERNEL
    device: int | None = None
    """CUDA ordinal of this process; None for the CPU, which copies before `copy` returns, by either backend's plan."""
    blocks: int = DEFAULT_BLOCKS
    """Blocks of the kernel, 1,024 threads each."""


Shares = Mapping[ComponentKind, tuple[int, int]]
"""(k, n) for a component whose pages this rank shares with n - 1 others of its node: it copies those at positions k, k + n, ..."""


def backup_shares(geometry: ModelGeometry, part: RankPart, stage_tp_ranks: Sequence[int]) -> Shares:
    """Return which pages a rank backs up, where ranks of its stage on this node hold the same lanes and share the host copies."""
    shares = {}
    for component in geometry.components:
        mine = part.lanes(component)
        ranks = [part.rank.model_copy(update={"tp": tp}) for tp in sorted({*stage_tp_ranks, part.rank.tp})]
        alike = [rank.tp for rank in ranks if part.model_copy(update={"rank": rank}).lanes(component) == mine]
        shares[component.kind] = alike.index(part.rank.tp), len(alike)
    return shares


class HostCopier(Closing):
    """Copies pages of one rank to the host, or back: all layers and components of them in one launch or one batch.

    The caller orders its copies among themselves, by one stream. Used by one thread; not under graph capture.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        device_regions: Sequence[Region],
        copies: Sequence[Region],
        *,
        direction: Direction,
        means: CopyMeans | None = None,
        shares: Shares | None = None,
    ) -> None:
        """`device_regions`: the rank's; those without host copies are left alone. `copies`: the node's.

        All regions are at addresses of this process and, for a GPU, on it or registered with CUDA, until `close`. Raises
        InvalidInputError when nothing of the rank has host copies, UnsupportedError for what the GPU cannot copy.
        """
        means = means or CopyMeans()
        self._direction = direction
        self._lists: list[tuple[IndexSpace, int, int]] = []
        """The lists of ids that pairs name by their position: of a space, from position k on every n-th."""
        self._page_counts: dict[IndexSpace, tuple[int, int]] = {}
        """Pages of the device and of the host copies."""
        by_place = {(region.component, region.layer, region.space): region for region in copies}
        matched = [
            (region, by_place[place])
            for region in device_regions
            if (place := (region.component, region.layer, HOST_COPIES.get(region.space, region.space))) in by_place
            and region.space in HOST_COPIES
        ]
        if not matched:
            raise InvalidInputError("no component of this rank has host copies among the regions that were given")
        # Only the kernel tells how far it is, and only loads are waited for layer by layer.
        by_layer = means.device is not None and means.backend is CopyBackend.KERNEL and direction is Direction.LOAD_BACK
        layers = sorted({region.layer for region, _ in matched})
        self._groups = {layer: group if by_layer else 0 for group, layer in enumerate(layers)}
        pairs: list[PagePair] = []
        for region, copy in matched:
            named = (region.space, *(shares or {}).get(region.component, (0, 1)))
            if named not in self._lists:
                self._lists.append(named)
            self._page_counts[region.space] = region.page_count, copy.page_count
            lanes = [(each.lane_start, each.lane_stop) for each in (region, copy)]
            for piece in copy_pieces(geometry, geometry.component(region.component), *lanes):
                sides = [_memory(region, piece.offset_bytes), _memory(copy, piece.copy_offset_bytes)]
                source, destination = sides if direction is Direction.BACKUP else reversed(sides)
                group, table = self._groups[region.layer], self._lists.index(named)
                pairs.append(PagePair(source, destination, piece.length_bytes, group, table))
        self._copies: _Copies
        if means.device is None:
            self._copies = _ReferenceCopies(joined(pairs))
        elif means.backend is CopyBackend.DIRECT:
            self._copies = _DirectCopies(means.device, joined(pairs))
        else:
            self._copies = _KernelCopies(means.device, joined(pairs), blocks=means.blocks, signals=by_layer)

    def copy(self, moves: PageMoves, *, stream: int = 0) -> int:
        """Begin to copy pages, and return a ticket; the arrays may be written again at once. No destination occurs twice.

        `stream`: the handle of a stream of the GPU, not the default one with `direct`. Raises InvalidInputError for arrays of two
        lengths and for spaces without host copies here, PageOutOfBoundsError for ids that do not exist; then nothing is copied.
        """
        for space, ids in moves.items():
            self._check(space, *ids)
        lists = []
        for space, first, step in self._lists:
            device, copies = moves.get(space, (NO_IDS, NO_IDS))
            if step > 1:
                device, copies = device[first::step], copies[first::step]
            lists.append((device, copies) if self._direction is Direction.BACKUP else (copies, device))
        return self._copies.copy(lists, stream=stream)

    def wait_layer(self, layer: int, ticket: int, *, stream: int = 0) -> None:
        """Have a stream wait until a copy is done with what a layer (its global id) needs; the host does not wait.

        Backups and `direct` are done with a layer when the whole copy is done. A layer of which nothing is copied needs nothing.
        """
        group = self._groups.get(layer)
        if group is not None:
            self._copies.wait_group(group, ticket, stream=stream)

    def wait(self, ticket: int, *, stream: int = 0) -> None:
        """Have a stream wait until a copy is done; the host does not wait."""
        self._copies.wait(ticket, stream=stream)

    def done(self, ticket: int) -> bool:
        """Return whether a copy is done; never waits. Raises TransportError when the GPU has failed."""
        return self._copies.done(ticket)

    def close(self) -> None:
        """Wait for the copies that were begun, and give back what they needed. Harmless when closed."""
        self._copies.close()

    def _check(self, space: IndexSpace, device: PageIdArray, copies: PageIdArray) -> None:
        if space not in self._page_counts:
            raise InvalidInputError(
                f"pages of space '{space}' have no host copies here, only those of {sorted(self._page_counts)}"
            )
        if len(device) != len(copies):
            raise InvalidInputError(f"{len(device)} pages of '{space}' cannot have {len(copies)} host copies")
        for ids, count, what in zip(
            (device, copies), self._page_counts[space], (space, HOST_COPIES[space]), strict=True
        ):
            if ids.dtype != np.int32:
                raise InvalidInputError(f"page ids are int32, got {ids.dtype} for '{what}'")
            if len(ids) and np.maximum.reduce(ids.view(np.uint32)) >= count:  # negative ones are larger still
                raise PageOutOfBoundsError(
                    f"pages {ids.min()} to {ids.max()} of '{what}' do not all exist among {count}"
                )


def _memory(region: Region, offset_bytes: int) -> PageMemory:
    addresses = tuple(address + offset_bytes for address in region.extent_addresses)
    return PageMemory.of(region.model_copy(update={"extent_addresses": addresses}))


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


def _follows(first: PagePair, second: PagePair) -> bool:
    sides = ((first.source, second.source), (first.destination, second.destination))
    whole = first.page_bytes + second.page_bytes
    return (first.group, first.table) == (second.group, second.table) and all(
        (one.pages_per_extent, one.page_stride_bytes, one.page_count)
        == (other.pages_per_extent, other.page_stride_bytes, other.page_count)
        and whole <= one.page_stride_bytes
        and tuple(begin + first.page_bytes for begin in one.extent_addresses) == other.extent_addresses
        for one, other in sides
    )


# ------------------------------------------------------------------------------------------- by whom


class _Copies(Closing):
    """Copies pages of some pairs. Tickets count its copies from 1 on."""

    _last = 0

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

    def done(self, ticket: int) -> bool:
        """Return whether a copy is done; never waits. Raises TransportError when the device failed."""
        if not 1 <= ticket <= self._last:
            raise InvalidInputError(f"there is no copy {ticket} among the {self._last} that were begun")
        return True

    def close(self) -> None:
        pass


class _ReferenceCopies(_Copies):
    """By the processor: done when `copy` returns, so nobody waits for anything."""

    def __init__(self, pairs: Sequence[PagePair]) -> None:
        self._pairs = _grouped(pairs)

    def copy(self, lists: IdLists, *, stream: int) -> int:
        del stream
        for pairs in self._pairs:
            copy_each(*(column.tolist() for column in pairs.operations(*lists[pairs.table])))
        self._last += 1
        return self._last

    def wait(self, ticket: int, *, stream: int) -> None:
        del stream
        self.done(ticket)


class _DeviceCopies(_Copies):
    """On a GPU: an event behind each copy, used again. No copy is done before all that were begun earlier."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._pending: deque[tuple[int, runtime.Event]] = deque()
        self._free: list[runtime.Event] = []
        self._done = 0

    def wait(self, ticket: int, *, stream: int) -> None:
        if not self.done(ticket):
            self._pending[ticket - self._pending[0][0]][1].hold(stream)

    def done(self, ticket: int) -> bool:
        super().done(ticket)
        while self._pending and self._pending[0][1].reached():
            self._free_first()
        return ticket <= self._done

    def close(self) -> None:
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


class _KernelCopies(_DeviceCopies):
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
        # The ids go into page-locked memory, from there to the device.
        arrays = [np.asarray(ids) for pair in lists for ids in pair]
        staging = self._staging.take(sum(-(-array.nbytes // 8) * 8 for array in arrays))
        addresses = staging.put(arrays)
        staging.send(stream=stream)
        named = zip(addresses[::2], addresses[1::2], (len(source) for source, _ in lists), strict=True)
        self._copier.copy([IdPairs(*each) for each in named], stream=stream)
        staging.record(stream)
        return self._record(stream)

    def wait_group(self, group: int, ticket: int, *, stream: int) -> None:
        if not self._signals:
            self.wait(ticket, stream=stream)
        elif not self.done(ticket):
            self._copier.wait_group(group, stream=stream, sequence=ticket)

    def close(self) -> None:
        super().close()
        self._staging.close()
        self._copier.close()


class _DirectCopies(_DeviceCopies):
    """By the copy engines, in one batch; a copy is done with all groups at once."""

    def __init__(self, device: int, pairs: Sequence[PagePair]) -> None:
        super().__init__(device)
        self._pairs = _grouped(pairs)

    def copy(self, lists: IdLists, *, stream: int) -> int:
        columns = [np.empty((3, 0), dtype=np.uint64)]
        columns += [np.array(pairs.operations(*lists[pairs.table])) for pairs in self._pairs]
        operations = Operations(*np.concatenate(columns, axis=1))
        runtime.copy_batch(operations, device=self._device, stream=stream)
        return self._record(stream)


class _Pairs:
    """Pairs of one list, all of them `dense` (a page follows the next one in one stretch on both sides) or none."""

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
        self._dense = dense

    def operations(self, source: PageIdArray, destination: PageIdArray) -> tuple[npt.NDArray[np.uint64], ...]:
        """Return the copies of these pages: addresses of sources, addresses of destinations, and lengths, in any order."""
        pages = np.array((source, destination), dtype=np.int64)
        counts = np.ones(len(source), dtype=np.uint64)
        if self._dense and ((pages[:, 1:] - pages[:, :-1]) == 1).all(axis=0).any():
            runs = find_runs(*pages)
            pages, counts = np.array((runs.source, runs.destination)), runs.pages.astype(np.uint64)
        extent, within = np.divmod(pages[:, None, :], self._per_extent)
        addresses = np.take_along_axis(self._extents, extent, axis=2) + within.astype(np.uint64) * self._strides
        return *addresses.reshape(2, -1), np.outer(self._lengths, counts).ravel()


def _grouped(pairs: Sequence[PagePair]) -> list[_Pairs]:
    ordered = sorted(pairs, key=_form)
    return [_Pairs(list(alike), dense=dense) for (_, dense), alike in groupby(ordered, key=_form)]


def _form(pair: PagePair) -> tuple[int, bool]:
    sides = pair.source, pair.destination
    dense = all(len(side.extent_addresses) == 1 and side.page_stride_bytes == pair.page_bytes for side in sides)
    return pair.table, dense

"""Copies between device pages and their host copies: all layers and components of a rank at once.

A page of `full` and its host copy are the same bytes. A host copy of a page of `swa` has only the rows that are live at a page's
end (`core.geometry.tiers`). The processor, the copy kernel or the copy engines do the copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.errors import ConfigError, InvalidInputError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.tiers import copy_pieces
from kvbridge.core.ids import HOST_COPIES, IndexSpace, PageIdArray, PageMoves
from kvbridge.core.plan.operations import Operations, PageArray, find_runs
from kvbridge.core.process import Closing
from kvbridge.kernels.copies import StretchCopier
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import RankPart

DEFAULT_BLOCKS = 8
"""Blocks of the copy kernel for copies beside compute, in either direction."""
MOST_GROUPS = 8
"""The most groups of layers in a load. A stream can wait for each; each is a launch of its own."""
RESERVED_OPERATIONS, RESERVED_SUBMISSIONS = 8192, 16
"""Page-locked memory is made for so much at first; to make more may wait for the device."""
NO_IDS = np.empty(0, dtype=np.int32)


class Direction(StrEnum):
    """The direction of a copy."""

    BACKUP = "backup"
    """From the device to the host."""
    LOAD_BACK = "load_back"
    """From the host to the device."""


def copy_backend(wish: CopyBackend | None, *, host: HostLayout, device: DeviceLayout) -> CopyBackend:
    """Return the backend for these layouts: the copy engines if a page is one stretch on both sides, else the kernel.

    Raises ConfigError when a wish cannot be met.
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
    """The means of copying."""

    backend: CopyBackend = CopyBackend.KERNEL
    device: int | None = None
    """CUDA ordinal in this process; None: the CPU, which copies before `copy` returns."""
    blocks: int = DEFAULT_BLOCKS
    """Blocks of the kernel, each of 512 threads."""


Shares = Mapping[ComponentKind, tuple[int, int]]
"""(k, n) for a component that n ranks of a node hold alike: this rank copies the pages at positions k, k + n, ..."""


def backup_shares(geometry: ModelGeometry, part: RankPart, stage_tp_ranks: Sequence[int]) -> Shares:
    """Return the pages that a rank backs up, where ranks of its stage on this node hold the same lanes and share host copies."""
    shares = {}
    for component in geometry.components:
        mine = part.lanes(component)
        ranks = [part.rank.model_copy(update={"tp": tp}) for tp in sorted({*stage_tp_ranks, part.rank.tp})]
        alike = [rank.tp for rank in ranks if part.model_copy(update={"rank": rank}).lanes(component) == mine]
        shares[component.kind] = alike.index(part.rank.tp), len(alike)
    return shares


@dataclass(frozen=True, slots=True)
class _Pair:
    """Bytes that are copied of every page of a region. Both regions begin at the bytes of page 0."""

    group: int
    table: int
    """Position of the list of ids that names the pages."""
    source: Region
    destination: Region
    length_bytes: int

    def form(self) -> tuple[int, int, bool, list[tuple[int, int, int]]]:
        """Return a value that is equal for pairs whose addresses can be computed together."""
        regions = (self.source, self.destination)
        forms = [(len(one.extent_addresses), one.pages_per_extent, one.page_stride_bytes) for one in regions]
        dense = all(region.page_stride_bytes == self.length_bytes for region in regions)
        return self.group, self.table, dense, forms

    def followed_by(self, other: _Pair) -> bool:
        """Return whether the bytes of another pair follow these in every page on both sides."""
        whole = self.length_bytes + other.length_bytes
        sides = ((self.source, other.source), (self.destination, other.destination))
        return (self.group, self.table) == (other.group, other.table) and all(
            (one.pages_per_extent, one.page_stride_bytes) == (two.pages_per_extent, two.page_stride_bytes)
            and whole <= one.page_stride_bytes
            and all(
                begin + self.length_bytes == next_begin
                for begin, next_begin in zip(one.extent_addresses, two.extent_addresses, strict=True)
            )
            for one, two in sides
        )


def joined(pairs: Sequence[_Pair]) -> list[_Pair]:
    """Join pairs whose bytes follow each other in every page on both sides."""
    found: list[_Pair] = []
    for pair in sorted(pairs, key=lambda one: (one.group, one.table, one.source.extent_addresses)):
        if found and found[-1].followed_by(pair):
            last = found.pop()
            found.append(replace(last, length_bytes=last.length_bytes + pair.length_bytes))
        else:
            found.append(pair)
    return found


class _Part:
    """Pairs of one form."""

    def __init__(self, pairs: Sequence[_Pair]) -> None:
        self.table = pairs[0].table
        self._sides = [PageArray.of([one.source for one in pairs]), PageArray.of([one.destination for one in pairs])]
        self._lengths = np.array([pair.length_bytes for pair in pairs], dtype=np.uint64)
        self._dense = all(side.stride_bytes == length for side in self._sides for length in self._lengths.tolist())

    def columns(self, source: PageIdArray, destination: PageIdArray) -> npt.NDArray[np.uint64]:
        """Return sources, destinations and lengths of the copies of these pages: uint64 [3, copies]. The ids exist."""
        here, there = source.astype(np.int64), destination.astype(np.int64)
        pages = np.ones(len(source), dtype=np.uint64)
        if self._dense:
            runs = find_runs(here, there, (self._sides[0].borders, self._sides[1].borders))
            here, there, pages = runs.source, runs.destination, runs.pages.astype(np.uint64)
        out = np.empty((3, len(self._lengths), len(pages)), dtype=np.uint64)
        for side, chosen, column in zip(self._sides, (here, there), out, strict=False):
            side.write(chosen, 0, column)
        np.multiply.outer(self._lengths, pages, out=out[2])
        return out.reshape(3, -1)


class HostCopier(Closing):
    """Copies pages of one rank to the host, or back: all layers and components.

    The caller orders its copies by using one stream. Used by one thread; not under graph capture.
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
        """`device_regions`: the rank's; those without host copies are ignored. `copies`: the node's.

        All regions are at addresses of this process and, for a GPU, on it or registered with CUDA, until `close`. Raises
        InvalidInputError when no region of the rank has host copies, UnsupportedError for memory that the GPU cannot copy.
        """
        means = means or CopyMeans()
        self._direction, self._device = direction, means.device
        self._lists: list[tuple[IndexSpace, int, int]] = []
        """The lists of ids that pairs name by position: (space, k, n) stands for every n-th id of a space from position k on."""
        self._page_counts: dict[IndexSpace, tuple[int, int]] = {}
        """Numbers of device pages and of host copies."""
        by_place = {(region.component, region.layer, region.space): region for region in copies}
        matched = [
            (region, by_place[place])
            for region in device_regions
            if region.space in HOST_COPIES
            and (place := (region.component, region.layer, HOST_COPIES[region.space])) in by_place
        ]
        if not matched:
            raise InvalidInputError("no component of this rank has host copies among the regions that were given")
        by_kernel = means.device is not None and means.backend is CopyBackend.KERNEL
        layers = sorted({region.layer for region, _ in matched})
        # Only loads are waited for layer by layer, and the copy engines make all layers of a batch in any order.
        count = min(MOST_GROUPS, len(layers)) if by_kernel and direction is Direction.LOAD_BACK else 1
        self._groups = {layer: position * count // len(layers) for position, layer in enumerate(layers)}
        pairs: list[_Pair] = []
        for region, copy in matched:
            named = (region.space, *(shares or {}).get(region.component, (0, 1)))
            if named not in self._lists:
                self._lists.append(named)
            self._page_counts[region.space] = region.page_count, copy.page_count
            component = geometry.component(region.component)
            lanes = [(one.lane_start, one.lane_stop) for one in (region, copy)]
            for piece in copy_pieces(geometry, component, *lanes):
                both = _shifted(region, piece.offset_bytes), _shifted(copy, piece.copy_offset_bytes)
                source, destination = both if direction is Direction.BACKUP else both[::-1]
                group, table = self._groups[region.layer], self._lists.index(named)
                pairs.append(_Pair(group, table, source, destination, piece.length_bytes))
        self._parts: list[list[_Part]] = [[] for _ in range(count)]
        for _, found in groupby(sorted(joined(pairs), key=_Pair.form), key=_Pair.form):
            alike = list(found)
            self._parts[alike[0].group].append(_Part(alike))
        self._copier: StretchCopier | None = None
        if means.device is None or by_kernel:
            self._copier = StretchCopier(means.device, blocks=means.blocks)
            self._copier.reserve(RESERVED_OPERATIONS, RESERVED_SUBMISSIONS)
            self._copier.warm_up()
        self._pending: deque[tuple[int, list[runtime.Event]]] = deque()
        """Copies on a GPU that are not known to be done: the ticket, and an event after each group."""
        self._free: list[runtime.Event] = []
        self._last = self._done = 0

    def copy(self, moves: PageMoves, *, stream: int = 0) -> int:
        """Begin to copy pages, and return a ticket; the arrays may be written again at once. No destination occurs twice.

        `stream`: handle of a stream of the GPU; not the default stream with the copy engines. Raises InvalidInputError for arrays
        of two lengths and for spaces without host copies here, PageOutOfBoundsError for ids that do not exist; nothing is copied
        then.
        """
        for space, ids in moves.items():
            self._check(space, *ids)
        lists = []
        for space, first, step in self._lists:
            device, copies = (ids[first::step] for ids in moves.get(space, (NO_IDS, NO_IDS)))
            lists.append((device, copies) if self._direction is Direction.BACKUP else (copies, device))
        marks = []
        for parts in self._parts:
            columns = [part.columns(*lists[part.table]) for part in parts if len(lists[part.table][0])]
            operations = Operations(*np.concatenate([np.empty((3, 0), dtype=np.uint64), *columns], axis=1))
            if self._copier is not None:
                self._copier.submit(operations, stream=stream)
            elif self._device is not None:
                runtime.copy_batch(operations, device=self._device, stream=stream)
            if self._device is not None:
                marks.append(self._free.pop() if self._free else runtime.Event.create(self._device))
                marks[-1].record(stream)
        self._last += 1
        if marks:
            self._pending.append((self._last, marks))
        return self._last

    def wait_layer(self, layer: int, ticket: int, *, stream: int = 0) -> None:
        """Have a stream wait until a copy has made the pages of a layer (its global id); the host does not wait.

        A backup, and a copy by the copy engines, has no groups of layers: the stream waits for all of it.
        """
        if layer in self._groups:
            self.wait(ticket, stream=stream, group=self._groups[layer])

    def wait(self, ticket: int, *, stream: int = 0, group: int = -1) -> None:
        """Have a stream wait until a copy is done, or one group of its layers; the host does not wait."""
        if not self.done(ticket):
            self._pending[ticket - self._pending[0][0]][1][group].hold(stream)

    def done(self, ticket: int) -> bool:
        """Return whether a copy is done, without waiting. Raises TransportError when the GPU has failed."""
        if not 1 <= ticket <= self._last:
            raise InvalidInputError(f"there is no copy {ticket} among the {self._last} that were begun")
        while self._pending and self._pending[0][1][-1].reached():
            self._free_first()
        return not self._pending or ticket < self._pending[0][0]

    def _free_first(self) -> None:
        _, marks = self._pending.popleft()
        self._free += marks

    def close(self) -> None:
        """Wait for the copies that were begun, and give back their resources. Harmless when closed."""
        while self._pending:
            self._pending[0][1][-1].synchronize()
            self._free_first()
        while self._free:
            self._free.pop().close()
        if self._copier is not None:
            self._copier.close()

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


def _shifted(region: Region, offset_bytes: int) -> Region:
    addresses = tuple(address + offset_bytes for address in region.extent_addresses)
    return region.model_copy(update={"extent_addresses": addresses})

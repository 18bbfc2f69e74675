"""A node's device pools and twins in memory of this process, with every byte random, and what copies between them have to do."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Self

import numpy as np
import numpy.typing as npt

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.components import Component, Liveness, ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.pages import window_pages
from kvbridge.core.geometry.tiers import copied_components, copy_space
from kvbridge.core.ids import IndexSpace, PageIdArray, PageMoves, Rank
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.layout import Chunking, Placement, RankPart, copy_placement, device_placement
from kvbridge.tier.copies import CopyMeans, Direction, HostCopier, Shares
from tests.helpers.gpu import DEVICE, HOST, Bytes

Array = npt.NDArray[np.uint8]
PAGES = {IndexSpace.FULL: 12, IndexSpace.SWA: 6, IndexSpace.REQUEST: 2}
TWIN_PAGES = {IndexSpace.FULL_COPY: 10, IndexSpace.SWA_COPY: 5}


COMBINATIONS = [
    (host, device, backend, direction)
    for host, device, backend, direction in product(HostLayout, DeviceLayout, CopyBackend, Direction)
    if backend is CopyBackend.KERNEL or (host, device) == (HostLayout.PAGE_FIRST, DeviceLayout.PAGE_FIRST)
]
"""Layouts of the host and of the device, backends and directions in which pages can be copied."""


def pages(*ids: int) -> PageIdArray:
    return np.array(ids, dtype=np.int32)


class TwinPools:
    """Device pools of the ranks of one stage, and their host copies. Memory lives as long as this object."""

    def __init__(
        self,
        geometry: ModelGeometry,
        *,
        tp_size: int = 1,
        layout: HostLayout = HostLayout.LAYER_FIRST,
        page_first: bool = False,
        chunking: Chunking | None = None,
        seed: int = 0,
    ) -> None:
        self.geometry = geometry
        self.components = copied_components(geometry, (), checkpoints=True)
        self.parts = [RankPart.of(geometry, Rank(pp=0, tp=tp), pp_size=1, tp_size=tp_size) for tp in range(tp_size)]
        self._random = np.random.default_rng(seed)
        self.placements: list[Placement] = []
        """Those of each rank, and at the end of the host copies, as in the next two lists."""
        made = [
            self._make(device_placement(geometry, part, page_counts=PAGES, chunking=chunking, page_first=page_first))
            for part in self.parts
        ]
        twins = copy_placement(
            geometry, self.parts, self.components, page_counts=TWIN_PAGES, layout=layout, chunking=chunking
        )
        made.append(self._make(twins))
        self.memory: list[list[Array]] = [memory for _, memory in made]
        self.regions: list[tuple[Region, ...]] = [regions for regions, _ in made]

    def _make(self, placement: Placement) -> tuple[tuple[Region, ...], list[Array]]:
        self.placements.append(placement)
        memory = [self._random.integers(1, 256, mapping.length_bytes, dtype=np.uint8) for mapping in placement.mappings]
        aligned = [np.zeros(len(each) + 64, dtype=np.uint8) for each in memory]
        for index, each in enumerate(memory):  # as mapped memory is, for kernels
            first = -aligned[index].ctypes.data % 64
            aligned[index] = aligned[index][first : first + len(each)]
            aligned[index][:] = each
        return placement.regions_at([each.ctypes.data for each in aligned]), aligned

    @property
    def device_regions(self) -> tuple[Region, ...]:
        return self.regions[0]

    @property
    def twins(self) -> tuple[Region, ...]:
        return self.regions[-1]

    def copier(
        self, direction: Direction, means: CopyMeans | None = None, *, rank: int = 0, shares: Shares | None = None
    ) -> HostCopier:
        return HostCopier(
            self.geometry, self.regions[rank], self.twins, direction=direction, means=means, shares=shares
        )

    def replicate(self) -> None:
        """Give ranks that hold the same lanes the same bytes."""
        for rank, part in enumerate(self.parts):
            for earlier in range(rank):
                for region in self.regions[rank]:
                    component = self.geometry.component(region.component)
                    if part.lanes(component) == self.parts[earlier].lanes(component):
                        other = self._region(earlier, region)
                        for page in range(region.page_count):
                            page_bytes(self._in(rank), region, page)[:] = page_bytes(self._in(earlier), other, page)

    def content(self) -> list[list[Array]]:
        return [[each.copy() for each in memory] for memory in self.memory]

    def compare(self, expected: list[list[Array]]) -> None:
        for found, wanted in zip(self.memory, expected, strict=True):
            for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
                differing = np.flatnonzero(one != other)
                assert not len(differing), f"mapping {index}: {len(differing)} bytes differ, from {differing[0]} on"

    def expected(
        self, moves: PageMoves, direction: Direction, *, ranks: Sequence[int] | None = None
    ) -> list[list[Array]]:
        """All bytes once every rank has copied, computed a row at a time and without anything that copies in the product."""
        content = self.content()
        for rank in ranks if ranks is not None else range(len(self.parts)):
            for region in self.regions[rank]:
                if region.space in moves and self.geometry.component(region.component) in self.components:
                    self._expect(content, rank, region, moves[region.space], direction)
        return content

    def _expect(
        self,
        content: list[list[Array]],
        rank: int,
        region: Region,
        ids: tuple[PageIdArray, PageIdArray],
        direction: Direction,
    ) -> None:
        component = self.geometry.component(region.component)
        twin = next(
            each
            for each in self.twins
            if (each.component, each.layer, each.space) == (region.component, region.layer, copy_space(region.space))
        )
        kept = kept_bytes(self.geometry, component)
        sides = [content[rank], content[-1]]
        for device_page, twin_page in zip(*ids, strict=True):
            here = page_bytes(self._in(rank, sides[0]), region, int(device_page))
            there = page_bytes(self._in(-1, sides[1]), twin, int(twin_page))
            device, host = here[: len(kept_at(kept, component, region))], there
            chosen = kept_at(kept, component, region)
            begin = (region.lane_start - twin.lane_start) * int(kept.sum())
            target = host[begin : begin + int(chosen.sum())]
            if direction is Direction.BACKUP:
                target[:] = device[chosen]
            else:
                device[chosen] = target

    def _region(self, rank: int, like: Region) -> Region:
        return next(each for each in self.regions[rank] if (each.component, each.layer) == (like.component, like.layer))

    def _in(self, rank: int, content: list[Array] | None = None) -> list[tuple[int, Array]]:
        return [
            (real.ctypes.data, each)
            for real, each in zip(self.memory[rank], content if content is not None else self.memory[rank], strict=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.clear()


def kept_bytes(geometry: ModelGeometry, component: Component) -> npt.NDArray[np.bool_]:
    """Which bytes of a lane block a twin keeps, row by row of what is live at a page's end, in whole 16 bytes."""
    everything = np.ones(component.lane_block_bytes, dtype=bool)
    page = geometry.tokens_per_page
    if component.liveness is Liveness.GROWING or page % component.block or len(window_pages(geometry, 3 * page)) > 1:
        return everything
    kept = np.zeros(component.lane_block_bytes, dtype=bool)
    rows = component.live_rows(3 * page)
    for row in range(rows.start, rows.stop):
        for part, row_bytes in enumerate(component.row_parts_bytes):
            begin = component.part_offset(part) + row % component.slots_per_page * row_bytes
            kept[begin // 16 * 16 : -(-(begin + row_bytes) // 16) * 16] = True
    return kept


def kept_at(kept: npt.NDArray[np.bool_], component: Component, region: Region) -> npt.NDArray[np.bool_]:
    """Which bytes of a rank's page its twin keeps; the padding goes along where all of a page with all lanes does."""
    chosen = np.tile(kept, region.lanes)
    if kept.all() and region.lanes == component.lanes:
        chosen = np.append(chosen, np.ones(region.page_bytes - len(chosen), dtype=bool))
    return chosen


def page_bytes(memory: list[tuple[int, Array]], region: Region, page: int) -> Array:
    extent, within = divmod(page, region.pages_per_extent)
    address = region.extent_addresses[extent] + within * region.page_stride_bytes
    for start, content in memory:
        if start <= address < start + len(content):
            return content[address - start : address - start + region.page_bytes]
    raise AssertionError(f"page {page} of {region.label} is nowhere")


MOVES: PageMoves = {
    IndexSpace.FULL: (pages(7, 0, 3, 4, 5), pages(2, 9, 5, 6, 7)),
    IndexSpace.SWA: (pages(1, 4), pages(3, 0)),
}
PATIENCE_S = 10.0


class Gpu:
    def __init__(self, pools: TwinPools, device: int, rank: int, stack: ExitStack) -> None:
        self.pools, self.device, self.rank = pools, device, rank
        self.sides = [
            [stack.enter_context(Bytes(kind, each, device)) for each in pools.memory[which]]
            for kind, which in ((DEVICE, rank), (HOST, -1))
        ]
        self.regions: list[tuple[Region, ...]] = [
            pools.placements[which].regions_at([each.address for each in side])
            for which, side in zip((rank, -1), self.sides, strict=True)
        ]

    def copier(self, direction: Direction, backend: CopyBackend = CopyBackend.KERNEL, blocks: int = 8) -> HostCopier:
        means = CopyMeans(backend, self.device, blocks)
        return HostCopier(self.pools.geometry, *self.regions, direction=direction, means=means)

    def compare(self, expected: list[list[np.ndarray]]) -> None:
        for side, which in zip(self.sides, (self.rank, -1), strict=True):
            for found, wanted in zip(side, expected[which], strict=True):
                assert np.array_equal(found.read(), wanted)


@contextmanager
def on_gpu(pools: TwinPools, device: int, rank: int = 0) -> Iterator[Gpu]:
    with ExitStack() as stack:
        yield Gpu(pools, device, rank, stack)


@dataclass(frozen=True)
class Streams:
    """Made one after another, so that none of them shares a hardware queue with one that is held."""

    main: runtime.Stream
    other: runtime.Stream
    later: runtime.Stream

    @classmethod
    @contextmanager
    def on(cls, device: int) -> Iterator[Streams]:
        with ExitStack() as stack:
            yield cls(*(stack.enter_context(runtime.Stream.create(device)) for _ in range(3)))


def reached(stream: runtime.Stream) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not stream.idle():
        assert time.monotonic() < deadline, "a stream still waits"

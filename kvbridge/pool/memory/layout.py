"""Stretches of memory, and the layout of a rank's components, of a node's host pool and of its host copies in them.

A `Region` (core.geometry.manifest) has the addresses of the pages of one component's layer. An `Extent` is a piece that is
registered as a whole; pages of several regions may lie in it. An `Origin` (core.wire.messages) is the file or device
allocation that other processes of the host open to reach an extent. A `PageArray` (core.plan) computes addresses of pages.

A *block* is one strided array: in the `layer_first` form one layer of one component, page after page; in the `page_first` form all
layers of all components of an index space, so a page id is one stretch of memory. In device pools a component that decode may keep
in its host pool has a block of its own on both sides of a transfer: its pages then lie alike at source and destination, and the
pages of the others continue from page to page without it. Code behind this module sees strides and never asks for the layout.

Blocks begin at multiples of 4 KiB and never touch, so two addresses of different blocks are never neighbours. A block that is
longer than an extent is cut between pages; the parts touch unless a new mapping begins, so within one mapping a region is one
strided array. Short blocks share extents, since every registration costs the network card an entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Self, TypeVar

from pydantic import Field

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import Region, lane_interval
from kvbridge.core.geometry.tiers import copy_page_bytes, copy_space
from kvbridge.core.ids import FrozenModel, IndexSpace, MemoryKind, NonNegative, Positive, Rank
from kvbridge.core.wire.messages import Origin, SharedRegion

ThingT = TypeVar("ThingT")

Progress = Callable[[int, int], None]
"""Called with (done bytes, total bytes) in the thread of the long operation, at the end with both equal."""

EXTENT_ALIGNMENT_BYTES = 4096
"""Blocks of a placement begin at multiples of this, so that no two share a memory page."""

DEFAULT_EXTENT_BYTES = 1 << 30


def ignore_progress(done_bytes: int, total_bytes: int) -> None:
    """Ignore a progress report."""


def part_of(on_progress: Progress, before_bytes: int, total_bytes: int) -> Progress:
    """Report the progress of one part as progress of a whole, of which `before_bytes` are done."""
    return lambda done_bytes, _: on_progress(before_bytes + done_bytes, total_bytes)


def align_up(length_bytes: int, alignment_bytes: int) -> int:
    """Return the next multiple of `alignment_bytes` that is not less than `length_bytes`."""
    return -(-length_bytes // alignment_bytes) * alignment_bytes


class Extent(FrozenModel):
    """Contiguous memory of this process that is registered as one. It lives as long as its pool.

    No extent of a pool overlaps another, and every page of every region lies in exactly one.
    """

    address: Positive
    length_bytes: Positive
    kind: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0
    origin: Origin | None = None
    """The file or allocation by which other processes of the host reach it; None when they cannot."""
    offset_bytes: NonNegative = 0
    """The beginning of the extent in its origin."""
    label: str = ""
    """A name for error messages ("host pool extent 3")."""

    def holds(self, start: int, stop: int, kind: MemoryKind) -> bool:
        """Return whether the extent holds all of [start, stop) of that kind of memory."""
        return kind is self.kind and self.address <= start and stop <= self.address + self.length_bytes


def pages_per_extent(page_count: int, stride_bytes: int, limit_bytes: int) -> int:
    """Return the number of pages of `stride_bytes` that one extent of at most `limit_bytes` holds.

    Where the limit allows, the next extent begins at a multiple of 4 KiB too: drivers pin whole memory pages, and some refuse to
    pin one again. Raises InvalidInputError when not even one page fits.
    """
    most = limit_bytes // stride_bytes
    if most < 1:
        raise InvalidInputError(
            f"a page of {stride_bytes} bytes is longer than an extent or mapping of {limit_bytes}; raise that limit"
        )
    if most >= page_count:
        return page_count
    step = EXTENT_ALIGNMENT_BYTES // math.gcd(stride_bytes, EXTENT_ALIGNMENT_BYTES)
    return most // step * step or most


def registered_extents(regions: Iterable[Region], shared: Sequence[Extent] = ()) -> list[Extent]:
    """Return the extents that hold `regions`, each once, in address order: the pieces to register.

    Regions whose pages interleave (`page_first`) share an extent, also where each has a single page, which then touch but do not
    interleave; regions that merely touch do not. An extent inside one of `shared`, whole files and allocations, carries its origin.
    """
    spans = sorted(
        (address, address + length_bytes, str(region.memory), region.device, region.page_stride_bytes)
        for region in regions
        for address, _, length_bytes in region.extents()
    )
    merged: list[tuple[int, int, str, int, int]] = []
    for start, stop, kind, device, stride in spans:
        first, before, *home, first_stride = merged[-1] if merged else (0, 0, "", 0, 0)
        interleave = start < before
        one_page = start == before and stride == first_stride and stop - first <= stride
        if home == [kind, device] and (interleave or one_page):
            merged[-1] = (first, max(before, stop), kind, device, first_stride)
        else:
            merged.append((start, stop, kind, device, stride))
    found = []
    for start, stop, kind, device, _ in merged:
        facts: dict[str, Any] = {"label": f"{kind} at {start:#x}"}
        if whole := next((one for one in shared if one.holds(start, stop, MemoryKind(kind))), None):
            offset = start - whole.address
            facts = {"origin": whole.origin, "offset_bytes": offset, "label": f"{whole.label} at {offset}"}
        found.append(Extent(address=start, length_bytes=stop - start, kind=MemoryKind(kind), device=device, **facts))
    return found


class PlacedMapping(FrozenModel):
    """A stretch of memory to create: a shared file or a device allocation."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w.-]+$")
    length_bytes: Positive


class Placement(FrozenModel):
    """The mappings and regions of a pool, all of one kind of memory."""

    mappings: tuple[PlacedMapping, ...] = Field(min_length=1)
    regions: tuple[Region, ...] = Field(min_length=1)
    """`extent_addresses` are offsets, each into the mapping that `homes` numbers at the same position."""
    homes: tuple[tuple[NonNegative, ...], ...]

    @property
    def memory(self) -> MemoryKind:
        """The kind of memory of the mappings."""
        return self.regions[0].memory

    @property
    def device(self) -> int:
        """CUDA ordinal of VRAM; 0 for DRAM."""
        return self.regions[0].device

    @property
    def total_bytes(self) -> int:
        """Bytes of all mappings."""
        return sum(mapping.length_bytes for mapping in self.mappings)

    def page_counts(self) -> dict[IndexSpace, int]:
        """Pages of each index space."""
        return {region.space: region.page_count for region in self.regions}

    def regions_at(self, addresses: Sequence[int]) -> tuple[Region, ...]:
        """The regions once mapping `i` begins at address `addresses[i]`."""
        return tuple(region.at(bases) for region, bases in self._by_region(addresses))

    def shared_regions(self, origins: Sequence[Origin]) -> tuple[SharedRegion, ...]:
        """The regions as another process of the host finds them, when mapping `i` is `origins[i]`."""
        return tuple(SharedRegion(region=region, origins=found) for region, found in self._by_region(origins))

    def _by_region(self, of_mappings: Sequence[ThingT]) -> Iterator[tuple[Region, tuple[ThingT, ...]]]:
        if len(of_mappings) != len(self.mappings):
            raise InvalidInputError(f"{len(self.mappings)} mappings have {len(of_mappings)} addresses or origins")
        for region, homes in zip(self.regions, self.homes, strict=True):
            yield region, tuple(of_mappings[mapping] for mapping in homes)


class Chunking(FrozenModel):
    """The largest pieces that memory may be created and registered in."""

    extent_bytes: Positive = DEFAULT_EXTENT_BYTES
    mapping_bytes: int | None = Field(default=None, ge=EXTENT_ALIGNMENT_BYTES)
    """Longest mapping, rounded down to whole memory pages; None puts a pool into one."""


class RankPart(FrozenModel):
    """The part of a model that one rank holds, and its device."""

    rank: Rank
    pp_size: Positive
    tp_size: Positive
    layers: tuple[NonNegative, ...] = Field(min_length=1)
    """Global layer ids of its pipeline stage, ascending."""
    memory: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0
    """CUDA ordinal of VRAM; 0 for DRAM."""

    @classmethod
    def of(
        cls,
        geometry: ModelGeometry,
        rank: Rank,
        *,
        pp_size: int,
        tp_size: int,
        boundaries: tuple[int, ...] | None = None,
    ) -> Self:
        """The part of `rank` in an instance of pp_size x tp_size ranks, in DRAM; `boundaries` as for `stage_layers`."""
        if rank.tp >= tp_size:
            raise InvalidInputError(f"rank {rank} does not exist with tp_size {tp_size}")
        layers = stage_layers(geometry.layer_count, pp_size, rank.pp, boundaries)
        return cls(rank=rank, pp_size=pp_size, tp_size=tp_size, layers=layers)

    def components(
        self, geometry: ModelGeometry, exclude: Collection[ComponentKind]
    ) -> list[tuple[Component, tuple[int, ...]]]:
        """Every component that this rank holds on its device, and its layers here, both in the geometry's order."""
        kept = [component for component in geometry.components if component.kind not in exclude]
        held = [(each, tuple(layer for layer in each.layers if layer in self.layers)) for each in kept]
        return [(component, layers) for component, layers in held if layers]

    def lanes(self, component: Component) -> tuple[int, int]:
        """The lanes [start, stop) of `component` that this rank holds. Raises UnsupportedError on an uneven split."""
        return lane_interval(component, self.rank.tp, self.tp_size)


def stage_layers(layer_count: int, pp_size: int, pp: int, boundaries: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the global layer ids of pipeline stage `pp`, ascending.

    `boundaries` are the first layers of the stages 1 to pp_size - 1. Without boundaries stages are equally long; where the division
    leaves a rest, the first stages have one layer more. Engines differ there, so name the boundaries in that case.
    """
    if pp_size < 1 or not 0 <= pp < pp_size or pp_size > layer_count:
        raise InvalidInputError(f"stage {pp} of {pp_size} does not exist in a model of {layer_count} layers")
    boundaries = boundaries or even_boundaries(layer_count, pp_size)
    edges = (0, *boundaries, layer_count)
    if len(edges) != pp_size + 1 or any(left >= right for left, right in pairwise(edges)):
        raise InvalidInputError(
            f"boundaries of {pp_size} stages are {pp_size - 1} ascending layer ids from 1 to {layer_count - 1}, "
            f"got {boundaries}"
        )
    return tuple(range(edges[pp], edges[pp + 1]))


def even_boundaries(layer_count: int, pp_size: int) -> tuple[int, ...]:
    """Return the first layers of the stages 1 to pp_size - 1 without configured boundaries."""
    each, rest = divmod(layer_count, pp_size)
    return tuple(stage * each + min(stage, rest) for stage in range(1, pp_size))


def device_placement(
    geometry: ModelGeometry,
    part: RankPart,
    *,
    page_counts: Mapping[IndexSpace, int],
    exclude: Collection[ComponentKind] = frozenset(),
    chunking: Chunking | None = None,
    page_first: bool = False,
) -> Placement:
    """Lay out the device pool of one rank: every component but `exclude` (on decode: those in the host pool).

    With `page_first`, strides are still multiples of every component's `page_alignment_bytes`, as attention kernels want them.
    Raises InvalidInputError when a space that is needed has no page count, a page is longer than an extent, or heads do not divide.
    """
    found: list[_Placed] = []
    for component, layers in part.components(geometry, exclude):
        page_count = page_counts.get(component.space, 0)
        if page_count < 1:
            raise InvalidInputError(f"{component.kind} on rank {part.rank} needs a page of space '{component.space}'")
        lanes = part.lanes(component)
        page_bytes = component.page_bytes(lanes[1] - lanes[0])
        where = {"memory": part.memory, "device": part.device}
        for layer in layers:
            region = _alone(component, layer, component.space, page_count, page_bytes, lanes).model_copy(update=where)
            found.append((component.kind if component.host_capable else "", region))
    if not found:
        raise InvalidInputError(
            f"rank {part.rank} with layers {part.layers} would hold no component of '{geometry.name}' on its device"
        )
    alignment = math.lcm(*(component.page_alignment_bytes for component in geometry.components))
    return _pack(found, f"device-{part.rank}", chunking, page_first=page_first, alignment_bytes=alignment)


def host_placement(
    geometry: ModelGeometry,
    kinds: Collection[ComponentKind],
    *,
    page_count: int,
    layers: Collection[int] | None = None,
    layout: HostLayout = HostLayout.LAYER_FIRST,
    chunking: Chunking | None = None,
) -> Placement:
    """Lay out a node's host pool, which all ranks share: pages of `kinds` for `layers` (default: all of the model).

    Raises InvalidInputError for a kind that cannot live on the host or that no layer has, UnsupportedError for one that
    is split by heads.
    """
    found: list[_Placed] = []
    for component in (geometry.component(kind) for kind in sorted(set(kinds))):
        if not component.host_capable:
            raise InvalidInputError(f"{component.kind} of '{geometry.name}' cannot live in the host pool")
        if component.lanes > 1:
            raise UnsupportedError(
                f"{component.kind} of '{geometry.name}' is split by heads over ranks, and all ranks share a page of the host pool"
            )
        held = [layer for layer in component.layers if layers is None or layer in layers]
        if not held:
            raise InvalidInputError(f"no layer of this node has {component.kind}, so its host pool cannot hold it")
        if page_count > 0:
            found += [("", _alone(component, at, IndexSpace.HOST, page_count, component.page_bytes())) for at in held]
    if not found:
        raise InvalidInputError(f"a host pool needs a component and a page, got {sorted(kinds)} and {page_count} pages")
    return _pack(found, "host", chunking, page_first=layout is HostLayout.PAGE_FIRST)


def copy_placement(
    geometry: ModelGeometry,
    parts: Collection[RankPart],
    components: Iterable[Component],
    *,
    page_counts: Mapping[IndexSpace, int],
    layout: HostLayout = HostLayout.LAYER_FIRST,
    chunking: Chunking | None = None,
) -> Placement:
    """Lay out the host copies of `components`, for all layers and lanes that a node's ranks hold.

    `page_counts` are of the spaces of copies. A page of a component that is split by heads holds the lanes of all ranks here, one
    after another; each rank uses its own part of the page. Raises InvalidInputError when a space that is needed has no page count,
    or no layer of the components is here.
    """
    found: list[_Placed] = []
    for component in components:
        space = copy_space(component.space)
        page_count = page_counts.get(space, 0)
        if page_count < 1:
            raise InvalidInputError(f"host copies of {component.kind} need at least one page of space '{space}'")
        for layer in component.layers:
            held = [part.lanes(component) for part in parts if layer in part.layers]
            if held:
                start, stop = min(start for start, _ in held), max(stop for _, stop in held)
                page_bytes = copy_page_bytes(geometry, component, stop - start)
                found.append(("", _alone(component, layer, space, page_count, page_bytes, (start, stop))))
    if not found:
        raise InvalidInputError(f"this node holds no component of '{geometry.name}' that could have copies on the host")
    return _pack(found, "twins", chunking, page_first=layout is HostLayout.PAGE_FIRST)


_Placed = tuple[str, Region]
"""A region to place, after the name of its block: regions of one space and name share a block in a `page_first` layout."""


def _alone(
    component: Component,
    layer: int,
    space: IndexSpace,
    page_count: int,
    page_bytes: int,
    lanes: tuple[int, int] = (0, 1),
) -> Region:
    """Return a layer's region of DRAM at address 0, page after page, in one extent."""
    return Region(
        component=component.kind,
        layer=layer,
        space=space,
        memory=MemoryKind.DRAM,
        extent_addresses=(0,),
        pages_per_extent=page_count,
        page_count=page_count,
        page_bytes=page_bytes,
        page_stride_bytes=page_bytes,
        lane_start=lanes[0],
        lane_stop=lanes[1],
    )


def _pack(
    found: list[_Placed], name: str, chunking: Chunking | None, *, page_first: bool, alignment_bytes: int = 1
) -> Placement:
    """Put blocks one after another into mappings; `alignment_bytes` is of the stride of blocks with several regions."""
    chunking = chunking or Chunking()
    limit = chunking.mapping_bytes and chunking.mapping_bytes // EXTENT_ALIGNMENT_BYTES * EXTENT_ALIGNMENT_BYTES
    blocks: dict[tuple[str, ...] | int, list[Region]] = {}
    for number, (block_name, region) in enumerate(found):
        blocks.setdefault((region.space, block_name) if page_first else number, []).append(region)
    ends, regions, homes = [0], list[Region](), list[tuple[int, ...]]()
    for block in (blocks[key] for key in sorted(blocks)):
        page_count = block[0].page_count
        stride = sum(region.page_bytes for region in block)
        stride = align_up(stride, alignment_bytes) if page_first else stride
        try:
            per_extent = pages_per_extent(
                page_count, stride, min(chunking.extent_bytes, limit or chunking.extent_bytes)
            )
        except InvalidInputError as error:
            kinds = ", ".join(dict.fromkeys(region.component for region in block))
            raise InvalidInputError(f"{kinds}, {len(block)} layers together: {error}") from error
        places: list[tuple[int, int]] = []
        for page in range(0, page_count, per_extent):
            start, length = ends[-1], min(per_extent, page_count - page) * stride
            if page == 0 and start:
                start = align_up(start + 1, EXTENT_ALIGNMENT_BYTES)  # apart from the block before
            if limit is not None and start and start + length > limit:
                ends.append(0)
                start = 0
            ends[-1] = start + length
            places.append((len(ends) - 1, start))
        begin = 0
        for region in block:
            offsets = tuple(offset + begin for _, offset in places)
            form = {"extent_addresses": offsets, "pages_per_extent": per_extent, "page_stride_bytes": stride}
            regions.append(region.model_copy(update=form))
            homes.append(tuple(mapping for mapping, _ in places))
            begin += region.page_bytes
    mappings = tuple(
        PlacedMapping(
            name=name if len(ends) == 1 else f"{name}-{index}", length_bytes=align_up(end, EXTENT_ALIGNMENT_BYTES)
        )
        for index, end in enumerate(ends)
    )
    return Placement(mappings=mappings, regions=tuple(regions), homes=tuple(homes))

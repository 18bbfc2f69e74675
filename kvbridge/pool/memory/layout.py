"""The layout in memory of the components of a rank, of a node's host pool or of its twins.

A *block* is what is laid out as one: in the `layer_first` form one layer of one component, page after page; in the
`page_first` forms (which place the same bytes, and differ in what copies them) all layers of all components of an index
space, and page `p` of every one of them before page `p + 1` of any: so a page id is one stretch of memory. In device pools
a component that decode may keep in its host pool has a block of its own, on either side of a transfer: its pages lie alike
where they come from and where they go to, and those of the others go on from page to page without it. The layouts differ
in which regions share a block, and so in strides; nothing after this module asks which one it was.

Blocks begin at multiples of 4 KiB and never touch, so that two addresses of different blocks are never neighbours. A
block that is longer than an extent is cut between pages; the parts touch unless a new mapping begins, so that within
one mapping a region is one strided array. Short blocks share extents, since every registration costs the network card
an entry.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Self, TypeVar

from pydantic import Field, model_validator

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import Region, lane_interval
from kvbridge.core.geometry.tiers import copy_page_bytes, copy_space
from kvbridge.core.ids import FrozenModel, IndexSpace, MemoryKind, NonNegative, Positive, Rank
from kvbridge.core.wire.shared_memory import Origin, SharedRegion
from kvbridge.pool.memory.extent import EXTENT_ALIGNMENT_BYTES, align_up, pages_per_extent

ThingT = TypeVar("ThingT")

DEFAULT_EXTENT_BYTES = 1 << 30


class PlacedMapping(FrozenModel):
    """One stretch of memory to create: a shared file or a device allocation."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w.-]+$")
    length_bytes: Positive


class Placement(FrozenModel):
    """A whole pool: its mappings and its regions. All of it is one kind of memory."""

    mappings: tuple[PlacedMapping, ...] = Field(min_length=1)
    regions: tuple[Region, ...] = Field(min_length=1)
    """`extent_addresses` are offsets, each into the mapping that `homes` numbers at the same position."""
    homes: tuple[tuple[NonNegative, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        lengths = [mapping.length_bytes for mapping in self.mappings]
        for region, homes in zip(self.regions, self.homes, strict=True):
            for mapping, (offset, _, length_bytes) in zip(homes, region.extents(), strict=True):
                if mapping >= len(lengths) or offset + length_bytes > lengths[mapping]:
                    raise ValueError(f"{region.label}: an extent does not lie within its mapping")
        return self

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
            raise InvalidInputError(
                f"a placement of {len(self.mappings)} mappings needs one address or origin for each, got {len(of_mappings)}"
            )
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
        """Every component that this rank holds on its device, with the layers of it, both in the geometry's order."""
        mine = set(self.layers)
        held = [
            (component, tuple(layer for layer in component.layers if layer in mine))
            for component in geometry.components
            if component.kind not in exclude
        ]
        return [(component, layers) for component, layers in held if layers]

    def lanes(self, component: Component) -> tuple[int, int]:
        """The lanes [start, stop) of `component` that this rank holds. Raises UnsupportedError on an uneven split."""
        return lane_interval(component, self.rank.tp, self.tp_size)


def stage_layers(layer_count: int, pp_size: int, pp: int, boundaries: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return the global layer ids of pipeline stage `pp`, ascending.

    `boundaries` are the first layers of the stages 1 to pp_size - 1. Without any, stages are equally long and the
    first ones hold one layer more where the division leaves a rest; engines differ there, so name them when it does.
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
    """Return the first layers of the stages 1 to pp_size - 1 when nobody has named them."""
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

    Raises InvalidInputError when a space that is needed has no page count, a page is longer than an extent, or heads do
    not divide.
    """
    found = []
    for component, layers in part.components(geometry, exclude):
        page_count = page_counts.get(component.space, 0)
        if page_count < 1:
            raise InvalidInputError(
                f"{component.kind} on rank {part.rank} needs at least one page of space '{component.space}'"
            )
        start, stop = part.lanes(component)
        page_bytes, apart = component.page_bytes(stop - start), component.host_capable
        form = _Pages(component.kind, component.space, page_count, page_bytes, (start, stop), apart)
        found += [(form, layer) for layer in layers]
    if not found:
        raise InvalidInputError(
            f"rank {part.rank} with layers {part.layers} would hold no component of '{geometry.name}' on its device"
        )
    alignment = math.lcm(*(component.page_alignment_bytes for component in geometry.components)) if page_first else 1
    blocks = _blocks(found, page_first=page_first, alignment_bytes=alignment)
    return _pack(blocks, f"device-{part.rank}", chunking or Chunking(), memory=part.memory, device=part.device)


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
    found = []
    for component in (geometry.component(kind) for kind in sorted(set(kinds))):
        if not component.host_capable:
            raise InvalidInputError(f"{component.kind} of '{geometry.name}' cannot live in the host pool")
        if component.lanes > 1:
            raise UnsupportedError(
                f"{component.kind} of '{geometry.name}' is split by heads over ranks; the host pool holds pages "
                f"that all ranks of a node share"
            )
        held = tuple(layer for layer in component.layers if layers is None or layer in layers)
        if not held:
            raise InvalidInputError(f"no layer of this node has {component.kind}, so its host pool cannot hold it")
        form = _Pages(component.kind, IndexSpace.HOST, page_count, component.page_bytes())
        found += [(form, layer) for layer in held]
    if not found or page_count < 1:
        raise InvalidInputError(f"a host pool needs a component and a page, got {sorted(kinds)} and {page_count} pages")
    return _pack(_blocks(found, page_first=layout is HostLayout.PAGE_FIRST), "host", chunking or Chunking())


def twin_placement(
    geometry: ModelGeometry,
    parts: Collection[RankPart],
    components: Iterable[Component],
    *,
    page_counts: Mapping[IndexSpace, int],
    layout: HostLayout = HostLayout.LAYER_FIRST,
    chunking: Chunking | None = None,
) -> Placement:
    """Lay out a node's twins of `components`, for all layers and lanes that its ranks hold; `page_counts` are of twin spaces.

    A page of a component that is split by heads holds the lanes of all ranks here, one after another, and each rank's part of it
    is its own. Raises InvalidInputError when a space that is needed has no page count, or nothing of the components is here.
    """
    found = []
    for component in components:
        space = copy_space(component.space)
        page_count = page_counts.get(space, 0)
        if page_count < 1:
            raise InvalidInputError(f"twins of {component.kind} need at least one page of space '{space}'")
        for layer in component.layers:
            held = [part.lanes(component) for part in parts if layer in part.layers]
            if held:
                start, stop = min(start for start, _ in held), max(stop for _, stop in held)
                page_bytes = copy_page_bytes(geometry, component, stop - start)
                found.append((_Pages(component.kind, space, page_count, page_bytes, (start, stop)), layer))
    if not found:
        raise InvalidInputError(f"this node holds no component of '{geometry.name}' that could have twins on the host")
    return _pack(_blocks(found, page_first=layout is HostLayout.PAGE_FIRST), "twins", chunking or Chunking())


# ------------------------------------------------------------------------------------------- inside


@dataclass(frozen=True, slots=True)
class _Pages:
    """The form of the pages of one component."""

    kind: ComponentKind
    space: IndexSpace
    page_count: int
    page_bytes: int
    lanes: tuple[int, int] = (0, 1)
    apart: bool = False
    """True if a page of it is a stretch of its own, apart from the other components of the space."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Pages of some layers, all of one space, interleaved: page 0 of each of them, then page 1 of each, ..."""

    layers: tuple[tuple[_Pages, int], ...]
    alignment_bytes: int = 1
    """Alignment of the stride."""

    @property
    def page_count(self) -> int:
        return self.layers[0][0].page_count

    @property
    def stride_bytes(self) -> int:
        return align_up(sum(form.page_bytes for form, _ in self.layers), self.alignment_bytes)

    @property
    def label(self) -> str:
        kinds = dict.fromkeys(form.kind for form, _ in self.layers)
        return f"{', '.join(kinds)}, {len(self.layers)} layers together"


def _blocks(found: list[tuple[_Pages, int]], *, page_first: bool, alignment_bytes: int = 1) -> list[_Block]:
    if not page_first:
        return [_Block((each,)) for each in found]
    together = sorted(found, key=_home)  # stable: components and layers keep their order
    return [_Block(tuple(each), alignment_bytes) for _, each in groupby(together, key=_home)]


def _home(found: tuple[_Pages, int]) -> tuple[IndexSpace, str]:
    """The key of the block in which pages lie, page by page."""
    form, _ = found
    return form.space, form.kind if form.apart else ""


class _Packer:
    """Puts pieces one after another into mappings."""

    def __init__(self, mapping_bytes: int | None) -> None:
        self._mapping_bytes = mapping_bytes
        self._ends = [0]

    def put(self, length: int, *, first: bool) -> tuple[int, int]:
        """Return (mapping, offset) of a piece: apart from the piece before if it is the first of its block, else behind it."""
        start = self._ends[-1]
        if first and start:
            start = align_up(start + 1, EXTENT_ALIGNMENT_BYTES)
        if self._mapping_bytes is not None and start and start + length > self._mapping_bytes:
            self._ends.append(0)
            start = 0
        self._ends[-1] = start + length
        return len(self._ends) - 1, start

    def mappings(self, name: str) -> tuple[PlacedMapping, ...]:
        """The mappings that hold everything that was put."""
        return tuple(
            PlacedMapping(
                name=name if len(self._ends) == 1 else f"{name}-{index}",
                length_bytes=align_up(end, EXTENT_ALIGNMENT_BYTES),
            )
            for index, end in enumerate(self._ends)
        )


def _pack(
    blocks: list[_Block], name: str, chunking: Chunking, *, memory: MemoryKind = MemoryKind.DRAM, device: int = 0
) -> Placement:
    mapping_bytes = chunking.mapping_bytes
    if mapping_bytes is not None:
        mapping_bytes = mapping_bytes // EXTENT_ALIGNMENT_BYTES * EXTENT_ALIGNMENT_BYTES
    longest = min(chunking.extent_bytes, mapping_bytes or chunking.extent_bytes)
    packer = _Packer(mapping_bytes)
    regions: list[Region] = []
    homes: list[tuple[int, ...]] = []
    for block in blocks:
        try:
            per_extent = pages_per_extent(block.page_count, block.stride_bytes, longest)
        except InvalidInputError as error:
            raise InvalidInputError(f"{block.label}: {error}") from error
        mappings, offsets = zip(
            *(
                packer.put(min(per_extent, block.page_count - first) * block.stride_bytes, first=first == 0)
                for first in range(0, block.page_count, per_extent)
            ),
            strict=True,
        )
        homes += [mappings] * len(block.layers)
        begin = 0
        for form, layer in block.layers:
            regions.append(
                Region(
                    component=form.kind,
                    layer=layer,
                    space=form.space,
                    memory=memory,
                    device=device,
                    extent_addresses=tuple(offset + begin for offset in offsets),
                    pages_per_extent=per_extent,
                    page_count=form.page_count,
                    page_bytes=form.page_bytes,
                    page_stride_bytes=block.stride_bytes,
                    lane_start=form.lanes[0],
                    lane_stop=form.lanes[1],
                )
            )
            begin += form.page_bytes
    return Placement(mappings=packer.mappings(name), regions=tuple(regions), homes=tuple(homes))

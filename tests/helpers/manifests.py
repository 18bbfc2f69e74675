"""Manifests over memory that need not exist: regions at made-up addresses, in any layout."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region, fingerprint, lane_interval
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank


@dataclass(frozen=True)
class Layout:
    page_first: bool = False
    pages_per_extent: int | None = None
    stride_extra_bytes: int = 0
    layer_gap_bytes: int = 0
    """Between the layers of a page, in page_first."""
    gap_bytes: int = 64
    """Between any two extents; 0 lets all of them touch."""


@dataclass
class AddressSpace:
    """Hands out addresses, upwards; `extents` are the (start, length) that operations must not leave."""

    next: int = 0
    extents: list[tuple[int, int]] = field(default_factory=list)

    def take(self, length: int, gap_bytes: int) -> int:
        start = self.next
        self.extents.append((start, length))
        self.next += length + gap_bytes
        return start


def new_region(
    component: ComponentKind,
    layer: int,
    extents: Iterable[int],
    *,
    pages: int,
    page_bytes: int,
    per_extent: int = 0,
    stride: int = 0,
    space: IndexSpace = IndexSpace.FULL,
    lanes: tuple[int, int] = (0, 1),
) -> Region:
    """A region in host memory at addresses of extents, of one extent and without gaps between its pages unless told otherwise."""
    return Region(
        component=component,
        layer=layer,
        space=space,
        memory=MemoryKind.DRAM,
        extent_addresses=tuple(extents),
        pages_per_extent=per_extent or pages,
        page_count=pages,
        page_bytes=page_bytes,
        page_stride_bytes=stride or page_bytes,
        lane_start=lanes[0],
        lane_stop=lanes[1],
    )


Held = tuple[Component, list[int], tuple[int, int]]
"""A component with its layers and lanes."""


def place(held: list[Held], *, space: IndexSpace, page_count: int, into: AddressSpace, layout: Layout) -> list[Region]:
    """Lay out components: each layer by itself or (page_first) all of them page by page."""
    parts = [(component, layer, lanes) for component, layers, lanes in held for layer in layers]
    per_extent = min(layout.pages_per_extent or page_count, page_count)
    regions = []
    for block in [parts] if layout.page_first else [[part] for part in parts]:
        sizes = [component.page_bytes(lanes[1] - lanes[0]) for component, _, lanes in block]
        stride = sum(sizes) + layout.layer_gap_bytes * len(block) + layout.stride_extra_bytes
        starts = [into.take(per_extent * stride, layout.gap_bytes) for _ in range(0, page_count, per_extent)]
        for (component, layer, lanes), size in zip(block, sizes, strict=True):
            form = {"pages": page_count, "page_bytes": size, "per_extent": per_extent, "stride": stride}
            regions.append(new_region(component.kind, layer, starts, space=space, lanes=lanes, **form))
            starts = [start + size + layout.layer_gap_bytes for start in starts]
    return regions


def moved(region: Region, by: int) -> Region:
    return region.model_copy(update={"extent_addresses": tuple(start + by for start in region.extent_addresses)})


@dataclass(frozen=True)
class Instance:
    geometry: ModelGeometry
    page_counts: dict[IndexSpace, int]
    pp_size: int = 1
    tp_size: int = 1
    boundaries: tuple[int, ...] = ()
    """First layers of the stages but the first; pp_size - 1 of them."""
    host: frozenset[ComponentKind] = frozenset()
    own_host: bool = False
    """Each rank has host memory of its own, as engines bring it."""
    layouts: dict[ComponentKind, Layout] = field(default_factory=dict)
    together: frozenset[IndexSpace] = frozenset()
    """Spaces of the device whose components are laid out as one, in the layout of the first of them."""
    base: int = 1 << 40

    @property
    def ranks(self) -> list[Rank]:
        return [Rank(pp=pp, tp=tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]

    def layers(self, pp: int) -> range:
        edges = (0, *self.boundaries, self.geometry.layer_count)
        return range(edges[pp], edges[pp + 1])

    def device_regions(self, rank: Rank, into: AddressSpace) -> list[Region]:
        held = [
            (component, layers, lane_interval(component, rank.tp, self.tp_size))
            for component in self.geometry.components
            if (self.own_host or component.kind not in self.host)
            and (layers := [layer for layer in component.layers if layer in self.layers(rank.pp)])
        ]
        in_host = [[each] for each in held if each[0].kind in self.host]
        on_device = self._blocks([each for each in held if each[0].kind not in self.host])
        regions = [region for block in on_device for region in self._placed(block, block[0][0].space, into)]
        return regions + [region for block in in_host for region in self._placed(block, IndexSpace.HOST, into)]

    def host_regions(self, into: AddressSpace) -> list[Region]:
        if self.own_host:
            return []
        kinds = [self.geometry.component(kind) for kind in sorted(self.host)]
        blocks = [[(component, list(component.layers), (0, component.lanes))] for component in kinds]
        return [region for block in blocks for region in self._placed(block, IndexSpace.HOST, into)]

    def _blocks(self, held: list[Held]) -> list[list[Held]]:
        blocks: list[list[Held]] = []
        joint: dict[IndexSpace, list[Held]] = {}
        for each in held:
            space = each[0].space
            if space not in self.together or space not in joint:
                blocks.append([])
                joint[space] = blocks[-1]
            joint[space].append(each)
        return blocks

    def _placed(self, block: list[Held], space: IndexSpace, into: AddressSpace) -> list[Region]:
        layout = self.layouts.get(block[0][0].kind, Layout())
        return place(block, space=space, page_count=self.page_counts[space], into=into, layout=layout)

    def manifest(self, rank: Rank, regions: list[Region]) -> RankManifest:
        return RankManifest(
            fingerprint=fingerprint(self.geometry),
            rank=rank,
            pp_size=self.pp_size,
            tp_size=self.tp_size,
            regions=tuple(regions),
            own_host=self.own_host,
        )

    def manifests(self) -> list[RankManifest]:
        found = []
        for ordinal, rank in enumerate(self.ranks):
            into = AddressSpace(next=self.base + (ordinal << 44))
            found.append(self.manifest(rank, self.device_regions(rank, into) + self.host_regions(into)))
        return found

    def with_host(self, *kinds: ComponentKind) -> "Instance":
        return replace(self, host=frozenset(kinds))

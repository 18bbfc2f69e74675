"""Manifests over memory that need not exist: regions at made-up addresses, in any layout."""

from dataclasses import dataclass, field, replace

from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region, fingerprint, lane_interval
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank


@dataclass(frozen=True)
class Layout:
    """How regions lie in memory."""

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
        """Reserve an extent of `length` bytes."""
        start = self.next
        self.extents.append((start, length))
        self.next += length + gap_bytes
        return start


def place(
    component: Component,
    layers: list[int],
    *,
    space: IndexSpace,
    page_count: int,
    lanes: tuple[int, int],
    into: AddressSpace,
    layout: Layout,
) -> list[Region]:
    """Lay out a component of some layers, each layer by itself or (page_first) page by page."""
    page_bytes = component.page_bytes(lanes[1] - lanes[0])
    blocks = [layers] if layout.page_first else [[layer] for layer in layers]
    per_extent = min(layout.pages_per_extent or page_count, page_count)
    regions = []
    for block in blocks:
        step = page_bytes + layout.layer_gap_bytes
        stride = step * len(block) + layout.stride_extra_bytes
        starts = [into.take(per_extent * stride, layout.gap_bytes) for _ in range(0, page_count, per_extent)]
        regions += [
            Region(
                component=component.kind,
                layer=layer,
                space=space,
                memory=MemoryKind.DRAM,
                extent_addresses=tuple(start + index * step for start in starts),
                pages_per_extent=per_extent,
                page_count=page_count,
                page_bytes=page_bytes,
                page_stride_bytes=stride,
                lane_start=lanes[0],
                lane_stop=lanes[1],
            )
            for index, layer in enumerate(block)
        ]
    return regions


def moved(region: Region, by: int) -> Region:
    """Return the same region as another process maps it."""
    return region.model_copy(update={"extent_addresses": tuple(start + by for start in region.extent_addresses)})


@dataclass(frozen=True)
class Instance:
    """What the ranks of an instance have in common."""

    geometry: ModelGeometry
    page_counts: dict[IndexSpace, int]
    pp_size: int = 1
    tp_size: int = 1
    boundaries: tuple[int, ...] = ()
    """First layers of the stages but the first; pp_size - 1 of them."""
    host: frozenset[ComponentKind] = frozenset()
    layouts: dict[ComponentKind, Layout] = field(default_factory=dict)
    base: int = 1 << 40

    @property
    def ranks(self) -> list[Rank]:
        """All ranks, in the order of their ordinals."""
        return [Rank(pp=pp, tp=tp) for pp in range(self.pp_size) for tp in range(self.tp_size)]

    def layers(self, pp: int) -> range:
        """The layers of a stage."""
        edges = (0, *self.boundaries, self.geometry.layer_count)
        return range(edges[pp], edges[pp + 1])

    def device_regions(self, rank: Rank, into: AddressSpace) -> list[Region]:
        """Everything that a rank holds on its device."""
        found = []
        for component in self.geometry.components:
            held = [layer for layer in component.layers if layer in self.layers(rank.pp)]
            if held and component.kind not in self.host:
                found += place(
                    component,
                    held,
                    space=component.space,
                    page_count=self.page_counts[component.space],
                    lanes=lane_interval(component, rank.tp, self.tp_size),
                    into=into,
                    layout=self.layouts.get(component.kind, Layout()),
                )
        return found

    def host_regions(self, into: AddressSpace) -> list[Region]:
        """The node's host pool: all layers, all lanes."""
        found = []
        for kind in sorted(self.host):
            component = self.geometry.component(kind)
            found += place(
                component,
                list(component.layers),
                space=IndexSpace.HOST,
                page_count=self.page_counts[IndexSpace.HOST],
                lanes=(0, component.lanes),
                into=into,
                layout=self.layouts.get(kind, Layout()),
            )
        return found

    def manifest(self, rank: Rank, regions: list[Region]) -> RankManifest:
        """The manifest of a rank with these regions."""
        return RankManifest(
            fingerprint=fingerprint(self.geometry),
            rank=rank,
            pp_size=self.pp_size,
            tp_size=self.tp_size,
            regions=tuple(regions),
        )

    def manifests(self) -> list[RankManifest]:
        """Manifests of all ranks, each at addresses of its own."""
        found = []
        for ordinal, rank in enumerate(self.ranks):
            into = AddressSpace(next=self.base + (ordinal << 44))
            found.append(self.manifest(rank, self.device_regions(rank, into) + self.host_regions(into)))
        return found

    def with_host(self, *kinds: ComponentKind) -> "Instance":
        """The same instance with some components in the host pool."""
        return replace(self, host=frozenset(kinds))

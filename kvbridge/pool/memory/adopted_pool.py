"""A device pool whose memory an engine made and keeps.

The engine's memory is described, never touched.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region, check_manifest, fingerprint
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.memory.extent import Extent, pages_per_extent
from kvbridge.pool.memory.layout import DEFAULT_EXTENT_BYTES, RankPart
from kvbridge.pool.memory.pools import MemoryPool


class AdoptedPool(MemoryPool):
    """The engine's own cache memory as regions and extents. The engine frees it, when no peer holds a manifest of it."""

    def __init__(
        self,
        geometry: ModelGeometry,
        part: RankPart,
        given: Sequence[Region],
        *,
        exclude: Collection[ComponentKind] = frozenset(),
        shared: Sequence[Extent] = (),
        extent_bytes: int = DEFAULT_EXTENT_BYTES,
    ) -> None:
        """Check and adopt `given`: every component of `part` but `exclude`, each layer once, in the geometry's form.

        `given` are regions of one extent each, at this process's addresses; `shared` are whole allocations in which
        some of them lie and that other processes of the host can reach. Raises InvalidInputError that names the
        component and layer that is missing, too much, or of another form.
        """
        _require_complete(geometry, part, given, exclude)
        manifest = RankManifest(
            fingerprint=fingerprint(geometry),
            rank=part.rank,
            pp_size=part.pp_size,
            tp_size=part.tp_size,
            regions=tuple(given),
        )
        check_manifest(manifest, geometry)
        super().__init__(cut_regions(given, extent_bytes), shared)


def cut_regions(given: Sequence[Region], extent_bytes: int) -> tuple[Region, ...]:
    """Cut regions of one extent between pages into extents of at most `extent_bytes`. The order stays.

    Regions that interleave are cut at the same pages, where they follow one pattern: one stride, one page count, all of
    page 0 within one stride. Otherwise no cut could keep their extents apart, and they stay whole, however long.
    """
    cut: dict[tuple[ComponentKind, int], Region] = {}
    for group in _interleaving(given):
        stride, count, start = group[0].page_stride_bytes, group[0].page_count, group[0].extent_addresses[0]
        if all(
            (region.page_stride_bytes, region.page_count) == (stride, count)
            and region.extent_addresses[0] < start + stride
            for region in group
        ):
            per_extent = pages_per_extent(count, stride, extent_bytes)
            cut |= {(region.component, region.layer): _cut(region, per_extent) for region in group}
    return tuple(cut.get((region.component, region.layer), region) for region in given)


def _cut(region: Region, per_extent: int) -> Region:
    pages = range(0, region.page_count, per_extent)
    addresses = tuple(region.extent_addresses[0] + page * region.page_stride_bytes for page in pages)
    return region.model_copy(update={"extent_addresses": addresses, "pages_per_extent": per_extent})


def _require_complete(
    geometry: ModelGeometry, part: RankPart, given: Sequence[Region], exclude: Collection[ComponentKind]
) -> None:
    held = {(component.kind, layer) for component, layers in part.components(geometry, exclude) for layer in layers}
    named = {(region.component, region.layer) for region in given}
    if missing := sorted(held - named):
        kind, layer = missing[0]
        raise InvalidInputError(
            f"rank {part.rank}: the engine gave no memory for {kind} layer {layer} ({len(missing)} regions are missing)"
        )
    if foreign := sorted(named - held):
        kind, layer = foreign[0]
        raise InvalidInputError(
            f"rank {part.rank} holds no {kind} layer {layer} of '{geometry.name}' on its device, but the engine gave it"
        )
    if len(named) != len(given):
        raise InvalidInputError(f"rank {part.rank}: {len(given)} regions for {len(named)} components of layers")
    for region in given:
        if region.space is IndexSpace.HOST or len(region.extent_addresses) != 1:
            raise InvalidInputError(f"rank {part.rank}: {region.label} must be device memory, given as one extent")


def _interleaving(given: Sequence[Region]) -> list[list[Region]]:
    """Group regions whose memory reaches into each other; most groups have one member. Ascending addresses."""
    groups: list[list[Region]] = []
    end = 0
    for region in sorted(given, key=lambda one: (one.memory, one.device, one.extent_addresses[0])):
        start = region.extent_addresses[0]
        stop = start + (region.page_count - 1) * region.page_stride_bytes + region.page_bytes
        last = groups[-1][0] if groups else None
        if last and (last.memory, last.device) == (region.memory, region.device) and start < end:
            groups[-1].append(region)
            end = max(end, stop)
        else:
            groups.append([region])
            end = stop
    return groups

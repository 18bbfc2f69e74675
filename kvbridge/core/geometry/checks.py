"""Whether a rank's manifest can be true: the door that every manifest from outside passes.

Owns: the comparison of regions with the model's geometry, and the proof that no two pages share a byte.
Must not know: who sent the manifest, what will be done with it.

A manifest comes from another process and is not trusted: the work done here is bounded whatever it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Component, ModelGeometry
from kvbridge.core.geometry.manifest import (
    MANIFEST_VERSION,
    RankManifest,
    Region,
    fingerprint,
    lane_interval,
)
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank

ADDRESS_LIMIT = 2**64

MAX_COUNTED_PAGES = 2**22
"""Pages that are compared one by one. Only regions that interleave at different strides come to that."""

IndexArray = npt.NDArray[np.int64]


def check_manifest(manifest: RankManifest, geometry: ModelGeometry) -> None:
    """Check a rank's manifest against the model that it is to hold.

    Raises FingerprintMismatchError when it was made for other bytes, UnsupportedError for another manifest version, and
    InvalidInputError, naming rank, component and layer, for everything else that cannot be true. That every component
    of a layer is present is not checked: which of them a rank needs is the planner's matter.
    """
    if manifest.version != MANIFEST_VERSION:
        raise UnsupportedError(
            f"rank {manifest.rank}: manifest version {manifest.version}, this build reads version {MANIFEST_VERSION}; "
            "run the same release on both sides"
        )
    expected = fingerprint(geometry)
    if manifest.fingerprint != expected:
        raise FingerprintMismatchError(
            f"rank {manifest.rank}: its manifest has fingerprint {manifest.fingerprint}, model '{geometry.name}' has "
            f"{expected}; both sides must serve the same model in the same form"
        )
    for region in manifest.regions:
        _check_region(region, geometry, rank=manifest.rank, tp_size=manifest.tp_size)
    check_disjoint(manifest.regions, rank=manifest.rank)


def _check_region(region: Region, geometry: ModelGeometry, *, rank: Rank, tp_size: int) -> None:
    who = f"rank {rank}: {region.label}"
    try:
        component = geometry.component(region.component)
        lanes = lane_interval(component, rank.tp, tp_size)
    except InvalidInputError as error:
        raise type(error)(f"{who}: {error}") from error
    if region.layer not in component.layers:
        raise InvalidInputError(f"{who}: model '{geometry.name}' has no {component.kind} in this layer")
    _check_space(region, component, who)
    if (region.lane_start, region.lane_stop) != lanes:
        raise InvalidInputError(
            f"{who}: holds lanes [{region.lane_start}, {region.lane_stop}), but rank {rank.tp} of {tp_size} must hold "
            f"[{lanes[0]}, {lanes[1]}) of {component.lanes}"
        )
    page_bytes = component.page_bytes(region.lanes)
    if region.page_bytes != page_bytes:
        raise InvalidInputError(
            f"{who}: pages of {region.page_bytes} bytes, but {region.lanes} lanes take {page_bytes} bytes"
        )


def _check_space(region: Region, component: Component, who: str) -> None:
    if region.space is not IndexSpace.HOST:
        if region.space is not component.space:
            raise InvalidInputError(
                f"{who}: its page ids count space '{region.space}', but this component's count '{component.space}'"
            )
        return
    if not component.host_capable:
        raise InvalidInputError(f"{who}: this component cannot live in the host pool")
    if region.memory is not MemoryKind.DRAM:
        raise InvalidInputError(f"{who}: a host region lies in '{region.memory}', it must lie in 'dram'")


@dataclass(frozen=True, slots=True, eq=False)
class _Extents:
    """Every extent of a manifest: one entry each in arrays of equal length, uint64 except `owner`."""

    owner: IndexArray
    """Index of the extent's region."""
    first: npt.NDArray[np.uint64]
    """Address of the first byte."""
    last: npt.NDArray[np.uint64]
    """Address of the last byte, not of the one after it: that may be 2**64."""
    pages: npt.NDArray[np.uint64]
    stride: npt.NDArray[np.uint64]
    page_bytes: npt.NDArray[np.uint64]


def check_disjoint(regions: Sequence[Region], *, rank: Rank) -> None:
    """Check that no two pages of a rank share a byte and that all lie below 2**64; InvalidInputError otherwise.

    Regions may interleave (`page_first` puts all layers of a page side by side), so what must not overlap are pages,
    not extents. Extents that do not reach into each other need no further look, and neither do those of one stride
    whose pages keep apart within it; only what is left is compared page by page. The layouts in use take
    extents x log(extents) steps.
    """
    extents = _extents(regions, rank)
    order = np.argsort(extents.first, kind="stable")
    reached = np.maximum.accumulate(extents.last[order])
    borders = np.flatnonzero(extents.first[order][1:] > reached[:-1]) + 1
    for members in np.split(order, borders):
        if len(members) > 1 and not _keep_apart_within_stride(extents, members):
            _check_pages(extents, members, regions, rank)


def _extents(regions: Sequence[Region], rank: Rank) -> _Extents:
    rows = [(owner, *extent) for owner, region in enumerate(regions) for extent in _extents_of(region, rank)]
    columns = [np.array(column, dtype=np.uint64) for column in zip(*rows, strict=True)] or [np.empty(0, np.uint64)] * 6
    owner, first, last, pages, stride, page_bytes = columns
    return _Extents(owner.astype(np.int64), first, last, pages, stride, page_bytes)


def _extents_of(region: Region, rank: Rank) -> list[tuple[int, int, int, int, int]]:
    """First and last address, pages, stride and page bytes of each extent, in exact integers."""
    found = []
    for index, first in enumerate(region.extent_addresses):
        pages = min(region.pages_per_extent, region.page_count - index * region.pages_per_extent)
        stop = first + (pages - 1) * region.page_stride_bytes + region.page_bytes
        if stop > ADDRESS_LIMIT:
            raise InvalidInputError(
                f"rank {rank}: {region.label}: extent {index} of {pages} pages at {first:#x} ends beyond 2**64"
            )
        found.append((first, stop - 1, pages, region.page_stride_bytes, region.page_bytes))
    return found


def _keep_apart_within_stride(extents: _Extents, members: IndexArray) -> bool:
    """Whether all have one stride and, on a circle of that many bytes, no page of one lies on a page of another."""
    stride = extents.stride[members[0]]
    if (extents.stride[members] != stride).any():
        return False
    place = extents.first[members] % stride
    order = np.argsort(place, kind="stable")
    place, width = place[order], extents.page_bytes[members][order]
    apart = place[1:] - place[:-1] >= width[:-1]
    return bool(apart.all() and place[0] + (stride - place[-1]) >= width[-1])


def _check_pages(extents: _Extents, members: IndexArray, regions: Sequence[Region], rank: Rank) -> None:
    counts = extents.pages[members]
    total = sum(int(count) for count in counts)
    if total > MAX_COUNTED_PAGES:
        one, other = (regions[extents.owner[member]].label for member in members[:2])
        raise InvalidInputError(
            f"rank {rank}: {one} and {other} reach into each other from {extents.first[members[1]]:#x} on, in a form "
            f"that must be checked page by page, and {total} pages are more than {MAX_COUNTED_PAGES}; give regions "
            "memory of their own, or one stride"
        )
    extent = np.repeat(members, counts.astype(np.int64))
    begins = np.cumsum(counts) - counts
    page = np.arange(total, dtype=np.uint64) - np.repeat(begins, counts.astype(np.int64))
    first = extents.first[extent] + page * extents.stride[extent]
    order = np.argsort(first, kind="stable")
    first, extent = first[order], extent[order]
    last = first + (extents.page_bytes[extent] - np.uint64(1))
    clash = np.flatnonzero(first[1:] <= last[:-1])
    if len(clash):
        one, other = (regions[extents.owner[extent[clash[0] + side]]].label for side in (0, 1))
        raise InvalidInputError(
            f"rank {rank}: pages of {one} and of {other} share memory at {first[clash[0] + 1]:#x}; every region needs "
            "memory of its own"
        )

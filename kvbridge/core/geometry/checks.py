"""Whether a rank's manifest can be true: the check that every manifest from outside passes.

A manifest comes from another process and is not trusted: the work done here follows from its length, whatever it says.
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

IndexArray = npt.NDArray[np.int64]
AddressArray = npt.NDArray[np.uint64]


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
    """Every extent of a manifest, by rising address: one entry each in arrays of equal length, uint64 except `owner`."""

    owner: IndexArray
    """Index of the extent's region."""
    first: AddressArray
    """Address of the first byte."""
    last: AddressArray
    """Address of the last byte, not of the one after it: that may be 2**64."""
    stride: AddressArray
    page_bytes: AddressArray


def check_disjoint(regions: Sequence[Region], *, rank: Rank) -> None:
    """Check that no two pages of a rank share a byte and that all lie below 2**64; InvalidInputError otherwise.

    Regions may interleave (`page_first` puts all layers of a page side by side), so what must not overlap are pages,
    not extents. Extents that reach into each other, or are joined by others that do, form a cluster. All of a cluster must
    have one stride, and on a circle of that many bytes no page of one may lie on a page of another. This takes
    extents x log(extents) steps, however many pages there are; it also refuses pages that would miss each other by luck.
    """
    extents = _extents(regions, rank)
    if not len(extents.first):
        return
    reached = np.maximum.accumulate(extents.last)
    begins = np.concatenate([[True], extents.first[1:] > reached[:-1]])
    heads = np.flatnonzero(begins)
    cluster = np.cumsum(begins) - 1
    head = heads[cluster]
    odd = np.flatnonzero(extents.stride != extents.stride[head])
    if len(odd):
        one, other = (regions[extents.owner[extent]] for extent in (head[odd[0]], odd[0]))
        raise InvalidInputError(
            f"rank {rank}: {one.label} and {other.label} reach into each other around {extents.first[odd[0]]:#x} with strides "
            f"of {one.page_stride_bytes} and {other.page_stride_bytes} bytes; give them memory of their own, or one stride"
        )
    place = extents.first % extents.stride
    around = np.lexsort((place, cluster))
    tails = np.append(heads[1:], len(around)) - 1
    after, turn = np.append(around[1:], around[0]), np.zeros_like(place)
    # Behind the last one comes the first, a turn later.
    after[tails], turn[tails] = around[heads], extents.stride[heads]
    clash = np.flatnonzero(place[after] + turn - place[around] < extents.page_bytes[around])
    if len(clash):
        pair = sorted((around[clash[0]], after[clash[0]]))
        one, other = (regions[extents.owner[extent]].label for extent in pair)
        raise InvalidInputError(
            f"rank {rank}: pages of {one} and of {other} share memory at {extents.first[pair[1]]:#x}, or would if both went "
            "on; every region needs memory of its own"
        )


def _extents(regions: Sequence[Region], rank: Rank) -> _Extents:
    counts = [len(region.extent_addresses) for region in regions]
    first = np.array([address for region in regions for address in region.extent_addresses], dtype=np.uint64)
    owner = np.repeat(np.arange(len(regions)), counts)
    spans = np.array([span for region in regions for span in _spans(region, rank)], dtype=np.uint64)
    beyond = np.flatnonzero(first > np.uint64(ADDRESS_LIMIT - 1) - spans)
    if len(beyond):
        raise _beyond(regions[owner[beyond[0]]], rank)
    order = np.argsort(first, kind="stable")
    owner, first, last = owner[order], first[order], (first + spans)[order]
    stride, page_bytes = (
        np.array([getattr(region, name) for region in regions], dtype=np.uint64)[owner]
        for name in ("page_stride_bytes", "page_bytes")
    )
    return _Extents(owner, first, last, stride, page_bytes)


def _spans(region: Region, rank: Rank) -> list[int]:
    """Return the bytes from the first byte of each extent to its last one."""
    extents = len(region.extent_addresses)
    rest = region.page_count - (extents - 1) * region.pages_per_extent
    full, last = (
        (pages - 1) * region.page_stride_bytes + region.page_bytes - 1 for pages in (region.pages_per_extent, rest)
    )
    spans = [full] * (extents - 1) + [last]
    if spans[0] >= ADDRESS_LIMIT:
        raise _beyond(region, rank)
    return spans


def _beyond(region: Region, rank: Rank) -> InvalidInputError:
    return InvalidInputError(f"rank {rank}: {region.label}: an extent of its pages ends beyond 2**64")

"""Manifests: the memory of one rank's components, as two ranks tell each other, and the check of one from outside.

The pages of a region lie in *extents*, which are registered apart. No operation may cross the border of two extents, since a
network card holds a key for each. Layouts `layer_first` and `page_first` differ in stride only. `PageArray` computes addresses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
from pydantic import Field, model_validator

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError, UnsupportedError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.ids import REQUEST_SPACES, FrozenModel, IndexSpace, MemoryKind, NonNegative, Positive, Rank, Uint64

MANIFEST_VERSION = 1
MOST_EXTENT_BYTES = 2**63 - 1
"""Plans compute with places inside of an extent as int64."""
REGION_PLACE = {"layer", "extent_addresses"}
"""The fields of a region that say which one of its form it is."""


class Region(FrozenModel):
    """The memory of one component of one layer on one rank."""

    component: ComponentKind
    layer: NonNegative
    space: IndexSpace
    """The space that its page ids count: the component's own space on a device, `host` in the host pool."""
    memory: MemoryKind
    device: NonNegative = 0
    """CUDA ordinal of VRAM; 0 for DRAM."""
    extent_addresses: tuple[Uint64, ...] = Field(min_length=1)
    """Virtual address, in the process that owns the transport endpoint, of the region's first page in each extent."""
    pages_per_extent: Positive
    page_count: Positive
    page_bytes: Positive
    page_stride_bytes: Positive
    lane_start: NonNegative = 0
    lane_stop: Positive = 1
    """The lanes [lane_start, lane_stop) of the component that this rank holds."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.page_stride_bytes < self.page_bytes:
            raise ValueError(
                f"{self.label}: pages of {self.page_bytes} bytes overlap at stride {self.page_stride_bytes}"
            )
        if self.pages_per_extent * self.page_stride_bytes > MOST_EXTENT_BYTES:
            raise ValueError(
                f"{self.label}: an extent of {self.pages_per_extent} pages at stride {self.page_stride_bytes} is longer than 2**63 "
                "bytes; name no more pages and no longer stride than its memory has"
            )
        needed = -(-self.page_count // self.pages_per_extent)
        if len(self.extent_addresses) != needed:
            raise ValueError(
                f"{self.label}: {self.page_count} pages of {self.pages_per_extent} an extent need {needed} extents, "
                f"got {len(self.extent_addresses)}"
            )
        if self.lane_stop <= self.lane_start:
            raise ValueError(f"{self.label}: empty lane interval [{self.lane_start}, {self.lane_stop})")
        return self

    @property
    def label(self) -> str:
        """Its name in error messages."""
        where = " (host)" if self.space is IndexSpace.HOST else "" if self.space in REQUEST_SPACES else " (host copy)"
        return f"{self.component} layer {self.layer}{where}"

    @property
    def form(self) -> tuple[object, ...]:
        """Everything but layer and addresses: mostly alike for the regions of one component."""
        return tuple(value for name, value in self if name not in REGION_PLACE)

    @property
    def lanes(self) -> int:
        """Number of lanes that a page of this region holds."""
        return self.lane_stop - self.lane_start

    def extents(self) -> list[tuple[int, int, int]]:
        """Return (address, pages, bytes from the first page's begin to the last one's end) of each extent."""
        # In a page-first pool, pages x stride would reach beyond the memory.
        left = range(self.page_count, 0, -self.pages_per_extent)
        counts = [min(self.pages_per_extent, pages) for pages in left]
        return [
            (address, pages, (pages - 1) * self.page_stride_bytes + self.page_bytes)
            for address, pages in zip(self.extent_addresses, counts, strict=True)
        ]

    def at(self, bases: Iterable[int]) -> Self:
        """Return this region, whose addresses are offsets, with each extent's offset added to its base."""
        addresses = tuple(base + offset for base, offset in zip(bases, self.extent_addresses, strict=True))
        return self.model_copy(update={"extent_addresses": addresses})


class RankManifest(FrozenModel):
    """All regions of one rank. Regions of a node's host pool are listed by every rank of the node, each at its own addresses."""

    version: int = MANIFEST_VERSION
    fingerprint: str
    rank: Rank
    pp_size: Positive
    tp_size: Positive
    regions: tuple[Region, ...]
    own_host: bool = False
    """Whether host regions are this rank's alone. Otherwise they are the node's host pool."""

    def in_host_pool(self, region: Region) -> bool:
        """Return whether a region of this rank is memory that all ranks of its node have in common."""
        return region.space is IndexSpace.HOST and not self.own_host

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank.pp >= self.pp_size or self.rank.tp >= self.tp_size:
            raise ValueError(f"rank {self.rank} does not exist in an instance of {self.pp_size} x {self.tp_size}")
        seen = {(region.component, region.layer, region.space is IndexSpace.HOST) for region in self.regions}
        if len(seen) != len(self.regions):
            raise ValueError(f"rank {self.rank}: a component of a layer is listed twice")
        return self


def fingerprint_facts(geometry: ModelGeometry) -> dict[str, Any]:
    """Return the facts of the fingerprint: everything that decides where a byte of a request belongs, without the model's name.

    A later release that adds a field must leave the field out while it has its default, or earlier releases would not know the
    same model.
    """
    facts = geometry.model_dump(mode="json", exclude={"name"} if geometry.facts else {"name", "facts"})
    facts["components"] = {component["kind"]: component for component in facts["components"]}
    return facts


def fingerprint(geometry: ModelGeometry) -> str:
    """Return 32 hexadecimal digits: BLAKE2b over the canonical JSON of `fingerprint_facts`."""
    text = json.dumps(fingerprint_facts(geometry), sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def first_difference(ours: ModelGeometry, theirs: ModelGeometry) -> str | None:
    """Return a sentence that names the first fact in which two geometries differ, or None when none does."""
    # Facts come first: where facts differ, sizes mostly do, and say less.
    return _difference(ours.facts, theirs.facts, "facts") or _difference(
        fingerprint_facts(ours), fingerprint_facts(theirs), ""
    )


def _difference(ours: object, theirs: object, path: str) -> str | None:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            inner = f"{path}.{key}" if path else key
            if key not in ours:
                return f"{inner} exists only on the peer"
            if key not in theirs:
                return f"{inner} exists only here"
            found = _difference(ours[key], theirs[key], inner)
            if found:
                return found
        return None
    return None if ours == theirs else f"{path} is {ours} here and {theirs} on the peer"


def lane_interval(component: Component, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return the lanes [start, stop) that a tensor-parallel rank holds. Each rank has a component of one lane.

    With more ranks than lanes, neighbouring ranks hold the same lane. Raises UnsupportedError for lanes that cannot be split or
    shared evenly.
    """
    if not 0 <= tp_rank < tp_size:
        raise InvalidInputError(f"tensor-parallel rank {tp_rank} does not exist among {tp_size}")
    if component.lanes == 1:
        return 0, 1
    if component.lanes >= tp_size:
        each, rest = divmod(component.lanes, tp_size)
        if rest:
            raise UnsupportedError(
                f"{component.kind}: {component.lanes} lanes cannot be split evenly over {tp_size} tensor-parallel ranks"
            )
        return tp_rank * each, (tp_rank + 1) * each
    share, rest = divmod(tp_size, component.lanes)
    if rest:
        raise UnsupportedError(
            f"{component.kind}: {tp_size} tensor-parallel ranks cannot share {component.lanes} lanes evenly"
        )
    return tp_rank // share, tp_rank // share + 1


# ------------------------------------------------------------------------------------------- from outside


def check_manifest(manifest: RankManifest, geometry: ModelGeometry) -> None:
    """Check a manifest from another process, which is not trusted, against the model that the rank is to hold.

    The work depends on the manifest's length only. Raises FingerprintMismatchError for a manifest of other bytes, UnsupportedError
    for another manifest version, and InvalidInputError, naming rank, component and layer, for everything else that cannot be true.
    A missing component is no error here: only the planner knows what it needs.
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
    if region.space is not IndexSpace.HOST:
        if region.space is not component.space:
            raise InvalidInputError(
                f"{who}: its page ids count space '{region.space}', but this component's count '{component.space}'"
            )
    elif not component.host_capable:
        raise InvalidInputError(f"{who}: this component cannot live in the host pool")
    elif region.memory is not MemoryKind.DRAM:
        raise InvalidInputError(f"{who}: a host region lies in '{region.memory}', it must lie in 'dram'")
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


def check_disjoint(regions: Sequence[Region], *, rank: Rank) -> None:
    """Raise InvalidInputError when two pages of a rank share a byte, or a page ends beyond 2**64.

    Pages must not overlap, but extents may: `page_first` puts all layers of a page side by side. Extents that reach into each
    other, directly or through others, form a cluster. All extents of a cluster must have one stride, and on a circle of that many
    bytes no page of one may lie on a page of another. The check takes extents x log(extents) steps, however many pages there are.
    It also refuses pages that would miss each other by luck.
    """
    found = [
        (address, number, size - 1, region.page_stride_bytes, region.page_bytes)
        for number, region in enumerate(regions)
        for address, _, size in region.extents()
    ]
    if not found:
        return
    first, owner, span, stride, page_bytes = np.array(sorted(found), dtype=np.uint64).T
    owners = [regions[number] for number in owner.tolist()]
    last = first + span  # of the last byte, since the one after it may be 2**64
    beyond = np.flatnonzero(last < first)
    if len(beyond):
        raise InvalidInputError(f"rank {rank}: {owners[beyond[0]].label}: an extent of its pages ends beyond 2**64")
    begins = np.append(True, first[1:] > np.maximum.accumulate(last)[:-1])
    heads = np.flatnonzero(begins)
    cluster = np.cumsum(begins) - 1
    odd = np.flatnonzero(stride != stride[heads[cluster]])
    if len(odd):
        one, other = owners[heads[cluster[odd[0]]]], owners[odd[0]]
        raise InvalidInputError(
            f"rank {rank}: {one.label} and {other.label} reach into each other around {first[odd[0]]:#x} with strides "
            f"of {one.page_stride_bytes} and {other.page_stride_bytes} bytes; give them memory of their own, or one stride"
        )
    place = first % stride
    around = np.lexsort((place, cluster))
    tails = np.append(heads[1:], len(around)) - 1
    after, turn = np.append(around[1:], around[0]), np.zeros_like(place)
    # Behind the last one comes the first, a turn later.
    after[tails], turn[tails] = around[heads], stride[heads]
    clash = np.flatnonzero(place[after] + turn - place[around] < page_bytes[around])
    if len(clash):
        one, other = sorted((around[clash[0]], after[clash[0]]))
        raise InvalidInputError(
            f"rank {rank}: pages of {owners[one].label} and of {owners[other].label} share memory at {first[other]:#x}, or "
            "would if both went on; every region needs memory of its own"
        )

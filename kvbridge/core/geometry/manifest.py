"""Where the components of one rank lie in memory: what two ranks tell each other when they meet.

A region's pages lie in one or several *extents* (registered stretches of memory); no operation may cross the border of
two extents, since a network card holds a key for each. Page `p` begins at
`extent_addresses[p // pages_per_extent] + (p % pages_per_extent) * page_stride_bytes`. `layer_first` and `page_first`
layouts differ in stride only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any, Self

from pydantic import Field, model_validator

from kvbridge.core.errors import InvalidInputError, UnsupportedError
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
    """What the page ids of this region count: the component's own space on a device, `host` in the host pool."""
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
        """What it is, for error messages."""
        where = " (host)" if self.space is IndexSpace.HOST else "" if self.space in REQUEST_SPACES else " (twin)"
        return f"{self.component} layer {self.layer}{where}"

    @property
    def form(self) -> tuple[object, ...]:
        """Everything but layer and addresses, in which regions of one component mostly are alike."""
        return tuple(value for name, value in self if name not in REGION_PLACE)

    @property
    def lanes(self) -> int:
        """How many lanes a page of this region holds."""
        return self.lane_stop - self.lane_start

    def extents(self) -> list[tuple[int, int, int]]:
        """Return (address, pages, bytes from the first page's begin to the last page's end) of each extent.

        In a page-first pool that is less than pages x stride, which would reach beyond the memory.
        """
        left = range(self.page_count, 0, -self.pages_per_extent)
        counts = [min(self.pages_per_extent, pages) for pages in left]
        return [
            (address, pages, (pages - 1) * self.page_stride_bytes + self.page_bytes)
            for address, pages in zip(self.extent_addresses, counts, strict=True)
        ]

    def at(self, bases: Iterable[int]) -> Self:
        """A region whose addresses are offsets, once the memory of each extent begins at its base."""
        addresses = tuple(base + offset for base, offset in zip(bases, self.extent_addresses, strict=True))
        return self.model_copy(update={"extent_addresses": addresses})


class RankManifest(FrozenModel):
    """All regions of one rank. Host-pool regions are listed by every rank of the node, each at its own addresses."""

    version: int = MANIFEST_VERSION
    fingerprint: str
    rank: Rank
    pp_size: Positive
    tp_size: Positive
    regions: tuple[Region, ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank.pp >= self.pp_size or self.rank.tp >= self.tp_size:
            raise ValueError(f"rank {self.rank} does not exist in an instance of {self.pp_size} x {self.tp_size}")
        seen = {(region.component, region.layer, region.space is IndexSpace.HOST) for region in self.regions}
        if len(seen) != len(self.regions):
            raise ValueError(f"rank {self.rank}: a component of a layer is listed twice")
        return self


def fingerprint_facts(geometry: ModelGeometry) -> dict[str, Any]:
    """Return what the fingerprint is made of: everything that decides where a byte of a request belongs.

    The model's name is left out: two names for the same bytes may meet. Every other field is in it, so a later release that adds
    one must leave it out while it has its default value, or no earlier release would know the same model by its fingerprint.
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
    said = _difference(ours.facts, theirs.facts, "facts")  # first: where they differ, sizes mostly do, and say less
    return said or _difference(fingerprint_facts(ours), fingerprint_facts(theirs), "")


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
    """Return the lanes [start, stop) that a tensor-parallel rank holds.

    One-lane components are replicated on every rank. With more ranks than lanes, neighbouring ranks hold the same lane.
    Raises UnsupportedError when the lanes cannot be split or shared evenly.
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

"""What one prefill rank writes to one decode rank: everything about it that does not depend on a request.

Who sends what. A component of a layer goes from every source rank that has the layer to every destination rank that
has it, as far as their lanes intersect. Source ranks of one stage that hold the same lanes are replicas and share the
work: pages of space `full` go round by `STRIPE_PAGES`, and in the other spaces, where a request has a page or two but
many layers, layers go round. The host pool of a decode node is one memory that each of its ranks lists in full, at its
own addresses; a source rank writes its share of it through one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region, lane_interval
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.plan.pages import IndexArray, PageArray, PageSplit, byte_intervals

if TYPE_CHECKING:
    from kvbridge.core.plan.neighbours import Band

STRIPE_PAGES = 4
"""Neighbouring logical pages that one replica sends before the next one's turn. Counted from the start of the request,
so that it does not matter how the request is cut into chunks."""

RegionsByLayer = dict[tuple[ComponentKind, int], Region]


@dataclass(frozen=True, slots=True)
class Stripe:
    """The share of replica `index` of `count`."""

    index: int
    count: int

    def owns(self, ordinal: int) -> bool:
        """Whether the item of that ordinal is this replica's."""
        return ordinal % self.count == self.index

    def owns_page(self, page: int) -> bool:
        """Whether this logical page is this replica's."""
        return self.owns(page // STRIPE_PAGES)

    def count_pages(self, pages: range) -> int:
        """Return how many of `pages` are this replica's."""
        return self._count_before(pages.stop) - self._count_before(pages.start) if pages else 0

    def _count_before(self, page: int) -> int:
        turns, rest = divmod(page, self.count * STRIPE_PAGES)
        return turns * STRIPE_PAGES + min(max(rest - self.index * STRIPE_PAGES, 0), STRIPE_PAGES)

    def pages(self, pages: range) -> IndexArray | None:
        """Return which of `pages` are this replica's, as positions in the range; None for all of them."""
        if self.count == 1:
            return None
        blocks = np.arange(pages.start, pages.stop) // STRIPE_PAGES
        return np.flatnonzero(blocks % self.count == self.index)


UNSHARED = Stripe(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The regions of a layer group on one side; all of the same form."""

    name: str
    """For error messages: "source rank pp0.tp1"."""
    form: Region
    """One of the regions: what it says counts for all, but for its layer and its addresses."""
    pages: PageArray
    """From the first lane on that is copied."""
    lane_offset_bytes: int
    """Where the first lane that is copied begins in a page."""

    def layers(self, rows: Sequence[int] | slice) -> Side:
        """Return some of the layers."""
        return replace(self, pages=self.pages.layers(rows))


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroup:
    """Layers of one component whose regions have the same form on both sides."""

    component: Component
    layers: tuple[int, ...]
    lanes: int
    """How many lanes are copied."""
    page_bytes: int
    """Bytes copied for a full page of a layer; with its padding when both sides hold just the lanes that are copied."""
    source: Side
    destination: Side
    stripe: Stripe
    """Which logical pages are sent."""

    @classmethod
    def create(
        cls, component: Component, pairs: list[tuple[Region, Region]], *, names: tuple[str, str], stripe: Stripe
    ) -> Self:
        """Take (source, destination) regions, ascending by layer, that differ in layer and addresses only."""
        source, destination = pairs[0]
        start, stop = max(source.lane_start, destination.lane_start), min(source.lane_stop, destination.lane_stop)
        lanes = stop - start
        sides = []
        for name, regions in zip(names, zip(*pairs, strict=True), strict=True):
            offset_bytes = (start - regions[0].lane_start) * component.lane_block_bytes
            pages = PageArray.of(regions, offset_bytes=offset_bytes)
            sides.append(Side(name, regions[0], pages, offset_bytes))
        whole = lanes == source.lanes == destination.lanes
        page_bytes = component.page_bytes(lanes) if whole else lanes * component.lane_block_bytes
        return cls(
            component=component,
            layers=tuple(pair[0].layer for pair in pairs),
            lanes=lanes,
            page_bytes=page_bytes,
            source=sides[0],
            destination=sides[1],
            stripe=stripe,
        )

    def partial_stretches(self, split: PageSplit) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return the partial pages of which something is sent: logical page, and (offset, length) of each stretch.

        Offsets count from the first copied lane, ascending.
        """
        return [
            (page.page, byte_intervals(self.component, self.lanes, page.slots))
            for page in split.partial
            if self.stripe.owns_page(page.page)
        ]

    def only(self, layers: frozenset[int]) -> LayerGroup | None:
        """Return the part of the group in `layers`, or None when there is none."""
        chosen = [index for index, layer in enumerate(self.layers) if layer in layers]
        if len(chosen) == len(self.layers):
            return self
        if not chosen:
            return None
        return replace(
            self,
            layers=tuple(self.layers[index] for index in chosen),
            source=self.source.layers(chosen),
            destination=self.destination.layers(chosen),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """What one source rank writes to one destination rank, whatever the request. Made once, when two ranks meet."""

    source: Rank
    destination: Rank
    groups: tuple[LayerGroup, ...]
    neighbours: dict[tuple[LayerGroup, ...], tuple[Band, ...]] = field(default_factory=dict)
    """What the planner has found of some of the groups; as many entries as there are sets of groups that are sent alike."""

    @classmethod
    def create(
        cls,
        geometry: ModelGeometry,
        source: RankManifest,
        destination: RankManifest,
        *,
        destination_ordinal: int,
        destination_count: int,
    ) -> Self:
        """Intersect two manifests that have passed `check_manifest`; nothing that it has checked is checked again.

        The destination is the `destination_ordinal`-th of the `destination_count` ranks of its node, counted from 0 in
        the same order by every source rank; a source rank writes to the node's host pool through the one that
        `host_ordinal` names. Only device regions of the source are read. Raises FingerprintMismatchError for
        manifests of different models, InvalidInputError for an ordinal that does not exist.
        """
        if source.fingerprint != destination.fingerprint:
            raise FingerprintMismatchError(
                f"source rank {source.rank} has fingerprint {source.fingerprint}, destination rank {destination.rank} "
                f"has {destination.fingerprint}; both sides must serve the same model in the same form"
            )
        if not 0 <= destination_ordinal < destination_count:
            raise InvalidInputError(f"destination {destination_ordinal} does not exist among {destination_count} ranks")
        writes_host = destination_ordinal == host_ordinal(source.rank, destination_count)
        sources, targets = source_regions(source), destination_regions(destination)
        groups: list[LayerGroup] = []
        for component in geometry.components:
            layers, stripe = replica_share(component, source.rank, source.tp_size)
            pairs = [
                (sources[component.kind, layer], targets[component.kind, layer])
                for layer in layers
                if (component.kind, layer) in sources and (component.kind, layer) in targets
            ]
            groups += [
                LayerGroup.create(
                    component,
                    alike,
                    names=(f"source rank {source.rank}", f"destination rank {destination.rank}"),
                    stripe=stripe,
                )
                for alike in _alike(pairs)
                if writes_host or alike[0][1].space is not IndexSpace.HOST
            ]
        return cls(source.rank, destination.rank, tuple(groups))

    def groups_of(self, layers: tuple[int, ...] | None) -> Iterator[LayerGroup]:
        """Yield what concerns these layers (None: all)."""
        if layers is None:
            yield from self.groups
            return
        wanted = frozenset(layers)
        for group in self.groups:
            part = group.only(wanted)
            if part is not None:
                yield part

    def __repr__(self) -> str:
        kinds = dict.fromkeys(group.component.kind for group in self.groups)
        buffers = sum(len(group.layers) for group in self.groups)
        return f"Pairing({self.source} -> {self.destination}: {buffers} buffers of {', '.join(kinds) or 'nothing'})"


def source_regions(manifest: RankManifest) -> RegionsByLayer:
    """Return what a rank reads from as a source: its device regions."""
    return {
        (region.component, region.layer): region for region in manifest.regions if region.space is not IndexSpace.HOST
    }


def destination_regions(manifest: RankManifest) -> RegionsByLayer:
    """Return where a rank receives each component of a layer: in the host pool if listed there, else on the device."""
    host = {(region.component, region.layer): region for region in manifest.regions if region.space is IndexSpace.HOST}
    return source_regions(manifest) | host


def held_groups(geometry: ModelGeometry, manifest: RankManifest, *, host_share: Stripe) -> tuple[LayerGroup, ...]:
    """Return what a rank has received once a request is complete, each group with the same regions on both sides.

    The node's host pool is listed by each of its ranks; `host_share` is the part of its pages that is this one's.
    """
    held = destination_regions(manifest)
    name = f"rank {manifest.rank}"
    groups = []
    for component in geometry.components:
        regions = [held[component.kind, layer] for layer in component.layers if (component.kind, layer) in held]
        for alike in _alike([(region, region) for region in regions]):
            stripe = host_share if alike[0][0].space is IndexSpace.HOST else UNSHARED
            groups.append(LayerGroup.create(component, alike, names=(name, name), stripe=stripe))
    return tuple(groups)


def replica_share(component: Component, source: Rank, tp_size: int) -> tuple[tuple[int, ...], Stripe]:
    """Return which layers of a component a source rank sends, of those that it has, and which pages of them.

    The ranks of a stage that hold the same lanes are neighbours, and share the work.
    """
    start, stop = lane_interval(component, source.tp, tp_size)
    count = tp_size * (stop - start) // component.lanes
    stripe = Stripe(source.tp % count, count)
    if component.space is IndexSpace.FULL:
        return component.layers, stripe
    return tuple(layer for ordinal, layer in enumerate(component.layers) if stripe.owns(ordinal)), UNSHARED


def host_ordinal(source: Rank, destination_count: int) -> int:
    """Return through which of a node's ranks, by its ordinal, a source rank writes the node's host pool."""
    return source.tp % destination_count


def _alike(pairs: list[tuple[Region, Region]]) -> list[list[tuple[Region, Region]]]:
    """Sort pairs of regions by form and leave out those without a common lane."""
    found: dict[tuple[object, ...], list[tuple[Region, Region]]] = {}
    for pair in pairs:
        if min(region.lane_stop for region in pair) > max(region.lane_start for region in pair):
            found.setdefault((*pair[0].form, *pair[1].form), []).append(pair)
    return list(found.values())

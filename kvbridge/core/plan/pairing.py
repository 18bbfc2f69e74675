"""Pairings: the writes of one prefill rank to one decode rank, whatever the request, and the rows that each writer owes.

A component of a layer goes from every source rank that has the layer to every destination rank that has it, as far as their lanes
intersect. Source ranks of one stage with the same lanes are replicas and share the work. Pages of space `full` go round by
`STRIPE_PAGES`. In the other spaces, where a request has few pages but many layers, layers go round. Each rank of a decode node
lists the node's whole host pool, at its own addresses, and a source rank writes its share through one of these ranks. Host memory
that engines bring is each rank's own, like its device memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np

from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, Region, lane_interval
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.plan.operations import IndexArray, PageArray, PageSplit, byte_intervals, split_rows

if TYPE_CHECKING:
    from kvbridge.core.plan.planner import Band

STRIPE_PAGES = 4
"""Neighbouring logical pages that one replica sends before the next one's turn, whatever the chunks of the request."""

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
        """Whether a logical page is this replica's."""
        return self.owns(page // STRIPE_PAGES)

    def pages(self, pages: range) -> IndexArray | None:
        """Return the positions in `pages` of this replica's pages; None: all are."""
        if self.count == 1:
            return None
        blocks = np.arange(pages.start, pages.stop) // STRIPE_PAGES
        return np.flatnonzero(blocks % self.count == self.index)

    def count_pages(self, pages: range) -> int:
        """Return how many of `pages` are this replica's."""
        return self._count_before(pages.stop) - self._count_before(pages.start) if pages else 0

    def _count_before(self, page: int) -> int:
        turns, rest = divmod(page, self.count * STRIPE_PAGES)
        return turns * STRIPE_PAGES + min(max(rest - self.index * STRIPE_PAGES, 0), STRIPE_PAGES)

    def count_rows(self, component: Component, split: PageSplit) -> int:
        """Return the number of rows of `split` in pages of this replica."""
        slots = (slots for page, found in split.partial.items() if self.owns_page(page) for slots in found)
        return self.count_pages(split.full) * component.slots_per_page + sum(stop - start for start, stop in slots)


UNSHARED = Stripe(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """The regions of a layer group on one side; all of the same form."""

    name: str
    """For error messages: "source rank pp0.tp1"."""
    form: Region
    """One of the regions, for everything except its layer and its addresses."""
    pages: PageArray
    """The pages, from the first copied lane on."""
    lane_offset_bytes: int
    """The offset of this lane in a page."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroup:
    """Layers of one component whose regions have the same form on both sides."""

    component: Component
    layers: tuple[int, ...]
    lanes: int
    """Number of copied lanes."""
    page_bytes: int
    """Bytes copied for a full page of a layer, with its padding where both sides hold the copied lanes only."""
    source: Side
    destination: Side
    stripe: Stripe
    """The logical pages that are sent."""

    def partial_stretches(self, split: PageSplit) -> list[tuple[int, list[tuple[int, int]]]]:
        """Return each partial page to send with its stretches, (offset from the first copied lane, length)."""
        return [
            (page, byte_intervals(self.component, self.lanes, slots))
            for page, slots in split.partial.items()
            if self.stripe.owns_page(page)
        ]

    def only(self, layers: frozenset[int]) -> LayerGroup | None:
        """Return the part of the group in `layers`, or None when there is none."""
        chosen = [index for index, layer in enumerate(self.layers) if layer in layers]
        if len(chosen) == len(self.layers):
            return self
        if not chosen:
            return None
        source, destination = (
            replace(side, pages=side.pages.layers(chosen)) for side in (self.source, self.destination)
        )
        kept = tuple(self.layers[index] for index in chosen)
        return replace(self, layers=kept, source=source, destination=destination)


@dataclass(frozen=True, slots=True, eq=False)
class Pairing:
    """The writes of one source rank to one destination rank. Made once, when two ranks meet."""

    source: Rank
    destination: Rank
    groups: tuple[LayerGroup, ...]
    neighbours: dict[tuple[LayerGroup, ...], tuple[Band, ...]] = field(default_factory=dict)
    """The planner's bands, by the groups that are sent alike."""

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
        """Intersect two manifests that have passed `check_manifest`. Only device regions of the source are read.

        The ranks of the destination's node are counted from 0, in the same order by every source rank. Raises
        FingerprintMismatchError for manifests of different models, InvalidInputError for an ordinal that does not exist.
        """
        if source.fingerprint != destination.fingerprint:
            raise FingerprintMismatchError(
                f"source rank {source.rank} has fingerprint {source.fingerprint}, destination rank {destination.rank} "
                f"has {destination.fingerprint}; both sides must serve the same model in the same form"
            )
        if not 0 <= destination_ordinal < destination_count:
            raise InvalidInputError(f"destination {destination_ordinal} does not exist among {destination_count} ranks")
        sources, targets = source_regions(source), destination_regions(destination)
        if destination_ordinal != host_ordinal(source.rank, destination_count):
            targets = {place: region for place, region in targets.items() if not destination.in_host_pool(region)}
        names = f"source rank {source.rank}", f"destination rank {destination.rank}"
        groups: list[LayerGroup] = []
        for component in geometry.components:
            layers, stripe = replica_share(component, source.rank, source.tp_size)
            places = [(component.kind, layer) for layer in layers]
            pairs = [(sources[place], targets[place]) for place in places if place in sources and place in targets]
            groups += _groups(component, pairs, names, stripe=stripe, host_stripe=stripe)
        return cls(source.rank, destination.rank, tuple(groups))

    def groups_of(self, layers: tuple[int, ...] | None) -> Iterator[LayerGroup]:
        """Yield the groups of these layers (None: all)."""
        if layers is None:
            yield from self.groups
            return
        wanted = frozenset(layers)
        yield from filter(None, (group.only(wanted) for group in self.groups))

    def __repr__(self) -> str:
        kinds = dict.fromkeys(group.component.kind for group in self.groups)
        buffers = sum(len(group.layers) for group in self.groups)
        return f"Pairing({self.source} -> {self.destination}: {buffers} buffers of {', '.join(kinds) or 'nothing'})"


def source_regions(manifest: RankManifest) -> RegionsByLayer:
    """Return the device regions of a rank, which it reads as a source."""
    return {
        (region.component, region.layer): region for region in manifest.regions if region.space is not IndexSpace.HOST
    }


def destination_regions(manifest: RankManifest) -> RegionsByLayer:
    """Return the regions in which a rank receives: of each component of a layer the one on the host, else the one on the device."""
    host = {(region.component, region.layer): region for region in manifest.regions if region.space is IndexSpace.HOST}
    return source_regions(manifest) | host


def held_groups(geometry: ModelGeometry, manifest: RankManifest, *, host_share: Stripe) -> tuple[LayerGroup, ...]:
    """Return the groups that a rank holds, with equal sides. `host_share`: the rank's part of the host pool."""
    held = destination_regions(manifest)
    name = f"rank {manifest.rank}"
    host_stripe = UNSHARED if manifest.own_host else host_share
    groups: list[LayerGroup] = []
    for component in geometry.components:
        regions = [held[component.kind, layer] for layer in component.layers if (component.kind, layer) in held]
        pairs = [(region, region) for region in regions]
        groups += _groups(component, pairs, (name, name), stripe=UNSHARED, host_stripe=host_stripe)
    return tuple(groups)


def replica_share(component: Component, source: Rank, tp_size: int) -> tuple[tuple[int, ...], Stripe]:
    """Return the layers of a component, of those that it has, and the pages that a source rank sends: replicas share the work."""
    start, stop = lane_interval(component, source.tp, tp_size)
    count = tp_size * (stop - start) // component.lanes
    stripe = Stripe(source.tp % count, count)
    if component.space is IndexSpace.FULL:
        return component.layers, stripe
    return tuple(layer for ordinal, layer in enumerate(component.layers) if stripe.owns(ordinal)), UNSHARED


def host_ordinal(source: Rank, destination_count: int) -> int:
    """Return the ordinal of the rank through which a source rank writes a node's host pool."""
    return source.tp % destination_count


def _groups(
    component: Component,
    pairs: Iterable[tuple[Region, Region]],
    names: Sequence[str],
    *,
    stripe: Stripe,
    host_stripe: Stripe,
) -> Iterator[LayerGroup]:
    """Yield the pairs (source, destination), which ascend by layer, as groups of one form; only those with a common lane."""
    by_form: dict[tuple[object, ...], list[tuple[Region, Region]]] = {}
    for pair in pairs:
        by_form.setdefault((*pair[0].form, *pair[1].form), []).append(pair)
    for alike in by_form.values():
        source, destination = alike[0]
        start, stop = max(source.lane_start, destination.lane_start), min(source.lane_stop, destination.lane_stop)
        lanes = stop - start
        if lanes <= 0:
            continue
        sides = []
        for name, regions in zip(names, zip(*alike, strict=True), strict=True):
            offset_bytes = (start - regions[0].lane_start) * component.lane_block_bytes
            sides.append(Side(name, regions[0], PageArray.of(regions, offset_bytes=offset_bytes), offset_bytes))
        whole = lanes == source.lanes == destination.lanes
        yield LayerGroup(
            component=component,
            layers=tuple(one.layer for one, _ in alike),
            lanes=lanes,
            page_bytes=component.page_bytes(lanes) if whole else lanes * component.lane_block_bytes,
            source=sides[0],
            destination=sides[1],
            stripe=host_stripe if destination.space is IndexSpace.HOST else stripe,
        )


# ------------------------------------------------------------------------------------------- what each writer owes

# Rows decide a commit, since bytes and operations depend on the chunks of a request. The share of a writer follows from its place
# in its instance (`replica_share`). No two shares have a row in common: they are everything exactly when they add up to the demand.

LaneRows = dict[ComponentKind, int]
"""Rows times lanes by component, summed over layers and destinations."""

_Held = tuple[ComponentKind, tuple[int, int], frozenset[int]]
"""A component, the lanes [start, stop) that a rank keeps of it, and the layers of which it keeps them."""


@dataclass(frozen=True, slots=True)
class Share:
    """The rows that one rank sends to all ranks of one node, whatever the request."""

    parts: tuple[tuple[Component, int, Stripe], ...]
    """Component, lanes (summed over layers and destinations), and the pages that are sent."""

    def rows(self, *, prompt_tokens: int, prefix_tokens: int) -> LaneRows:
        """Return the rows of one request. Raises InvalidInputError unless 0 <= prefix_tokens <= prompt_tokens."""
        owed = {}
        for component, lanes, stripe in self.parts:
            live = component.live_rows(prompt_tokens, prefix_tokens)
            if live.count:
                owed[component.kind] = lanes * stripe.count_rows(component, split_rows(component, live))
        return owed


class Demand:
    """The rows that the ranks of one node are to receive, whatever the request."""

    def __init__(self, geometry: ModelGeometry, destinations: Sequence[RankManifest]) -> None:
        """`destinations`: the node's ranks, in the order that peers know. They have one host pool."""
        self._geometry = geometry
        self._device = Counter(held for manifest in destinations for held in _held(manifest, in_host_pool=False))
        self._host = [_held(manifest, in_host_pool=True) for manifest in destinations]

    def lanes(self) -> dict[ComponentKind, int]:
        """Return the lanes of each component, summed over layers and copies."""
        found: Counter[ComponentKind] = Counter()
        for (kind, (start, stop), layers), copies in self._device.items():
            found[kind] += (stop - start) * len(layers) * copies
        in_host = {(kind, lanes, layer) for held in self._host for kind, lanes, layers in held for layer in layers}
        for kind, (start, stop), _ in in_host:
            found[kind] += stop - start
        return found

    def share(self, writer: Rank, *, tp_size: int, layers: Collection[int]) -> Share:
        """Return the share of a rank that has these layers. Raises UnsupportedError when lanes do not divide by `tp_size`."""
        parts = []
        receiving = self._device + Counter(self._host[host_ordinal(writer, len(self._host))])
        for component in self._geometry.components:
            sent, stripe = replica_share(component, writer, tp_size)
            start, stop = lane_interval(component, writer.tp, tp_size)
            mine = frozenset(sent).intersection(layers)
            lanes = sum(
                max(0, min(stop, held_stop) - max(start, held_start)) * len(held_layers & mine) * copies
                for (kind, (held_start, held_stop), held_layers), copies in receiving.items()
                if kind is component.kind
            )
            parts.append((component, lanes, stripe))
        return Share(tuple(parts))

    def uncovered(self, shares: Iterable[Share]) -> str | None:
        """Return a clause that names a component that the shares of an instance's ranks do not cover exactly, or None."""
        sent: Counter[ComponentKind] = Counter()
        stripes: dict[ComponentKind, int] = {}
        for share in shares:
            for component, lanes, stripe in share.parts:
                sent[component.kind] += lanes
                stripes[component.kind] = stripe.count
        for kind, lanes in self.lanes().items():
            needed = lanes * stripes.get(kind, 1)
            if sent[kind] != needed:
                return f"{kind}: {sent[kind]} lanes of layers where {needed} are due"
        return None


def _held(manifest: RankManifest, *, in_host_pool: bool) -> list[_Held]:
    layers: defaultdict[tuple[ComponentKind, tuple[int, int]], list[int]] = defaultdict(list)
    for (kind, layer), region in destination_regions(manifest).items():
        if manifest.in_host_pool(region) is in_host_pool:
            layers[kind, (region.lane_start, region.lane_stop)].append(layer)
    return [(kind, lanes, frozenset(found)) for (kind, lanes), found in layers.items()]


def shortfall(due: Mapping[ComponentKind, int], reported: Mapping[ComponentKind, int]) -> str | None:
    """Return a clause that names the first component with too few or too many reported rows, or None."""
    for kind in ComponentKind:
        wanted, got = due.get(kind, 0), reported.get(kind, 0)
        if got < wanted:
            return f"{kind}: {got} of {wanted} rows were reported as written, {wanted - got} are missing"
        if got > wanted:
            return f"{kind}: {got} rows were reported as written where {wanted} were due, {got - wanted} too many"
    return None

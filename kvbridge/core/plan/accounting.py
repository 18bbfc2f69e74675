"""What a commit is decided by: which of a request's rows each writer owes a decode node, and whether that is all of them.

Rows are counted, not bytes or operations: those depend on how a request was cut into chunks. A writer's share follows from its
place in its instance alone (`pairing.replica_share`), and shares have no row of a place in common: they are everything exactly when
they add up to the demand.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbridge.core.geometry.components import Component, ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, lane_interval
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.plan.pages import split_rows
from kvbridge.core.plan.pairing import Stripe, destination_regions, host_ordinal, replica_share
from kvbridge.core.plan.planner import owned_rows

LaneRows = dict[ComponentKind, int]
"""Rows times lanes of each component, summed over layers and destinations; an absent component has none."""

_Held = tuple[ComponentKind, tuple[int, int], frozenset[int]]
"""A component, the lanes [start, stop) that a rank keeps of it, and the layers of which it keeps them."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank sends to all ranks of one node, whatever the request."""

    parts: tuple[tuple[Component, int, Stripe], ...]
    """Of each component: lanes, summed over layers and destinations, and which pages of them."""

    def rows(self, *, prompt_tokens: int, prefix_tokens: int) -> LaneRows:
        """Return what that is of one request. Raises InvalidInputError unless 0 <= prefix_tokens <= prompt_tokens."""
        owed = {}
        for component, lanes, stripe in self.parts:
            live = component.live_rows(prompt_tokens, prefix_tokens)
            if live.count:
                owed[component.kind] = lanes * owned_rows(component, split_rows(component, live), stripe)
        return owed


class Demand:
    """What the ranks of one node are to receive, whatever the request."""

    def __init__(self, geometry: ModelGeometry, destinations: Sequence[RankManifest]) -> None:
        """`destinations`: of all ranks of the node, in the order in which they are introduced to peers.

        Each rank's device copy counts; the host pool is one copy, however many ranks list it.
        """
        self._geometry = geometry
        self._device = Counter(held for manifest in destinations for held in _held(manifest, in_host=False))
        self._host = [_held(manifest, in_host=True) for manifest in destinations]

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
        """Return what the rank of that name sends, in an instance where it has these layers.

        Raises UnsupportedError when the lanes of a component cannot be split over `tp_size` ranks.
        """
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
        """Return a clause that names a component of which these shares are not all that is needed, or None.

        They are shares of different ranks of one instance, whose stripes are all of one count.
        """
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


def _held(manifest: RankManifest, *, in_host: bool) -> list[_Held]:
    layers: defaultdict[tuple[ComponentKind, tuple[int, int]], list[int]] = defaultdict(list)
    for (kind, layer), region in destination_regions(manifest).items():
        if (region.space is IndexSpace.HOST) is in_host:
            layers[kind, (region.lane_start, region.lane_stop)].append(layer)
    return [(kind, lanes, frozenset(found)) for (kind, lanes), found in layers.items()]


def shortfall(due: Mapping[ComponentKind, int], reported: Mapping[ComponentKind, int]) -> str | None:
    """Return a clause that names the first component of which not exactly the rows that were due were reported, or None."""
    for kind in ComponentKind:
        wanted, got = due.get(kind, 0), reported.get(kind, 0)
        if got < wanted:
            return f"{kind}: {got} of {wanted} rows were reported as written, {wanted - got} are missing"
        if got > wanted:
            return f"{kind}: {got} rows were reported as written where {wanted} were due, {got - wanted} too many"
    return None

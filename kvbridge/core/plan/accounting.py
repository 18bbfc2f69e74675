"""What a commit is decided by: the rows that a decode node needs of a request, and which of its writers owes how many.

Owns: the demand, the share of each writer, the sentence about the first difference. Must not know: who reported, what follows.

Rows are counted, not bytes or operations: those depend on how a request was cut into chunks, rows do not. A writer's share follows
from its place in its instance alone, as its plans do (`pairing.replica_share`). Shares of different ranks of one instance have no
row of a place in common, so they are everything exactly when they add up to the demand.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence

from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, lane_interval
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.plan.pairing import destination_regions, host_ordinal, replica_share
from kvbridge.core.plan.planner import owned_rows
from kvbridge.core.plan.runs import split_rows

LaneRows = dict[ComponentKind, int]
"""Rows times lanes of each component, summed over layers and destinations; an absent component has none."""

_Held = tuple[ComponentKind, tuple[int, int], frozenset[int]]
"""A component, the lanes [start, stop) that a rank keeps of it, and the layers of which it keeps them."""


class Demand:
    """The rows of one request that the ranks of one node are to receive."""

    def __init__(
        self, geometry: ModelGeometry, destinations: Sequence[RankManifest], *, prompt_tokens: int, prefix_tokens: int
    ) -> None:
        """`destinations`: of all ranks of the node, in the order in which they are introduced to peers.

        Each rank's device copy counts; the host pool is one copy, however many ranks list it. Raises InvalidInputError unless
        0 <= prefix_tokens <= prompt_tokens.
        """
        self._geometry = geometry
        self._live = {part.kind: part.live_rows(prompt_tokens, prefix_tokens) for part in geometry.components}
        self._device = Counter(held for manifest in destinations for held in _held(manifest, in_host=False))
        self._host = [_held(manifest, in_host=True) for manifest in destinations]

    def total(self) -> LaneRows:
        """Return what all writers together have to send."""
        lanes: LaneRows = Counter()
        for (kind, (start, stop), layers), copies in self._device.items():
            lanes[kind] += (stop - start) * len(layers) * copies
        in_host = {
            (kind, interval, layer) for held in self._host for kind, interval, layers in held for layer in layers
        }
        for kind, (start, stop), _ in in_host:
            lanes[kind] += stop - start
        return {kind: self._live[kind].count * count for kind, count in lanes.items()}

    def share(self, writer: Rank, *, tp_size: int, layers: Collection[int]) -> LaneRows:
        """Return what the rank of that name has to send, in an instance where it has these layers.

        Raises UnsupportedError when the lanes of a component cannot be split over `tp_size` ranks.
        """
        owed: LaneRows = {}
        receiving = self._device + Counter(self._host[host_ordinal(writer, len(self._host))])
        for component in self._geometry.components:
            rows = self._live[component.kind]
            if not rows.count:
                continue
            sent, stripe = replica_share(component, writer, tp_size)
            start, stop = lane_interval(component, writer.tp, tp_size)
            mine = frozenset(sent).intersection(layers)
            lanes = sum(
                max(0, min(stop, held_stop) - max(start, held_start)) * len(held_layers & mine) * copies
                for (kind, (held_start, held_stop), held_layers), copies in receiving.items()
                if kind is component.kind
            )
            owed[component.kind] = lanes * owned_rows(component, split_rows(component, rows), stripe)
        return owed


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

"""Who writes a room, and how much each of them owes it.

Nodes of different instances may have ranks with different names and shares that add up, and still leave pages unwritten: what a
rank sends follows from the sizes of its instance. So nodes are taken for one instance only if they agree on its name, its sizes and
its stages, and if their ranks are all that such an instance has.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.ids import Rank
from kvbridge.core.plan.accounting import Demand, Share
from kvbridge.node.handshake.prefill_nodes import KnownNode
from kvbridge.node.receiver.room import WriterNode
from kvbridge.pool.memory.layout import stage_layers

MOST_SETS = 64
"""Sets of nodes whose shares are remembered at once."""
_REMEDY = "name the nodes of one instance in `prefill`, all of them"


class WriterSets:
    """The prefill instances that write to one node. What each of their ranks sends is found out once."""

    def __init__(self, geometry: ModelGeometry) -> None:
        self._geometry = geometry
        self._manifests: tuple[RankManifest, ...] = ()
        self._known: dict[tuple[KnownNode, ...], dict[Rank, Share]] = {}

    def writers(self, known: Sequence[KnownNode], manifests: tuple[RankManifest, ...]) -> dict[str, WriterNode]:
        """Return who writes a room to ranks with these manifests, by incarnation.

        Raises InvalidInputError, naming nodes, ranks and sizes, unless the nodes are one prefill instance with each of its ranks
        once; UnsupportedError when its sizes do not suit the model.
        """
        if len(self._known) >= MOST_SETS or not _same(manifests, self._manifests):
            self._known, self._manifests = {}, manifests
        nodes = tuple({node.peer: node for node in known}.values())  # one may have been named by two addresses
        shares = self._known.get(nodes)
        if shares is None:
            shares = self._known[nodes] = _shares(nodes, self._geometry, Demand(self._geometry, manifests))
        return {
            node.peer: WriterNode(node, {rank: shares[rank] for rank in node.ranks}, set(node.ranks)) for node in nodes
        }


def _same(ours: tuple[RankManifest, ...], known: tuple[RankManifest, ...]) -> bool:
    return len(ours) == len(known) and all(map(operator.is_, ours, known))


def _shares(nodes: Sequence[KnownNode], geometry: ModelGeometry, demand: Demand) -> dict[Rank, Share]:
    first = nodes[0]
    for node in nodes[1:]:
        if node.parallelism != first.parallelism:
            raise InvalidInputError(f"prefill nodes {first} and {node} are not of one instance; {_REMEDY}")
    _check_complete(nodes)
    stages = [
        stage_layers(geometry.layer_count, first.pp_size, stage, first.stage_boundaries)
        for stage in range(first.pp_size)
    ]
    shares = {
        rank: demand.share(rank, tp_size=first.tp_size, layers=stages[rank.pp]) for node in nodes for rank in node.ranks
    }
    if wrong := demand.uncovered(shares.values()):
        raise InvalidInputError(f"prefill instance {first.instance} would not write what this node needs: {wrong}")
    return shares


def _check_complete(nodes: Sequence[KnownNode]) -> None:
    first, holders = nodes[0], dict[Rank, KnownNode]()
    for node in nodes:
        if not node.ranks:
            raise InvalidInputError(f"prefill node {node} has no rank; leave it out of `prefill`")
        for rank in node.ranks:
            if rank.pp >= first.pp_size or rank.tp >= first.tp_size:
                raise InvalidInputError(f"prefill node {node} has rank {rank}, which such an instance does not have")
            if rank in holders:
                raise InvalidInputError(f"prefill nodes {holders[rank]} and {node} both hold rank {rank}; {_REMEDY}")
            holders[rank] = node
    if len(holders) < first.pp_size * first.tp_size:
        every = (Rank(pp=pp, tp=tp) for pp in range(first.pp_size) for tp in range(first.tp_size))
        missing = next(rank for rank in every if rank not in holders)
        named = ", ".join(map(str, nodes))
        raise InvalidInputError(f"rank {missing} of prefill instance {first.instance} is on none of {named}; {_REMEDY}")

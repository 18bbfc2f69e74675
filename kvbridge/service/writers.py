"""Who writes a room, and how much each of them owes it.

Owns: whether the prefill nodes that a request names are one instance, the whole of it. Must not know: how they were met, what they
report.

Nodes of different instances may have ranks with different names and shares that add up, and still leave pages unwritten: what a
rank sends follows from the sizes of its instance. So nodes are taken for one instance only if they agree on its name, its sizes and
its stages, and if their ranks are all that such an instance has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.ids import Rank
from kvbridge.core.plan.accounting import Demand, shortfall
from kvbridge.pool.layout import stage_layers
from kvbridge.service.receiver_room import MetNode, WriterNode

_REMEDY = "name the nodes of one instance in `prefill`, all of them"


def writers_of(met: Sequence[MetNode], geometry: ModelGeometry, demand: Demand) -> dict[str, WriterNode]:
    """Return who writes a room of that demand, by incarnation.

    Raises InvalidInputError, naming nodes, ranks and sizes, unless the nodes are one prefill instance with each of its ranks once;
    UnsupportedError when its sizes do not suit the model.
    """
    nodes = list({node.peer: node for node in met}.values())  # one may have been named by two addresses
    first = nodes[0]
    for node in nodes[1:]:
        if node.parallelism != first.parallelism:
            raise InvalidInputError(f"prefill nodes {first} and {node} are not of one instance; {_REMEDY}")
    _check_complete(nodes)
    stages = [
        stage_layers(geometry.layer_count, first.pp_size, stage, first.stage_boundaries)
        for stage in range(first.pp_size)
    ]
    writers = {
        node.peer: WriterNode(
            node,
            {rank: demand.share(rank, tp_size=first.tp_size, layers=stages[rank.pp]) for rank in node.ranks},
            set(node.ranks),
        )
        for node in nodes
    }
    together = sum((Counter(share) for writer in writers.values() for share in writer.owed.values()), Counter())
    if wrong := shortfall(demand.total(), together):
        raise InvalidInputError(f"prefill instance {first.instance} would not write what this node needs: {wrong}")
    return writers


def _check_complete(nodes: Sequence[MetNode]) -> None:
    first, holders = nodes[0], dict[Rank, MetNode]()
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

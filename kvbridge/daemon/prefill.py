"""The prefill daemon: a node whose rooms are sent."""

from __future__ import annotations

from kvbridge.config.schema import PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.core.geometry.tiers import why_no_prefixes
from kvbridge.core.ids import Role
from kvbridge.core.wire.messages import (
    FEATURES,
    Welcome,
)
from kvbridge.core.wire.worker_messages import Digested, PathsChanged, PeerConnected, Rerouted, RoomClosed, Sent
from kvbridge.daemon.decode_links import DecodeLinks
from kvbridge.daemon.node import NodeDaemon
from kvbridge.daemon.parts import NodeParts
from kvbridge.node.prefill.decode_nodes import DecodeNodes
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.node.room_pages import RoomSettings


def prefill_daemon(config: PrefillConfig) -> NodeDaemon:
    """Put a prefill daemon together; nothing is open yet. Raises ConfigError, InvalidInputError."""
    parts = NodeParts(config, Role.PREFILL)
    if config.tier.enabled and (why := why_no_prefixes(parts.geometry)):
        raise ConfigError(
            f"tier.enabled: {why}. Set it to false here; decode nodes keep prefixes of this model all the same"
        )
    links = DecodeLinks(config, parts)
    nodes = DecodeNodes(
        _introduction(parts), parts.geometry, parts.workers, links, parts.events, check_s=config.timeouts.handshake_s
    )
    rooms = PrefillRooms(
        parts.room_parts,
        RoomSettings(
            geometry=parts.geometry,
            limits=config.timeouts,
            # A node that keeps nothing itself states its engines' keys all the same, since decode keeps nothing without them.
            shares_prefixes=config.tier.model is not None,
            checkpoint_interval_tokens=config.tier.checkpoint_interval_tokens,
            part_of_instance=len(parts.workers.layers) < config.parallelism.pp_size * config.parallelism.tp_size,
            adopted=parts.adopted,
        ),
        nodes,
    )
    nodes.rooms = rooms
    links.serve(nodes, rooms)
    parts.workers.serve(
        links.worker_ready,
        links.worker_gone,
        {
            PeerConnected: nodes.worker_connected,
            PathsChanged: nodes.paths_changed,
            **dict.fromkeys((Rerouted, Digested, Sent, RoomClosed), rooms.orders.hear),
            **parts.reports,
        },
    )
    return NodeDaemon(parts, links, rooms)


def _introduction(parts: NodeParts) -> Welcome:
    identity, sizes = parts.identity, parts.config.parallelism
    return Welcome(
        instance=identity.instance,
        node=identity.node,
        incarnation=identity.incarnation,
        model_identity=parts.config.tier.model,
        pp_size=sizes.pp_size,
        tp_size=sizes.tp_size,
        stage_boundaries=parts.stage_boundaries,
        ranks=tuple(parts.workers.layers),
        features=FEATURES,
    )

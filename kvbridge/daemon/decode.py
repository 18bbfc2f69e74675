"""The decode daemon: a node whose rooms are written to and then claimed."""

from __future__ import annotations

from kvbridge.config.schema import DecodeConfig
from kvbridge.core.ids import Role
from kvbridge.core.wire.worker_messages import Digested, EndpointsRevoked, Verified
from kvbridge.daemon.node import NodeDaemon
from kvbridge.daemon.parts import NodeParts
from kvbridge.daemon.prefill_links import PrefillLinks
from kvbridge.node.decode.fence import Fence
from kvbridge.node.decode.prefill_nodes import PrefillNodes
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.room_pages import RoomSettings


def decode_daemon(config: DecodeConfig) -> NodeDaemon:
    """Put a decode daemon together; nothing is open yet. Raises ConfigError, InvalidInputError."""
    parts = NodeParts(config, Role.DECODE)
    links = PrefillLinks(config, parts)
    nodes = PrefillNodes(parts.description, links, parts.events)
    fence = Fence(parts.workers.layers, send=parts.workers.send, events=parts.events, fence_s=config.timeouts.fence_s)
    rooms = DecodeRooms(
        parts.room_parts,
        RoomSettings(
            geometry=parts.geometry,
            limits=config.timeouts,
            shares_prefixes=config.tier.enabled,
            keeps_answers=config.tier.generated,
            adopted=parts.adopted,
            host=parts.layout.host_kinds,
            digest=config.integrity.digest,
        ),
        nodes,
        fence,
    )
    fence.watch(rooms.writers)
    nodes.writers = rooms.writers
    links.serve(nodes, rooms, fence)
    parts.workers.serve(
        links.worker_ready,
        links.worker_gone,
        {
            EndpointsRevoked: lambda message: fence.revoked(message.rank, message.before_epoch),
            **dict.fromkeys((Digested, Verified), rooms.hear),
            **parts.reports,
        },
    )
    return NodeDaemon(parts, links, rooms)

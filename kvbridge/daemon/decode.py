"""The decode daemon: a node whose rooms are written to and then claimed."""

from __future__ import annotations

import asyncio
from contextvars import Context

from kvbridge.config.schema import DecodeConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.messages import (
    Digests,
    Done,
    Drained,
    Failed,
    Heartbeat,
    PathLost,
    PeerMessage,
    Rejected,
    Welcome,
)
from kvbridge.core.wire.worker_messages import Digested, EndpointsRevoked, Verified
from kvbridge.daemon.node import NodeDaemon
from kvbridge.daemon.parts import NodeParts
from kvbridge.daemon.prefill_links import PrefillLinks
from kvbridge.node.decode.fence import Fence
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.handshake.prefill_nodes import PrefillNodes
from kvbridge.node.room_pages import RoomSettings
from kvbridge.telemetry.events import MessageUndelivered


def decode_daemon(config: DecodeConfig) -> NodeDaemon:
    """Put a decode daemon together; nothing is open yet. Raises ConfigError, InvalidInputError."""
    parts = NodeParts.build(config, Role.DECODE)
    links = PrefillLinks(config, parts.events)
    nodes = PrefillNodes(
        describe=parts.description,
        links=links,
        events=parts.events,
        names_of=links.names_of,
        soon=lambda do: asyncio.get_running_loop().call_soon(do, context=Context()),
    )
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
    nodes.watch(rooms.writers)
    peers = PrefillPeers(parts, links, nodes, rooms, fence)
    parts.worker_host.serve(
        peers,
        {
            EndpointsRevoked: lambda message: fence.revoked(message.rank, message.before_epoch),
            **dict.fromkeys((Digested, Verified), rooms.hear),
            **parts.reports,
        },
    )
    return NodeDaemon(parts, peers, rooms)


class PrefillPeers:
    """What prefill nodes and rank workers say, and whom it concerns. Implements Peers and WorkerListener."""

    def __init__(
        self, parts: NodeParts, links: PrefillLinks, nodes: PrefillNodes, rooms: DecodeRooms, fence: Fence
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._links = links
        self._nodes = nodes
        self._rooms = rooms
        self._fence = fence
        # A decode node listens to nobody: it begins to connect.
        self.open, self.close = links.start, links.stop
        self.tick, self.fence, self.status = fence.tick, fence.status, nodes.peers
        links.serve(self, nodes)

    # ------------------------------------------------------------------ for the daemon

    @property
    def epoch(self) -> int:
        """The epoch of the endpoints that rank workers give out."""
        return self._fence.epoch

    def watch(self) -> None:
        """Send heartbeats; look for prefill nodes that are lost, or whose key is not accepted any more."""
        self._links.look()
        for address, reason in self._links.barred():
            self._nodes.lost(address, reason)
        self._links.heartbeats()

    def worker_ready(self, rank: Rank) -> None:
        """Tell peers and the fence of the endpoints of a rank worker that is ready."""
        if not self._parts.workers.missing():
            self._nodes.refresh()
        self._fence.ready(rank, self._parts.workers.epoch(rank))

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """Fail what a rank worker that is gone had under way, perhaps with device memory that it made."""
        made = rank in self._parts.layout.orders
        self._rooms.worker_gone(rank, reason, memory_lost=made)
        self._parts.worker_gone(rank, reason)

    # ------------------------------------------------------------------ prefill nodes

    def received(self, address: PeerAddress, peer: str, message: PeerMessage) -> None:
        """Take what a node says."""
        match message:
            case Welcome() if message.incarnation == peer:
                self._nodes.welcome(address, message)
            case Rejected():
                self._nodes.rejected(address, message)
            case Welcome() | Digests() | Done() | PathLost() | Failed() | Drained() if not self._nodes.speaks(
                address, peer
            ):
                text = f"{message.type} from {address.endpoint} in the name of {peer}"
                self._events.frame_refused("unmet", text)
            case Digests() | Done() | PathLost() | Failed() | Drained():
                self._rooms.writers.hear(peer, message)
            case Heartbeat():
                pass
            case _:
                text = f"{message.type} from {peer}: a decode daemon does not take it"
                self._events.frame_refused("wrong_direction", text)

    def undelivered(self, address: PeerAddress, message: PeerMessage, age_s: float) -> None:
        """Give a node up that acknowledges nothing."""
        self._events.emit(MessageUndelivered(peer=address.endpoint, message=message.type, age_s=age_s))
        # A younger message fell with its link, which the node has forgotten: `restarted` introduces us anew.
        limit_s = self._parts.config.timeouts.control_delivery_s
        if address in self._links and age_s >= limit_s:
            why = f"a {message.type} of {age_s:.1f} s ago was never acknowledged (limit: timeouts.control_delivery_s)"
            self._nodes.lost(address, why)

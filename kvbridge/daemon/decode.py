"""The decode daemon: a node whose rooms are written to and then claimed.

Owns: which parts it has, in which order they are made, and what a message of a prefill node means for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context

from kvbridge.api.status import FenceStatus, PrefillNodeStatus
from kvbridge.config.schema import DecodeConfig
from kvbridge.control.keys import CurveKeys
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.geometry.tables import GROWING_SPACES
from kvbridge.core.ids import Rank, Role
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.wire.features import PEER_FEATURES, Feature, Features
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
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engine_api import EngineApi
from kvbridge.node.handshake.prefill_nodes import PrefillNodes
from kvbridge.node.receiver.fence import Fence
from kvbridge.node.receiver.room import ReceiverPorts
from kvbridge.node.receiver.rooms import ReceiverRooms, receiver_rooms
from kvbridge.node.room_pages import RoomSettings
from kvbridge.telemetry.events import MessageUndelivered


def decode_daemon(config: DecodeConfig) -> NodeDaemon:
    """Put a decode daemon together; nothing is open yet. Raises ConfigError, InvalidInputError."""
    parts = NodeParts.build(config, Role.DECODE)
    page_bytes = parts.layout.page_bytes(parts.geometry)
    links = PrefillLinks(config, parts.events)
    nodes = PrefillNodes(
        describe=parts.description,
        links=links,
        events=parts.events,
        features=_required(config.integrity.digest),
        names_of=links.names_of,
        soon=lambda do: asyncio.get_running_loop().call_soon(do, context=Context()),
    )
    fence = Fence(parts.workers.layers, send=parts.workers.send, events=parts.events, fence_s=config.timeouts.fence_s)
    rooms = receiver_rooms(
        ReceiverPorts(
            book=parts.book,
            workers=parts.workers,
            nodes=nodes,
            fence=fence,
            engines=parts.engines,
            events=parts.events,
            prefixes=parts.prefixes,
            store=parts.stored,
        ),
        RoomSettings(
            geometry=parts.geometry,
            limits=config.timeouts,
            shares_prefixes=config.tier.enabled,
            keeps_answers=config.tier.generated,
            growing_page_bytes=sum(page_bytes.get(space, 0) for space in GROWING_SPACES),
            adopted=parts.adopted,
            host=parts.layout.host_kinds,
            digest=config.integrity.digest,
        ),
    )
    fence.watch(rooms.writers)
    nodes.watch(rooms.writers)
    peers = PrefillPeers(parts, links, nodes, rooms, fence)
    parts.worker_host.serve(
        peers,
        {
            EndpointsRevoked: lambda message: fence.revoked(message.rank, message.before_epoch),
            Digested: rooms.workers.digested,
            Verified: rooms.workers.verified,
            **parts.reports,
        },
    )
    admission = AdmissionController(rooms.requests, parts.book, limits=config.admission, events=parts.events)
    api = EngineApi(rooms, admission, parts.engines, pid=parts.engine_socket.pid, attached=parts.attached)
    return NodeDaemon(parts, peers, rooms, admission, api)


def _required(digest: DigestKind) -> Features:
    """What this node has, and requires of the prefill nodes that write to it."""
    requires = () if digest is DigestKind.NONE else (Feature.DIGESTS,)
    return Features(has=PEER_FEATURES.has, requires=requires)


class PrefillPeers:
    """What prefill nodes and rank workers say, and whom it concerns. Implements Peers, PrefillListener, WorkerListener."""

    def __init__(
        self, parts: NodeParts, links: PrefillLinks, nodes: PrefillNodes, rooms: ReceiverRooms, fence: Fence
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._links = links
        self._nodes = nodes
        self._rooms = rooms
        self._fence = fence
        links.serve(self)

    # ------------------------------------------------------------------ for the daemon

    @property
    def epoch(self) -> int:
        """See ShownPeers."""
        return self._fence.epoch

    def open(self, identity: PeerIdentity) -> None:
        """See Peers: a decode node listens to nobody, it connects to the prefill nodes of its rooms."""
        self._links.start(identity)

    def change_keys(self, keys: CurveKeys, _told: Callable[[PeerAddress], None]) -> None:
        """See Peers."""
        self._links.change_keys(keys)

    async def close(self, timeout_s: float) -> None:
        """See Peers."""
        await self._links.stop(timeout_s)

    def watch(self) -> None:
        """See Peers: and look for prefill nodes whose key is not accepted any more."""
        self._links.look()
        for address, reason in self._links.barred():
            self._nodes.lost(address, reason)
        self._links.heartbeats()

    def tick(self) -> None:
        """See Peers."""
        self._fence.tick()

    def status(self) -> tuple[PrefillNodeStatus, ...]:
        """See ShownPeers."""
        return self._nodes.peers()

    def silences_s(self) -> dict[str, float]:
        """See ShownPeers."""
        silences_s, found = self._links.silences_s(), dict[str, float]()
        for address, name in self._nodes.names().items():  # two incarnations of one node may be known for a while
            found[name] = max(found.get(name, 0.0), silences_s.get(address, 0.0))
        return found

    def connecting(self) -> int:
        """See ShownPeers."""
        return sum(not node.incarnation for node in self.status())

    def fence(self) -> FenceStatus:
        """See ShownPeers."""
        return self._fence.status()

    def worker_ready(self, rank: Rank) -> None:
        """See WorkerListener: peers must know of new endpoints."""
        if not self._parts.workers.missing():
            self._nodes.refresh()
        self._fence.ready(rank, self._parts.workers.epoch(rank))

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """See WorkerListener: perhaps with device memory that it made."""
        made = rank in self._parts.layout.orders
        self._rooms.workers.gone(rank, reason, memory_lost=made)
        self._parts.worker_gone(rank, reason)

    # ------------------------------------------------------------------ prefill nodes

    def received(self, address: PeerAddress, peer: str, message: PeerMessage) -> None:
        """See PrefillListener."""
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
                self._rooms.peers.hear(peer, message)
            case Heartbeat():
                self._nodes.goes_on_with(address, message.public_key)
            case _:
                text = f"{message.type} from {peer}: a decode daemon does not take it"
                self._events.frame_refused("wrong_direction", text)

    def lost(self, address: PeerAddress, reason: str) -> None:
        """See PrefillListener."""
        self._nodes.lost(address, reason)

    def undelivered(self, address: PeerAddress, message: PeerMessage, age_s: float) -> None:
        """See PrefillListener."""
        self._events.emit(MessageUndelivered(peer=address.endpoint, message=message.type, age_s=age_s))
        # A younger message fell with its link, which the node has forgotten: `restarted` introduces us anew.
        limit_s = self._parts.config.timeouts.control_delivery_s
        if address in self._links and age_s >= limit_s:
            why = f"a {message.type} of {age_s:.1f} s ago was never acknowledged (limit: timeouts.control_delivery_s)"
            self._nodes.lost(address, why)

    def restarted(self, address: PeerAddress) -> None:
        """See PrefillListener."""
        self._nodes.restarted(address)

    def same(self, address: PeerAddress, other: PeerAddress) -> None:
        """See PrefillListener."""
        self._nodes.same(address, other)

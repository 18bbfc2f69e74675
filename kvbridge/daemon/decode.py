"""The composition of the decode daemon, and its links to prefill nodes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextvars import Context
from functools import partial

from kvbridge.api.status import FenceStatus, PeerStatuses
from kvbridge.config.schema import DecodeConfig
from kvbridge.control.link import PeerCallbacks
from kvbridge.control.peers import PeerClient, PeerIdentity
from kvbridge.control.sockets import SocketContext
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, CapacityError, NotReadyError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.messages import Heartbeat, PeerMessage
from kvbridge.core.wire.worker_messages import Digested, EndpointsRevoked, Verified
from kvbridge.daemon.links import Links
from kvbridge.daemon.node import NodeDaemon
from kvbridge.node.decode.fence import Fence
from kvbridge.node.decode.prefill_nodes import PrefillNodes
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.telemetry.facts import MessagesResent

KEPT_SHARE = 4
"""One in so many links is reserved for addresses that have answered before, so that wrong addresses cannot take all links."""


def decode_daemon(config: DecodeConfig) -> NodeDaemon:
    """Put a decode daemon together; nothing is open yet. Raises ConfigError, InvalidInputError."""
    node = NodeDaemon(config, Role.DECODE)
    links = PrefillLinks(node)
    nodes = PrefillNodes(node.description, links, node.events)
    fence = Fence(node.workers, node.events, fence_s=config.timeouts.fence_s)
    settings = RoomSettings(
        geometry=node.geometry,
        limits=config.timeouts,
        shares_prefixes=config.tier.enabled,
        keeps_answers=config.tier.generated,
        adopted=node.adopted,
        host=node.layout.host_kinds,
        digest=config.integrity.digest,
    )
    pages = RoomPages(node.book, settings, node.events, node.prefixes, node.stored)
    rooms = DecodeRooms(pages, node.workers, node.engines, nodes, fence)
    links.serve(nodes, rooms, fence)
    node.workers.serve(
        links.worker_ready,
        links.worker_gone,
        {
            EndpointsRevoked: lambda message: fence.revoked(message.rank, message.before_epoch),
            **dict.fromkeys((Digested, Verified), rooms.hear_rank),
            **node.reports,
        },
    )
    return node.serve(links, rooms)


class PrefillLinks(Links):
    """The links of a decode node to prefill nodes: one client for each address that `PrefillNodes` knows. `close` ends it."""

    def __init__(self, node: NodeDaemon) -> None:
        super().__init__(node)
        self._context: SocketContext | None = None
        self._opened: dict[PeerAddress, PeerClient] = {}
        self._met: OrderedDict[PeerAddress, None] = OrderedDict()
        """Addresses that have answered, the last to answer at the end."""
        self._identity: PeerIdentity
        self._nodes: PrefillNodes
        self._rooms: DecodeRooms
        self._fence: Fence

    def serve(self, nodes: PrefillNodes, rooms: DecodeRooms, fence: Fence) -> None:
        """Set the receivers of messages and news. Call before `open`."""
        self._nodes, self._rooms, self._fence = nodes, rooms, fence

    # ------------------------------------------------------------------ for the daemon

    @property
    def epoch(self) -> int:
        return self._fence.epoch

    def open(self, identity: PeerIdentity) -> None:
        super().open(identity)
        self._identity = identity
        self._context = SocketContext()

    def watch(self) -> None:
        for address in list(self._opened):
            self._look(address)
        for address in list(self._opened) if self._gate.follow() else ():
            try:
                self._gate.check_server(address)
            except BridgeError as error:
                self._nodes.lost(address, str(error))
        for address in list(self._opened):
            self.send(address, Heartbeat())

    async def close(self, timeout_s: float) -> None:
        context, self._context = self._context, None
        try:
            await asyncio.gather(*(client.flush(timeout_s) for client in self._opened.values()))
        finally:
            for address in tuple(self._opened):
                self.disconnect(address)
            if context is not None:
                context.close()

    def tick(self) -> None:
        self._fence.tick()

    def status(self) -> PeerStatuses:
        return self._nodes.peers()

    def fence(self) -> FenceStatus:
        return self._fence.status()

    def worker_ready(self, rank: Rank) -> None:
        if not self._node.workers.missing():
            self._nodes.refresh()
        self._fence.ready(rank, self._node.workers.epoch(rank))

    def worker_gone(self, rank: Rank, reason: str) -> None:
        self._rooms.worker_gone(rank, reason, memory_lost=rank in self._node.layout.orders)
        self._node.worker_gone(rank, reason)

    # ------------------------------------------------------------------ for PrefillNodes

    def __contains__(self, address: PeerAddress) -> bool:
        return address in self._opened

    def connect(self, address: PeerAddress) -> None:
        """Connect to a prefill node.

        Raises ConfigError when the address is unfit, UnauthorizedError for its key, CapacityError for one too many,
        NotReadyError outside of `open` and `close`.
        """
        if self._context is None:
            raise NotReadyError("this decode node does not connect to prefill nodes now: it is starting or ending")
        most = self.settings.max_connections
        strangers = sum(known not in self._met for known in self._opened)
        if len(self._opened) >= most or (address not in self._met and strangers >= most - most // KEPT_SHARE):
            raise CapacityError(
                f"this decode node has {len(self._opened)} links to prefill addresses, of which {strangers} have never answered. "
                f"It opens {most} (control.max_connections, and a quarter of the descriptors that it may open), one in "
                f"{KEPT_SHARE} of them to addresses that have answered before. Those that do not answer are closed after "
                "timeouts.control_delivery_s. Does a router name wrong addresses?"
            )
        self._gate.check_server(address)
        client = partial(
            PeerClient,
            self._identity,
            self._callbacks(address),
            address.endpoint,
            server_key=address.public_key,
            context=self._context,
            settings=self.settings,
        )
        self._opened[address] = Context().run(
            client
        )  # what it hears later does not belong to the request that needed it first

    def _callbacks(self, address: PeerAddress) -> PeerCallbacks:
        return PeerCallbacks(
            partial(self._received, address),
            on_undelivered=lambda _peer, message, age_s: self._on_undelivered(address, message, age_s),
            on_refused=self._events.frame_refused,
            on_resent=lambda count: self._events.emit(MessagesResent(count=count)),
            on_reset=partial(self._reset, address),
            on_met=partial(self._is_same, address),
            on_cut=partial(self._look_again, address),
        )

    def _received(self, address: PeerAddress, peer: str, message: PeerMessage) -> None:
        self._met[address] = None
        self._met.move_to_end(address)
        if len(self._met) > self.settings.max_connections:
            self._met.popitem(last=False)
        self._nodes.received(address, peer, message)

    def _on_undelivered(self, address: PeerAddress, message: PeerMessage, age_s: float) -> None:
        """Give up a node without acknowledgements."""
        why = self._undelivered(address.endpoint, message, age_s)
        # A younger message was lost with its link, which the node has forgotten: `restarted` introduces us again.
        if address in self._opened and age_s >= self._timeouts.control_delivery_s:
            self._nodes.lost(address, why)

    def _reset(self, address: PeerAddress, incarnation: str) -> None:
        if not self._is_same(address, incarnation):
            self._nodes.restarted(address)

    def _is_same(self, address: PeerAddress, incarnation: str) -> bool:
        """Return whether another address leads to that incarnation already. A node with another key is another node."""
        for other, client in self._opened.items():
            if other != address and client.server == incarnation and other.public_key == address.public_key:
                self._nodes.same(address, other)
                return True
        return False

    def _look_again(self, address: PeerAddress) -> None:
        """Check a link again after the time for a new connection."""
        limit_s = self._timeouts.control_heartbeat_s
        asyncio.get_running_loop().call_later(limit_s, self._look, address, context=Context())

    def _look(self, address: PeerAddress) -> None:
        client = self._opened.get(address)
        if client is not None and (reason := self._why_lost(client.link, connects=True)):
            self._nodes.lost(address, reason)

    def send(self, address: PeerAddress, message: PeerMessage) -> None:
        """Queue a message. Without a link it is dropped; one that cannot be queued is logged."""
        client = self._opened.get(address)
        if client is None:
            return
        try:
            client.send(message)
        except BridgeError as error:
            self._unreachable(address.endpoint, message, error)

    def disconnect(self, address: PeerAddress) -> None:
        """Close a link; unacknowledged messages are lost. Harmless without a link."""
        client = self._opened.pop(address, None)
        if client is not None:
            client.close()

    def soon(self, do: Callable[[], None]) -> None:
        """Call `do` in the loop's next turn, outside of any request's context."""
        asyncio.get_running_loop().call_soon(do, context=Context())

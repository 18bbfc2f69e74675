"""The links of a decode node to prefill nodes: one client for each address that `PrefillNodes` knows, and no other."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextvars import Context
from functools import partial

import structlog

from kvbridge.config.schema import DecodeConfig
from kvbridge.control.gate import Gate
from kvbridge.control.link import PeerCallbacks, PeerSettings
from kvbridge.control.peers import PeerClient, PeerIdentity
from kvbridge.control.sockets import SocketContext
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, CapacityError, NotReadyError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Heartbeat, PeerMessage
from kvbridge.daemon.parts import NodeParts
from kvbridge.daemon.peer_setup import gate_of, peer_settings, why_lost
from kvbridge.node.decode.fence import Fence
from kvbridge.node.decode.prefill_nodes import PrefillNodes
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.telemetry.facts import MessageUndelivered

log = structlog.get_logger(__name__)

KEPT_SHARE = 4
"""One in so many links is kept for addresses that have answered before, so that those who name wrong ones do not take them all."""


class PrefillLinks:
    """The ways to the prefill nodes of a decode node. Implements Peers and WorkerListener.

    Opens nothing before `open`; `close` ends it.
    """

    def __init__(self, config: DecodeConfig, parts: NodeParts) -> None:
        self._config = config
        self._parts = parts
        self._events = parts.events
        self._context: SocketContext | None = None
        self._opened: dict[PeerAddress, PeerClient] = {}
        self._met: OrderedDict[PeerAddress, None] = OrderedDict()
        """Addresses that have answered, those that were heard of last at the end."""
        self._identity: PeerIdentity
        self._gate: Gate
        self._nodes: PrefillNodes
        self._rooms: DecodeRooms
        self._fence: Fence
        self.settings = PeerSettings()

    def serve(self, nodes: PrefillNodes, rooms: DecodeRooms, fence: Fence) -> None:
        """Say who hears what prefill nodes say; before `open`."""
        self._nodes, self._rooms, self._fence = nodes, rooms, fence
        self.tick, self.fence, self.status = fence.tick, fence.status, nodes.peers

    # ------------------------------------------------------------------ for the daemon

    @property
    def epoch(self) -> int:
        """The epoch of the endpoints that rank workers give out."""
        return self._fence.epoch

    def open(self, identity: PeerIdentity) -> None:
        """Say as whom links are opened. A decode node listens to nobody."""
        self._identity = identity
        self._gate = gate_of(self._config.control.curve, identity.keys)
        self.settings = peer_settings(self._config)
        self._context = SocketContext()

    def watch(self) -> None:
        """Send heartbeats; look for prefill nodes that are lost, or whose key is not accepted any more."""
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
        """Let the last messages out, of all links at once, and close the links. No link is opened from now on."""
        context, self._context = self._context, None
        try:
            await asyncio.gather(*(client.flush(timeout_s) for client in self._opened.values()))
        finally:
            for address in tuple(self._opened):
                self.disconnect(address)
            if context is not None:
                context.close()

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

    # ------------------------------------------------------------------ for PrefillNodes

    def names_of(self, key: str) -> frozenset[str]:
        """The instances that the holder of a key may speak for; empty: any."""
        return self._gate.names_of(key)

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
        self._opened[address] = Context().run(client)  # what it hears later is not of the request that needed it first

    def _callbacks(self, address: PeerAddress) -> PeerCallbacks:
        return PeerCallbacks(
            partial(self._received, address),
            on_undelivered=lambda _peer, message, age_s: self._undelivered(address, message, age_s),
            on_refused=self._events.frame_refused,
            on_resent=self._events.messages_resent,
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

    def _undelivered(self, address: PeerAddress, message: PeerMessage, age_s: float) -> None:
        """Give a node up that acknowledges nothing."""
        self._events.emit(MessageUndelivered(peer=address.endpoint, message=message.type, age_s=age_s))
        # A younger message fell with its link, which the node has forgotten: `restarted` introduces us anew.
        if address in self._opened and age_s >= self._config.timeouts.control_delivery_s:
            why = f"a {message.type} of {age_s:.1f} s ago was never acknowledged (limit: timeouts.control_delivery_s)"
            self._nodes.lost(address, why)

    def _reset(self, address: PeerAddress, incarnation: str) -> None:
        if not self._is_same(address, incarnation):
            self._nodes.restarted(address)

    def _is_same(self, address: PeerAddress, incarnation: str) -> bool:
        """Return whether another address leads to that incarnation already; whoever has another key is another node."""
        for other, client in self._opened.items():
            if other != address and client.server == incarnation and other.public_key == address.public_key:
                self._nodes.same(address, other)
                return True
        return False

    def _look_again(self, address: PeerAddress) -> None:
        """Look at a link when the connection that it lacks would have to be back."""
        limit_s = self._config.timeouts.control_heartbeat_s
        asyncio.get_running_loop().call_later(limit_s, self._look, address, context=Context())

    def _look(self, address: PeerAddress) -> None:
        client = self._opened.get(address)
        if client is not None and (reason := why_lost(self._config.timeouts, client.link, connects=True)):
            self._nodes.lost(address, reason)

    def send(self, address: PeerAddress, message: PeerMessage) -> None:
        """Queue a message; one that cannot be queued is logged. Dropped where there is no link."""
        client = self._opened.get(address)
        if client is None:
            return
        try:
            client.send(message)
        except BridgeError as error:
            log.warning(
                "peer_unreachable", peer=address.endpoint, message=message.type, code=error.code, reason=str(error)
            )

    def disconnect(self, address: PeerAddress) -> None:
        """Close a link; what was not acknowledged is not sent any more. Harmless where there is none."""
        client = self._opened.pop(address, None)
        if client is not None:
            client.close()

    def soon(self, do: Callable[[], None]) -> None:
        """Have `do` called in the loop's next turn, on nobody's behalf."""
        asyncio.get_running_loop().call_soon(do, context=Context())

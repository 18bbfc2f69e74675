"""A prefill node's control socket: decode nodes connect to it, and are heard, watched and given up here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from kvbridge.config.schema import PrefillConfig
from kvbridge.control.link import PeerCallbacks
from kvbridge.control.peers import PeerIdentity, PeerServer
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Heartbeat, PeerMessage
from kvbridge.daemon.parts import NodeParts
from kvbridge.daemon.peer_setup import gate_of, peer_settings, why_lost
from kvbridge.node.prefill.decode_nodes import DecodeNodes, Ended
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.telemetry.facts import MessageUndelivered

log = structlog.get_logger(__name__)


class DecodeLinks:
    """The ways to the decode nodes of a prefill node. Implements Peers and WorkerListener. Built anywhere, used in one loop."""

    epoch = 0

    def __init__(self, config: PrefillConfig, parts: NodeParts) -> None:
        self._config = config
        self._parts = parts
        self._events = parts.events
        self._server: PeerServer | None = None
        self._nodes: DecodeNodes
        self._rooms: PrefillRooms
        self._inspector = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inspector")

    def serve(self, nodes: DecodeNodes, rooms: PrefillRooms) -> None:
        """Say who hears what decode nodes say; before `open`."""
        self._nodes, self._rooms = nodes, rooms
        self.status, self.worker_ready = nodes.peers, nodes.worker_ready

    # ------------------------------------------------------------------ for the daemon

    def open(self, identity: PeerIdentity) -> PeerAddress:
        """Listen, and return the address to tell others. Raises ConfigError, ConflictError for a taken address."""
        callbacks = PeerCallbacks(
            self._nodes.received,
            on_undelivered=self._on_undelivered,
            on_refused=self._events.frame_refused,
            on_resent=self._events.messages_resent,
            # It may have given the pages of our rooms to others meanwhile.
            on_reset=lambda peer: self._nodes.gone(peer, "it had given this node up, and begins anew"),
        )
        control, keys = self._config.control, identity.keys
        settings, gate = peer_settings(self._config), gate_of(control.curve, keys)
        self._server = PeerServer(identity, callbacks, control.bind, settings=settings, gate=gate)
        endpoint = control.advertised(self._server.endpoint)
        return PeerAddress(endpoint=endpoint, public_key=keys.public if keys else "")

    def watch(self) -> None:
        """Send heartbeats, look for silent decode nodes, and for those whose key is not accepted any more."""
        server = self._server
        if server is None:
            return
        if server.gate.follow():
            for peer in server.barred():
                self._lose(peer, "its key was taken off the list of allowed keys (control.curve)")
        for peer in server.peers:
            lost = why_lost(self._config.timeouts, server.link(peer), connects=False)
            if lost:
                self._lose(peer, lost)
        for peer in server.peers:
            self.send(peer, Heartbeat())

    async def close(self, timeout_s: float) -> None:
        """Let the last messages out and stop listening. Harmless when closed."""
        server, self._server = self._server, None
        try:
            if server is not None:
                await server.flush(timeout_s)
                server.close()
        finally:
            self._nodes.close()  # so that the thread is through after the rank that it looks at
            await asyncio.to_thread(self._inspector.shutdown, cancel_futures=True)

    def tick(self) -> None:
        """Do nothing: rooms look at their own deadlines."""

    def fence(self) -> None:
        """Show no fence: nobody writes to a prefill node."""

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """Fail what a rank worker that is gone had under way."""
        self._rooms.orders.worker_gone(rank, reason)
        self._parts.worker_gone(rank, reason)

    # ------------------------------------------------------------------ for DecodeNodes

    def names_of(self, key: str) -> frozenset[str]:
        """The instances that the holder of a key may speak for; empty: any."""
        return self._server.gate.names_of(key) if self._server is not None else frozenset()

    def key_of(self, peer: str) -> str:
        """The public key that a connected peer proved to own; empty without keys. Raises NotFoundError."""
        return self._server.link(peer).user if self._server is not None else ""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a message; what cannot be delivered in time is reported as the loss of the node. Never raises."""
        if self._server is None:
            return
        try:
            self._server.send(peer, message)
        except BridgeError as error:
            log.warning("peer_unreachable", peer=peer, message=message.type, code=error.code, reason=str(error))

    def inspect(self, work: Callable[[], None], ended: Ended) -> None:
        """Call `work` on the thread for checks and then `ended` on the loop, with what `work` has raised."""

        def done(future: asyncio.Future[None]) -> None:
            if not future.cancelled():  # as at the end of this node
                ended(future.exception())

        asyncio.get_running_loop().run_in_executor(self._inspector, work).add_done_callback(done)

    def _on_undelivered(self, peer: str, message: PeerMessage, age_s: float) -> None:
        self._events.emit(MessageUndelivered(peer=peer, message=message.type, age_s=age_s))
        if peer in self._nodes.known():
            # Its link is forgotten too: a node that is there after all is told so, and introduces itself again.
            why = f"a {message.type} was not acknowledged for {age_s:.1f} s (limit: timeouts.control_delivery_s)"
            self._lose(peer, why)

    def _lose(self, peer: str, reason: str) -> None:
        self._nodes.gone(peer, reason)
        if self._server is not None:
            self._server.forget(peer)

"""The composition of the prefill daemon, and its links to decode nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvbridge.api.status import PeerStatuses
from kvbridge.config.endpoints import ListeningControlConfig
from kvbridge.config.schema import PrefillConfig
from kvbridge.control.link import PeerCallbacks
from kvbridge.control.peers import PeerIdentity, PeerServer
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, ConfigError
from kvbridge.core.geometry.tiers import why_no_prefixes
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.messages import FEATURES, Heartbeat, PeerMessage, Welcome
from kvbridge.core.wire.worker_messages import Digested, PathsChanged, PeerConnected, Rerouted, RoomClosed, Sent
from kvbridge.daemon.links import Links
from kvbridge.daemon.node import NodeDaemon
from kvbridge.node.prefill.decode_nodes import DecodeNodes, Ended
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.telemetry.facts import MessagesResent


def prefill_daemon(config: PrefillConfig) -> NodeDaemon:
    """Put a prefill daemon together; nothing is open yet. Raises ConfigError, InvalidInputError."""
    node = NodeDaemon(config, Role.PREFILL)
    if config.tier.enabled and (why := why_no_prefixes(node.geometry)):
        raise ConfigError(
            f"tier.enabled: {why}. Set it to false here; decode nodes keep prefixes of this model all the same"
        )
    links = DecodeLinks(node, config.control)
    nodes = DecodeNodes(
        Welcome(
            instance=node.identity.instance,
            node=node.identity.node,
            incarnation=node.identity.incarnation,
            model_identity=config.tier.model,
            pp_size=config.parallelism.pp_size,
            tp_size=config.parallelism.tp_size,
            stage_boundaries=node.stage_boundaries,
            ranks=tuple(node.workers.layers),
            features=FEATURES,
        ),
        node.geometry,
        node.workers,
        links,
        node.events,
        check_s=config.timeouts.handshake_s,
    )
    settings = RoomSettings(
        geometry=node.geometry,
        limits=config.timeouts,
        # Decode keeps no prefixes without keys, so a node that keeps none itself states its engines' keys all the same.
        shares_prefixes=config.tier.model is not None,
        computes=True,
        checkpoint_interval_tokens=config.tier.checkpoint_interval_tokens,
        part_of_instance=len(node.workers.layers) < config.parallelism.pp_size * config.parallelism.tp_size,
        adopted=node.adopted,
    )
    pages = RoomPages(node.book, settings, node.events, node.prefixes, node.stored)
    rooms = PrefillRooms(pages, node.workers, node.engines, nodes)
    links.serve(nodes, rooms)
    node.workers.serve(
        links.worker_ready,
        links.worker_gone,
        {
            PeerConnected: nodes.worker_connected,
            PathsChanged: nodes.paths_changed,
            **dict.fromkeys((Rerouted, Digested, Sent, RoomClosed), rooms.hear_rank),
            **node.reports,
        },
    )
    return node.serve(links, rooms)


class DecodeLinks(Links):
    """A prefill node's control socket, to which decode nodes connect, and the watch over them."""

    def __init__(self, node: NodeDaemon, control: ListeningControlConfig) -> None:
        super().__init__(node)
        self._control = control
        self._server: PeerServer | None = None
        self._nodes: DecodeNodes
        self._rooms: PrefillRooms
        self._inspector = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inspector")

    def serve(self, nodes: DecodeNodes, rooms: PrefillRooms) -> None:
        """Set the receivers of messages and news. Call before `open`."""
        self._nodes, self._rooms = nodes, rooms

    # ------------------------------------------------------------------ for the daemon

    def open(self, identity: PeerIdentity) -> PeerAddress:
        super().open(identity)
        callbacks = PeerCallbacks(
            self._nodes.received,
            on_undelivered=self._on_undelivered,
            on_refused=self._events.frame_refused,
            on_resent=lambda count: self._events.emit(MessagesResent(count=count)),
            # The peer may have given the pages of our rooms to others meanwhile.
            on_reset=lambda peer: self._nodes.gone(peer, "it had given this node up, and begins anew"),
        )
        self._server = PeerServer(identity, callbacks, self._control.bind, settings=self.settings, gate=self._gate)
        endpoint = self._control.advertised(self._server.endpoint)
        return PeerAddress(endpoint=endpoint, public_key=identity.keys.public if identity.keys else "")

    def watch(self) -> None:
        server = self._server
        if server is None:
            return
        if self._gate.follow():
            for peer in server.barred():
                self._lose(peer, "its key was taken off the list of allowed keys (control.curve)")
        for peer in server.peers:
            if lost := self._why_lost(server.link(peer), connects=False):
                self._lose(peer, lost)
        for peer in server.peers:
            self.send(peer, Heartbeat())

    async def close(self, timeout_s: float) -> None:
        server, self._server = self._server, None
        try:
            if server is not None:
                await server.flush(timeout_s)
                server.close()
        finally:
            self._nodes.close()  # the thread then ends after the rank that it checks
            await asyncio.to_thread(self._inspector.shutdown, cancel_futures=True)

    def status(self) -> PeerStatuses:
        return self._nodes.peers()

    def worker_ready(self, rank: Rank) -> None:
        self._nodes.worker_ready(rank)

    def worker_gone(self, rank: Rank, reason: str) -> None:
        self._rooms.worker_gone(rank, reason)
        self._node.worker_gone(rank, reason)

    # ------------------------------------------------------------------ for DecodeNodes

    def key_of(self, peer: str) -> str:
        """Return the public key that a connected peer has proved to own; empty without keys. Raises NotFoundError."""
        return self._server.link(peer).user if self._server is not None else ""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a message. A message that is not delivered in time is reported as the loss of the node. Never raises."""
        if self._server is None:
            return
        try:
            self._server.send(peer, message)
        except BridgeError as error:
            self._unreachable(peer, message, error)

    def inspect(self, work: Callable[[], None], ended: Ended) -> None:
        """Call `work` on the thread for checks, and then `ended` on the loop with its exception, if any."""

        def done(future: asyncio.Future[None]) -> None:
            if not future.cancelled():  # as at the end of this node
                ended(future.exception())

        asyncio.get_running_loop().run_in_executor(self._inspector, work).add_done_callback(done)

    def _on_undelivered(self, peer: str, message: PeerMessage, age_s: float) -> None:
        why = self._undelivered(peer, message, age_s)
        if peer in self._nodes.known():
            # Its link is forgotten, too: a node that still lives notices, and introduces itself again.
            self._lose(peer, why)

    def _lose(self, peer: str, reason: str) -> None:
        self._nodes.gone(peer, reason)
        if self._server is not None:
            self._server.forget(peer)

"""The prefill daemon: a node whose rooms are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvbridge.config.schema import PrefillConfig
from kvbridge.core.errors import BridgeError, ConfigError, NotReadyError
from kvbridge.core.geometry.tiers import why_no_prefixes
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.features import PEER_FEATURES
from kvbridge.core.wire.messages import (
    Abort,
    Drained,
    Failed,
    Heartbeat,
    Hello,
    Intend,
    Offer,
    PeerMessage,
    Welcome,
)
from kvbridge.core.wire.worker_messages import Digested, PathsChanged, PeerConnected, Rerouted, RoomClosed, Sent
from kvbridge.daemon.decode_links import DecodeLinks
from kvbridge.daemon.node import NodeDaemon
from kvbridge.daemon.parts import NodeParts
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.handshake.inspections import Inspections
from kvbridge.node.handshake.introduction import Self
from kvbridge.node.prefill.room import Asking
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.node.room_pages import RoomSettings


def prefill_daemon(config: PrefillConfig) -> NodeDaemon:
    """Put a prefill daemon together; nothing is open yet. Raises ConfigError, InvalidInputError."""
    parts = NodeParts.build(config, Role.PREFILL)
    if config.tier.enabled and (why := why_no_prefixes(parts.geometry)):
        raise ConfigError(
            f"tier.enabled: {why}. Set it to false here; decode nodes keep prefixes of this model all the same"
        )
    links, inspector = DecodeLinks(config, parts.events), Inspector()
    inspections = Inspections(inspector.run, limit_s=config.timeouts.handshake_s)
    nodes = DecodeNodes(
        _introduction(parts),
        parts.workers,
        inspections=inspections,
        send=links.send,
        events=parts.events,
        names_of=links.names_of,
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
    nodes.watch(rooms.peer_gone)
    peers = DecodePeers(parts, links, nodes, rooms, inspections, inspector)
    inspections.deliver_to(peers.deliver)
    parts.worker_host.serve(
        peers,
        {
            PeerConnected: nodes.worker_connected,
            PathsChanged: nodes.paths_changed,
            **dict.fromkeys((Rerouted, Digested, Sent, RoomClosed), rooms.orders.hear),
            **parts.reports,
        },
    )
    return NodeDaemon(parts, peers, rooms)


def _introduction(parts: NodeParts) -> Self:
    identity, sizes = parts.identity, parts.config.parallelism
    welcome = Welcome(
        instance=identity.instance,
        node=identity.node,
        incarnation=identity.incarnation,
        model_identity=parts.config.tier.model,
        pp_size=sizes.pp_size,
        tp_size=sizes.tp_size,
        stage_boundaries=parts.stage_boundaries,
        ranks=tuple(parts.workers.layers),
        features=PEER_FEATURES,
    )
    return Self(welcome, parts.geometry)


class Inspector:
    """A thread on which a node checks what its peers say of themselves, one after another; it starts with the first check.

    Called from the event loop's thread only.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inspector")

    def run(self, work: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        """Call `work` on the thread and then `ended` on the loop, with what it has raised."""

        def done(future: asyncio.Future[None]) -> None:
            if not future.cancelled():  # as at the end of this node
                ended(future.exception())

        asyncio.get_running_loop().run_in_executor(self._executor, work).add_done_callback(done)

    async def close(self) -> None:
        """Wait for the check at hand and forget the others."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


class DecodePeers:
    """What decode nodes and rank workers say, and whom it concerns. Implements Peers and WorkerListener."""

    epoch = 0

    def __init__(
        self,
        parts: NodeParts,
        links: DecodeLinks,
        nodes: DecodeNodes,
        rooms: PrefillRooms,
        inspections: Inspections,
        inspector: Inspector,
    ) -> None:
        self._parts = parts
        self._events = parts.events
        self._links = links
        self._nodes = nodes
        self._rooms = rooms
        self._inspections = inspections
        self._inspector = inspector
        self.open, self.watch = links.open, links.watch
        self.status, self.worker_ready = nodes.peers, nodes.worker_ready
        links.serve(self.received, nodes)

    # ------------------------------------------------------------------ for the daemon

    async def close(self, timeout_s: float) -> None:
        """Close the ways to peers."""
        try:
            await self._links.close(timeout_s)
        finally:
            self._inspections.close()  # so that the thread is through after the rank that it looks at
            await self._inspector.close()

    def tick(self) -> None:
        """Do nothing: rooms look at their own deadlines."""

    def fence(self) -> None:
        """Show no fence: nobody writes to a prefill node."""

    def worker_gone(self, rank: Rank, reason: str) -> None:
        """Fail what a rank worker that is gone had under way."""
        self._rooms.orders.worker_gone(rank, reason)
        self._parts.worker_gone(rank, reason)

    # ------------------------------------------------------------------ decode nodes

    def deliver(self, peer: str, message: PeerMessage) -> None:
        """Take what had to wait until the introduction of its peer was checked. Never raises."""
        try:
            self.received(peer, message)
        except BridgeError as error:
            self._events.frame_refused(error.code, str(error))

    def received(self, peer: str, message: PeerMessage) -> None:
        """Take what a decode node says."""
        if self._nodes.holds(peer, message):
            return
        match message:
            case Hello():
                self._nodes.hello(peer, message, key=self._links.key_of(peer))
            case Intend() | Offer() if peer not in self._nodes.known():
                self._refuse_unknown(peer, message)
            case Intend() | Offer():
                self._rooms.hear(peer, message)
            case Abort():
                if peer not in self._nodes.known():
                    text = f"an abort of room {message.room} from {peer}, which is not welcome here"
                    self._events.frame_refused("unmet", text)
                self._rooms.hear(peer, message)  # it ends the peer's own rooms only
            case Failed():
                self._rooms.hear(peer, message)
            case Heartbeat():
                pass
            case _:
                text = f"{message.type} from {peer}: a prefill daemon does not take it"
                self._events.frame_refused("wrong_direction", text)

    def _refuse_unknown(self, peer: str, offer: Asking) -> None:
        """Nobody writes to memory that was never introduced, or whose owner we have given up."""
        text = f"an {offer.type} for room {offer.room} from {peer}, which has not been welcomed here"
        self._events.frame_refused("unmet", text)
        why = "this prefill node does not know you (any more): say hello first"
        room, generation = offer.room, offer.generation
        self._links.send(peer, Failed(room=room, generation=generation, code=NotReadyError.code, message=why))
        self._links.send(peer, Drained(room=room, generation=generation))

"""The prefill daemon: a node whose rooms are sent.

Owns: how a node, the sending service, the control door and the meeting of decode nodes are put together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog

from kvbridge.api.rooms import PeerAddress
from kvbridge.config.schema import PrefillConfig
from kvbridge.control.link import PeerCallbacks, PeerSettings
from kvbridge.control.peers import PeerIdentity, PeerServer
from kvbridge.core.errors import BridgeError, NotReadyError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.messages import Abort, Drained, Failed, Heartbeat, Hello, Offer, PeerMessage
from kvbridge.core.wire.worker_messages import Digested, PeerConnected, RoomClosed, Sent
from kvbridge.daemon.allowed import AllowedPeers
from kvbridge.daemon.node import Node
from kvbridge.daemon.peer_setup import why_lost
from kvbridge.daemon.worker_host import WorkerReport
from kvbridge.node.engine_api import PrefillEngineApi
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.handshake.inspections import Inspections
from kvbridge.node.handshake.introduction import Self
from kvbridge.node.sender.room import SenderLimits, SenderPorts, SenderSettings
from kvbridge.node.sender.service import SenderRooms
from kvbridge.telemetry.events import MessagesResent, MessageUndelivered, PeerLost

log = structlog.get_logger(__name__)


class PrefillNode(Node):
    """One prefill daemon."""

    role = Role.PREFILL

    def __init__(self, config: PrefillConfig) -> None:
        """See Node."""
        super().__init__(config)
        timeouts = config.timeouts
        self._server: PeerServer | None = None
        self._allowed: AllowedPeers | None = None
        self._door = PrefillEngineApi(lambda: self._sender, lambda: self.desk, self.engine_ports())
        self._sender = SenderRooms(
            SenderPorts(
                book=self.book,
                workers=self.workers,
                peers=self,
                engines=self._door,
                events=self.events,
            ),
            SenderSettings(
                geometry=self.geometry,
                keep_s=timeouts.room_keep_s,
                adopted=self.adopted,
                limits=SenderLimits(
                    begin_s=timeouts.begin_s,
                    offer_s=timeouts.offer_s,
                    room_s=timeouts.room_s,
                    early_offer_s=timeouts.early_offer_s,
                    drain_s=timeouts.drain_s,
                ),
            ),
        )
        self._inspector = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inspector")
        self._inspections = Inspections(self._inspect, deliver=self._deliver, limit_s=timeouts.meet_s)
        self._decode = DecodeNodes(
            Self(
                config.instance,
                config.node,
                self.incarnation,
                config.parallelism.pp_size,
                config.parallelism.tp_size,
                self.stage_boundaries,
                self.geometry,
            ),
            self.workers,
            inspections=self._inspections,
            send=self.send,
            names_of=lambda key: self._server.gate.names_of(key) if self._server is not None else frozenset(),
        )
        self._decode.watch(self._sender)

    @property
    def rooms(self) -> SenderRooms:
        """The rooms of this node."""
        return self._sender

    @property
    def door(self) -> PrefillEngineApi:
        """Where engines come in."""
        return self._door

    # ------------------------------------------------------------------ peers

    def open_peers(self, identity: PeerIdentity, settings: PeerSettings) -> PeerAddress:
        """Listen for decode nodes."""
        callbacks = PeerCallbacks(
            self._on_message,
            on_undelivered=self._on_undelivered,
            on_refused=self.frame_refused,
            on_resent=lambda count: self.events.emit(MessagesResent(count=count)),
            on_reset=self._on_reset,
        )
        self._server = PeerServer(identity, callbacks, settings=settings)
        self._allowed = AllowedPeers(self.config.control.curve, identity.keys)
        return PeerAddress(endpoint=self._server.bind(self.config.control.bind))

    async def close_peers(self, timeout_s: float) -> None:
        """Let the last messages out and stop listening."""
        if self._server is not None:
            await self._server.flush(timeout_s)
            self._server.close()
        self._inspections.close()  # so that the thread is through after the rank that it looks at
        await asyncio.to_thread(self._inspector.shutdown, cancel_futures=True)

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a message to a decode node (PeerChannel)."""
        if self._server is None:
            return
        try:
            self._server.send(peer, message)
        except BridgeError as error:
            log.warning("peer_unreachable", peer=peer, message=message.type, code=error.code, reason=str(error))

    def transport(self, peer: str, rank: Rank) -> str:
        """Name what a rank of ours reaches a decode node over (PeerChannel)."""
        return self._decode.transport(peer, rank)

    def watch_peers(self) -> None:
        """Send heartbeats and look for silent decode nodes."""
        if self._server is None:
            return
        self._follow_allowed(self._server)
        for peer in self._server.peers:
            lost = why_lost(
                self.config.timeouts, silent_s=self._server.last_heard_s(peer), cut_s=self._server.cut_s(peer)
            )
            if lost:
                self._lose(peer, lost)
            else:
                self.send(peer, Heartbeat())

    def _follow_allowed(self, server: PeerServer) -> None:
        """Put a changed list of allowed keys in force, and end the peers whose key is gone from it."""
        if self._allowed is None or not self._allowed.follow():
            return
        server.gate.replace(self._allowed.current)
        for peer in server.barred():
            self._lose(peer, "its key was taken off the list of allowed keys (control.curve)")

    def _lose(self, peer: str, reason: str) -> None:
        self.events.emit(PeerLost(peer=peer, reason=reason))
        self._decode.gone(peer, reason)
        if self._server is not None:
            self._server.forget(peer)

    def _on_reset(self, peer: str) -> None:
        """A decode node that had given us up is back: it may have given the pages of our rooms to others meanwhile."""
        self._decode.gone(peer, "it had given this node up, and begins anew")

    def _inspect(self, work: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        def done(future: asyncio.Future[None]) -> None:
            if not future.cancelled():  # as at the end of this node
                ended(future.exception())

        asyncio.get_running_loop().run_in_executor(self._inspector, work).add_done_callback(done)

    def _deliver(self, peer: str, message: PeerMessage) -> None:
        """Take what had to wait until the introduction of its peer was checked."""
        try:
            self._on_message(peer, message)
        except BridgeError as error:
            self.frame_refused(error.code, str(error))

    def _on_message(self, peer: str, message: PeerMessage) -> None:
        if self._decode.holds(peer, message):
            return
        match message:
            case Hello():
                key = self._server.key_of(peer) if self._server is not None else ""
                self._decode.hello(peer, message, key=key)
            case Offer() if peer not in self._decode.known():
                self._refuse_stranger(peer, message)
            case Offer():
                self._sender.offer(peer, message)
            case Abort():
                if peer not in self._decode.known():
                    self.frame_refused(
                        "unmet", f"an abort of room {message.room} from {peer}, which is not welcome here"
                    )
                self._sender.peer_abort(peer, message)  # it ends the peer's own rooms only
            case Failed():
                self._sender.peer_failed(peer, message)
            case Heartbeat():
                pass
            case _:
                self.frame_refused("wrong_direction", f"{message.type} from {peer}: a prefill daemon does not take it")

    def _refuse_stranger(self, peer: str, offer: Offer) -> None:
        """Nobody writes to memory that was never introduced, or whose owner we have given up."""
        self.frame_refused("unmet", f"an offer for room {offer.room} from {peer}, which has not been welcomed here")
        why = "this prefill node does not know you (any more): say hello first"
        room, generation = offer.room, offer.generation
        self.send(peer, Failed(room=room, generation=generation, code=NotReadyError.code, message=why))
        self.send(peer, Drained(room=room, generation=generation))

    def _on_undelivered(self, peer: str, message: PeerMessage, age_s: float) -> None:
        self.events.emit(MessageUndelivered(peer=peer, message=message.type, age_s=age_s))
        if peer in self._decode.known():
            # Its link is forgotten too: a node that is there after all is told so, and introduces itself again.
            self._lose(
                peer, f"a {message.type} was not acknowledged for {age_s:.1f} s (limit: timeouts.control_delivery_s)"
            )

    def peer_status(self) -> list[dict[str, object]]:
        """For `/status`."""
        return self._decode.peers()

    # ------------------------------------------------------------------ workers and rooms

    def worker_returned(self, rank: Rank) -> None:
        """A rank worker is ready (again): it has to be connected to everybody."""
        self._decode.worker_ready(rank)

    def worker_lost(self, rank: Rank, reason: str) -> None:
        """A rank worker is gone."""
        self._sender.worker_gone(rank, reason)

    def worker_said(self, rank: Rank, message: WorkerReport) -> None:
        """A rank worker reports."""
        match message:
            case PeerConnected():
                self._decode.worker_connected(message)
            case Digested():
                self._sender.digested(message)
            case Sent():
                self._sender.sent(message)
            case RoomClosed():
                self._sender.room_closed(message)
            case _:
                self.frame_refused("wrong_direction", f"{message.type} from rank worker {rank} of a prefill node")

    def open_rooms(self) -> int:
        """Rooms that have not ended."""
        return len(self._sender.rooms.open())

    async def end_rooms(self, reason: str) -> None:
        """Abort every room that has not ended."""
        for room in self._sender.rooms.open():
            await self._sender.cancel(room.room, reason)

    def quarantined_rooms(self) -> dict[str, int]:
        """Rooms whose pages are quarantined, by cause."""
        return self._sender.rooms.quarantined()

    def room_states(self) -> dict[str, int]:
        """Rooms by what users see."""
        return self._sender.rooms.states()

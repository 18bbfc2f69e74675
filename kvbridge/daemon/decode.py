"""The decode daemon: a node whose rooms are written to and then claimed.

Owns: how a node, the receiving service and the links to prefill nodes are put together.
"""

from __future__ import annotations

from typing import Any

import structlog

from kvbridge.config.schema import DecodeConfig
from kvbridge.control.link import PeerCallbacks, PeerSettings
from kvbridge.control.peers import PeerClient, PeerIdentity
from kvbridge.control.sockets import SocketContext
from kvbridge.core.errors import BridgeError, CapacityError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.messages import Digests, Done, Drained, Failed, Heartbeat, PeerMessage, Rejected, Welcome
from kvbridge.core.wire.worker_messages import Digested, EndpointsRevoked, Verified
from kvbridge.daemon.allowed import AllowedPeers
from kvbridge.daemon.node import Node
from kvbridge.daemon.peer_setup import why_lost
from kvbridge.daemon.worker_host import WorkerReport
from kvbridge.service.engine_door import DecodeDoor
from kvbridge.service.fence import Fence
from kvbridge.service.meeting import PrefillNodes
from kvbridge.service.ports import PeerAddress
from kvbridge.service.receiver import ReceiverLimits, ReceiverService

log = structlog.get_logger(__name__)

MOST_LINKS = 1_024
"""Prefill addresses that are connected to at once; each is named by whoever admits a room."""


class DecodeNode(Node):
    """One decode daemon."""

    role = Role.DECODE

    def __init__(self, config: DecodeConfig) -> None:
        """See Node."""
        super().__init__(config)
        timeouts = config.timeouts
        self._clients: dict[PeerAddress, PeerClient] = {}
        self._context: SocketContext | None = None
        self._identity: PeerIdentity | None = None
        self._allowed: AllowedPeers | None = None
        self._settings = PeerSettings()
        self._door = DecodeDoor(
            lambda: self._receiver,
            lambda: self.desk,
            send=self.send_engine,
            pid=self.engine_pid,
            describe=self.describe_engine,
            ranks=tuple(self.workers.layers),
        )
        self._prefill = PrefillNodes(
            describe=self.description,
            open_link=self._open_link,
            send_to=self._send_to,
            on_changed=self._nodes_changed,
            on_gone=lambda peer, reason: self._receiver.peer_gone(peer, reason),  # noqa: PLW0108 - made below
            names_of=lambda key: self._allowed.names_of(key) if self._allowed is not None else frozenset(),
        )
        self._fence = Fence(
            self.workers.layers,
            send=self.workers.send,
            open_offers=lambda: self._receiver.open_offers(),  # noqa: PLW0108
            on_shut=lambda owners: self._receiver.shut(owners),  # noqa: PLW0108
            fence_s=timeouts.fence_s,
        )
        self._receiver = ReceiverService(
            geometry=self.geometry,
            host=self.layout.host_kinds,
            book=self.book,
            ranks=self.workers,
            nodes=self._prefill,
            fence=self._fence,
            engines=self._door,
            observer=self.observer,
            limits=ReceiverLimits(
                pages_s=timeouts.pages_s,
                meet_s=timeouts.meet_s,
                room_s=timeouts.room_s,
                verify_s=timeouts.verify_s,
                claim_s=timeouts.claim_s,
                drain_s=timeouts.drain_s,
            ),
            keep_s=timeouts.room_keep_s,
            adopted=self.adopted,
            digest=config.integrity.digest,
        )

    @property
    def rooms(self) -> ReceiverService:
        """The rooms of this node."""
        return self._receiver

    @property
    def door(self) -> DecodeDoor:
        """Where engines come in."""
        return self._door

    @property
    def epoch(self) -> int:
        """See Node."""
        return self._fence.epoch

    def tick(self) -> None:
        """See Node."""
        super().tick()
        self._fence.tick()

    # ------------------------------------------------------------------ peers

    def open_peers(self, identity: PeerIdentity, settings: PeerSettings) -> None:
        """A decode node listens to nobody: it connects to the prefill nodes of its rooms."""
        self._allowed = AllowedPeers(self.config.control.curve, identity.keys)
        self._identity, self._settings, self._context = identity, settings, SocketContext()

    async def close_peers(self, timeout_s: float) -> None:
        """Let the last messages out and close the links."""
        for client in self._clients.values():
            await client.flush(timeout_s / max(1, len(self._clients)))
            client.close()
        self._clients.clear()
        if self._context is not None:
            self._context.close()
            self._context = None

    def _nodes_changed(self) -> None:
        self._receiver.nodes_changed()

    def _open_link(self, address: PeerAddress) -> None:
        """Connect to a prefill node.

        Raises ConfigError when the address is unfit, UnauthorizedError for its key, CapacityError for one too many.
        """
        if self._identity is None or self._context is None or self._allowed is None or address in self._clients:
            return
        if len(self._clients) >= MOST_LINKS:
            raise CapacityError(
                f"this decode node has {len(self._clients)} links to prefill addresses, the most that it opens; those that "
                "do not answer are closed after timeouts.control_delivery_s. Does a router name wrong addresses?"
            )
        self._allowed.check_server(address)
        callbacks = PeerCallbacks(
            lambda peer, message: self._on_message(address, peer, message),
            on_undelivered=lambda _peer, message, age_s: self._on_undelivered(address, message, age_s),
            on_refused=self.frame_refused,
            on_resent=self.metrics.resent,
            on_reset=lambda _incarnation: self._prefill.restarted(address),
        )
        client = PeerClient(self._identity, callbacks, context=self._context, settings=self._settings)
        client.connect(address.endpoint, address.public_key)
        self._clients[address] = client

    def _send_to(self, address: PeerAddress, message: PeerMessage) -> None:
        client = self._clients.get(address)
        if client is None:
            return
        try:
            client.send(message)
        except BridgeError as error:
            log.warning(
                "peer_unreachable", peer=address.endpoint, message=message.type, code=error.code, reason=str(error)
            )

    def watch_peers(self) -> None:
        """Send heartbeats, look for silent prefill nodes, and for those whose key is not accepted any more."""
        self._follow_allowed()
        for address in self._prefill.addresses():
            client = self._clients[address]
            lost = ""
            if client.peer:
                lost = why_lost(self.config.timeouts, silent_s=client.last_heard_s(), cut_s=client.cut_s())
            if lost:
                self._lose(address, lost)
            else:
                self._send_to(address, Heartbeat())

    def _follow_allowed(self) -> None:
        if self._allowed is None or not self._allowed.follow():
            return
        for address in self._prefill.addresses():
            try:
                self._allowed.check_server(address)
            except BridgeError as error:
                self._lose(address, str(error))

    def _lose(self, address: PeerAddress, reason: str) -> None:
        """Give a prefill node up, and its link with it: the next room that names it begins anew."""
        log.warning("peer_lost", peer=address.endpoint, reason=reason)
        self._prefill.lost(address, reason)
        client = self._clients.pop(address, None)
        if client is not None:
            client.close()

    def _on_message(self, address: PeerAddress, peer: str, message: PeerMessage) -> None:
        match message:
            case Welcome() if message.incarnation == peer:
                self._prefill.welcome(address, message)
            case Rejected():
                self._prefill.rejected(address, message)
            case Welcome() | Digests() | Done() | Failed() | Drained() if not self._prefill.speaks(address, peer):
                self.frame_refused("unmet", f"{message.type} from {address.endpoint} in the name of {peer}")
            case Digests():
                self._receiver.digests.expect(peer, message)
            case Done():
                self._receiver.done(peer, message)
            case Failed():
                self._receiver.failed(peer, message)
            case Drained():
                self._receiver.drained(peer, message)
            case Heartbeat():
                pass
            case _:
                self.frame_refused("wrong_direction", f"{message.type} from {peer}: a decode daemon does not take it")

    def _on_undelivered(self, address: PeerAddress, message: PeerMessage, age_s: float) -> None:
        self.metrics.undelivered()
        # A younger message fell with its link, which the node has forgotten: `restarted` introduces us anew.
        if address in self._clients and age_s >= self.config.timeouts.control_delivery_s:
            why = f"a {message.type} of {age_s:.1f} s ago was never acknowledged (limit: timeouts.control_delivery_s)"
            self._lose(address, why)

    def peer_status(self) -> list[dict[str, object]]:
        """For `/status`."""
        return self._prefill.peers()

    # ------------------------------------------------------------------ workers and rooms

    def worker_returned(self, rank: Rank) -> None:
        """A rank worker is ready (again), perhaps with new endpoints: peers must know."""
        if not self.workers.missing():
            self._prefill.refresh()
        self._fence.ready(rank, self.workers.epoch(rank))

    def worker_lost(self, rank: Rank, reason: str) -> None:
        """A rank worker is gone, perhaps with device memory that it made."""
        self._receiver.worker_gone(rank, reason, memory_lost=rank in self.layout.orders)

    def worker_said(self, rank: Rank, message: WorkerReport) -> None:
        """A decode worker only receives: it has nothing to report on rooms that it would send."""
        match message:
            case EndpointsRevoked():
                self._fence.revoked(rank, message.before_epoch)
            case Digested():
                self._receiver.digests.find(message)
            case Verified():
                self._receiver.digests.verified(message)
            case _:
                self.frame_refused("wrong_direction", f"{message.type} from rank worker {rank} of a decode node")

    def open_rooms(self) -> int:
        """Rooms that have not ended."""
        return len(self._receiver.rooms.open())

    async def end_rooms(self, reason: str) -> None:
        """Abort every room that has not ended."""
        for room in self._receiver.rooms.open():
            await self._receiver.cancel(room.room, reason)

    def quarantined_rooms(self) -> dict[str, int]:
        """Rooms whose pages are quarantined, by cause."""
        return self._receiver.rooms.quarantined()

    def status(self) -> dict[str, Any]:
        """See Node; and how far writers that gave no proof are shut out."""
        return super().status() | {"fence": self._fence.status()}

    def room_states(self) -> dict[str, int]:
        """Rooms by what users see."""
        return self._receiver.rooms.states()

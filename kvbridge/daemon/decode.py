"""The decode daemon: a node whose rooms are written to and then claimed.

Owns: how a node, the receiving service and the links to prefill nodes are put together.
"""

from __future__ import annotations

from typing import Any

from kvbridge.api.rooms import PeerAddress
from kvbridge.config.schema import DecodeConfig
from kvbridge.control.link import PeerCallbacks, PeerSettings
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.ids import Rank, Role
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.wire.features import PEER_FEATURES, Feature, Features
from kvbridge.core.wire.messages import Digests, Done, Drained, Failed, Heartbeat, PeerMessage, Rejected, Welcome
from kvbridge.core.wire.worker_messages import Digested, EndpointsRevoked, Verified
from kvbridge.daemon.allowed import AllowedPeers
from kvbridge.daemon.node import Node
from kvbridge.daemon.prefill_links import PrefillLinks
from kvbridge.daemon.worker_host import WorkerReport
from kvbridge.node.engine_api import DecodeEngineApi
from kvbridge.node.handshake.prefill_nodes import PrefillNodes
from kvbridge.node.receiver.fence import Fence
from kvbridge.node.receiver.room import ReceiverLimits, ReceiverPorts, ReceiverSettings
from kvbridge.node.receiver.service import ReceiverRooms
from kvbridge.telemetry.events import MessagesResent, MessageUndelivered, PeerLost


def _required(digest: DigestKind) -> Features:
    """What this node has, and requires of the prefill nodes that write to it."""
    requires = () if digest is DigestKind.NONE else (Feature.DIGESTS,)
    return Features(has=PEER_FEATURES.has, requires=requires)


class DecodeNode(Node):
    """One decode daemon."""

    role = Role.DECODE

    def __init__(self, config: DecodeConfig) -> None:
        """See Node."""
        super().__init__(config)
        timeouts = config.timeouts
        self._allowed: AllowedPeers | None = None
        self._door = DecodeEngineApi(lambda: self._receiver, lambda: self.desk, self.engine_ports())
        self._links = PrefillLinks(self._callbacks)
        self._prefill = PrefillNodes(
            describe=self.description,
            links=self._links,
            features=_required(config.integrity.digest),
            names_of=lambda key: self._allowed.names_of(key) if self._allowed is not None else frozenset(),
        )
        self._fence = Fence(
            self.workers.layers,
            send=self.workers.send,
            events=self.events,
            fence_s=timeouts.fence_s,
        )
        self._receiver = ReceiverRooms(
            ReceiverPorts(
                book=self.book,
                workers=self.workers,
                nodes=self._prefill,
                fence=self._fence,
                engines=self._door,
                events=self.events,
            ),
            ReceiverSettings(
                geometry=self.geometry,
                keep_s=timeouts.room_keep_s,
                adopted=self.adopted,
                host=self.layout.host_kinds,
                digest=config.integrity.digest,
                limits=ReceiverLimits(
                    pages_s=timeouts.pages_s,
                    meet_s=timeouts.meet_s,
                    room_s=timeouts.room_s,
                    verify_s=timeouts.verify_s,
                    claim_s=timeouts.claim_s,
                    drain_s=timeouts.drain_s,
                ),
            ),
        )
        self._fence.watch(self._receiver)
        self._prefill.watch(self._receiver)

    @property
    def rooms(self) -> ReceiverRooms:
        """The rooms of this node."""
        return self._receiver

    @property
    def door(self) -> DecodeEngineApi:
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
        self._links.start(identity, settings, self._allowed)

    async def close_peers(self, timeout_s: float) -> None:
        """Let the last messages out and close the links."""
        await self._links.stop(timeout_s)

    def _callbacks(self, address: PeerAddress) -> PeerCallbacks:
        return PeerCallbacks(
            lambda peer, message: self._on_message(address, peer, message),
            on_undelivered=lambda _peer, message, age_s: self._on_undelivered(address, message, age_s),
            on_refused=self.frame_refused,
            on_resent=lambda count: self.events.emit(MessagesResent(count=count)),
            on_reset=lambda _incarnation: self._prefill.restarted(address),
        )

    def watch_peers(self) -> None:
        """Send heartbeats, look for silent prefill nodes, and for those whose key is not accepted any more."""
        for address, reason in dict(self._links.lost(self.config.timeouts) + self._links.barred()).items():
            self._lose(address, reason)
        for address in self._prefill.addresses():
            self._links.send(address, Heartbeat())

    def _lose(self, address: PeerAddress, reason: str) -> None:
        """Give a prefill node up, and its link with it: the next room that names it begins anew."""
        self.events.emit(PeerLost(peer=address.endpoint, reason=reason))
        self._prefill.lost(address, reason)

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
        self.events.emit(MessageUndelivered(peer=address.endpoint, message=message.type, age_s=age_s))
        # A younger message fell with its link, which the node has forgotten: `restarted` introduces us anew.
        if address in self._links and age_s >= self.config.timeouts.control_delivery_s:
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

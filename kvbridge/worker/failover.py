"""What becomes of an order whose path was lost: it goes on over another one, waits for one, or fails.

A transfer that ended badly counts as a path that was lost: no library tells one refused operation from a dead link. What it has
not confirmed is sent again. That may be the very bytes that are still on their way: the source is as it was, the destination is
leased to the room, and the node keeps it from being read until the receiver has shut the lost endpoint (`Rerouted.in_transit`). An
order is not over before everything that has failed it is quiet, or closed.
"""

from __future__ import annotations

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.core.wire.worker_messages import PathsChanged, PeerConnected, Rerouted
from kvbridge.worker.orders import Loss, Order
from kvbridge.worker.peers import ConnectedPeer, RankPeers, Target
from kvbridge.worker.rank import NodeLink


class Failover:
    """For the orders of one rank."""

    def __init__(self, rank: Rank, link: NodeLink, peers: RankPeers, *, timeout_s: float) -> None:
        """`timeout_s`: how long a transfer may take that sends something again."""
        self._rank = rank
        self._link = link
        self._peers = peers
        self._timeout_s = timeout_s

    def push(self, order: Order) -> bool:
        """Push an order forward; whether it is over."""
        order.poll()
        for loss in list(order.losses):
            self._decide(order, loss)
        ended = all(part.ended for part in order.parts) and not order.losses
        return ended and bool(order.error_code or not order.not_quiet)

    def _decide(self, order: Order, loss: Loss) -> None:
        """Send again by another path, wait for one that is being connected, or fail; an order that has failed needs nothing."""
        peer, ordinal = order.peer, loss.part.ordinal
        assert peer is not None, "an order that has sent anything was started"
        self._peers.lost(peer, ordinal, loss.part.target)
        path = self._peers.other_path(peer, ordinal)
        if order.error_code:
            order.losses.clear()
        elif path is not None:
            self._tell(order, loss, path)
            order.send_again(loss, path, timeout_s=self._timeout_s)
        elif not self._peers.awaits_path(peer, ordinal):
            order.fail_by(loss)

    def _tell(self, order: Order, loss: Loss, path: Target) -> None:
        """Once for each room, and once for the peer."""
        lost, peer = loss.part.target, order.peer
        assert peer is not None
        if not lost.told:
            self._tell_paths(peer, lost=lost.transport.name, error=loss.error[:REASON_CHARS])
        if order.key not in lost.told or (loss.in_transit and not lost.told[order.key]):
            lost.told[order.key] = loss.in_transit
            self._link.send(
                Rerouted(
                    room=order.request.room,
                    generation=order.request.generation,
                    rank=self._rank,
                    lost=lost.transport.name,
                    over=path.transport.name,
                    epoch=lost.endpoint.epoch,
                    in_transit=loss.in_transit,
                    error=loss.error[:REASON_CHARS],
                )
            )

    def tell(self, name: str, found: ConnectedPeer | BridgeError) -> None:
        """Answer the node's order to connect a peer."""
        if isinstance(found, ConnectedPeer):
            answer = PeerConnected(rank=self._rank, peer=name, transports=found.transports)
        else:
            answer = PeerConnected(rank=self._rank, peer=name, error_code=found.code, error=str(found)[:REASON_CHARS])
        self._link.send(answer)

    def tell_found(self) -> None:
        """Tell the node of paths that have been found since the last call."""
        for peer in self._peers.changed:
            if self._peers.get(peer.name) is peer:
                self._tell_paths(peer)
        self._peers.changed.clear()

    def _tell_paths(self, peer: ConnectedPeer, **lost: str) -> None:
        paths = PathsChanged(rank=self._rank, peer=peer.name, transports=peer.transports, standby=peer.standby, **lost)
        self._link.send(paths)

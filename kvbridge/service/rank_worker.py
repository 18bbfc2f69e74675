"""One rank at work: it owns a device's memory registrations and its transport agents, and executes orders.

Owns: orders in flight, and when a connection or an agent may be given up. Decides nothing: which room, which tokens,
whether and when is the node's business. Everything here runs on one thread, since one submitting thread an agent is
what both libraries bear best.

Life: hello, setup (map, register, report), then a loop that takes messages from the node and pushes transfers
forward. When a transfer ends without being quiet, the transport that did it is torn down and built again, which ends
everything it might still have been doing; only then is the order reported, and it is quiet by then. An exception that
is not an order's own ends the worker: its agents are torn down first, so its end is the proof that nothing moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, ConflictError, NotReadyError, PeerError
from kvbridge.core.wire.messages import (
    CloseRoom,
    ConnectPeer,
    DisconnectPeer,
    Heartbeat,
    NodeToWorker,
    OpenRoom,
    PeerConnected,
    RankDescription,
    RoomClosed,
    Send,
    Sent,
    Shutdown,
    WorkerProgress,
    WorkerReady,
    WorkerToNode,
)
from kvbridge.service.rank_orders import OpenedRoom, Order, RoomKey
from kvbridge.service.rank_peers import ConnectedPeer, RankPeers
from kvbridge.service.rank_transports import RankIdentity, RankTransports, TransportFactory
from kvbridge.service.rooms import REASON_CHARS
from kvbridge.service.tables import tables_from_wire
from kvbridge.transport.base import Transport

__all__ = ["NodeLink", "RankIdentity", "RankWorker", "TransportFactory"]

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 0.05
"""How long the loop waits for a message while nothing is in flight."""
BUSY_PAUSE_S = 0.0001
"""How long it sleeps when transfers are in flight and none ended; sleeping beats spinning on few cores."""
HEARTBEAT_INTERVAL_S = 1.0
ACTIVE_ORDERS = 16
"""Orders in flight to one peer; further ones wait, so that a burst of rooms cannot fill a library's queue."""
MESSAGES_A_STEP = 64
"""Messages that are taken before transfers are pushed forward again."""


class NodeLink(Protocol):
    """The worker's end of the connection to its node. Both calls raise PeerError once the node is gone."""

    def send(self, message: WorkerToNode) -> None:
        """Queue a message to the node."""

    def receive(self, timeout_s: float) -> NodeToWorker | None:
        """Return the next message, or None after `timeout_s`."""


class RankWorker:
    """Executes the node's orders for one rank. Not thread-safe; everything happens in `run` or `step`."""

    def __init__(
        self,
        identity: RankIdentity,
        link: NodeLink,
        create_transport: TransportFactory,
        *,
        transfer_timeout_s: float,
        pid: int,
        clock: Clock = monotonic,
    ) -> None:
        self._identity = identity
        self._link = link
        self._transfer_timeout_s = transfer_timeout_s
        self._pid = pid
        self._clock = clock
        self._transports = RankTransports(identity, create_transport, report=self._report_progress, clock=clock)
        self._peers = RankPeers(identity, self._transports, beat=self._beat)
        self._retired: list[ConnectedPeer] = []
        """Peers that are not used for anything new, and are disconnected once nothing is in flight to them."""
        self._to_connect: dict[str, ConnectPeer] = {}
        """Peers that wait to be connected until their predecessors are disconnected."""
        self._rooms: dict[RoomKey, OpenedRoom] = {}
        self._closing: set[RoomKey] = set()
        self._queued: list[Order] = []
        self._active: list[Order] = []
        self._stopping = False
        self._beaten_s = clock()

    # ------------------------------------------------------------------ life

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Build the transports, report ready and serve until told to shut down, or until `stopped()`."""
        try:
            for name in self._identity.transports:
                self._transports.build(name)
            self._report_ready()
            while not self._stopping and not stopped():
                self.step()
        finally:
            self.close()

    def step(self) -> None:
        """Take what the node sent, push every transfer forward once, and rest if nothing moved."""
        self._beat()
        idle = not (self._active or self._queued or self._to_connect or self._retired)
        self._receive(IDLE_WAIT_S if idle else 0.0)
        if not self._advance() and self._active:
            time.sleep(BUSY_PAUSE_S)

    def _receive(self, wait_s: float) -> None:
        for _ in range(MESSAGES_A_STEP):
            message = self._link.receive(wait_s)
            if message is None or self._stopping:
                return
            self._handle(message)
            wait_s = 0.0

    def _beat(self) -> None:
        now_s = self._clock()
        if now_s - self._beaten_s >= HEARTBEAT_INTERVAL_S:
            self._beaten_s = now_s
            self._link.send(Heartbeat())

    def close(self) -> None:
        """Tear every transport down; nothing of this worker moves a byte afterwards."""
        self._transports.close()

    def __repr__(self) -> str:
        return (
            f"<RankWorker {self._identity.rank}: {len(self._peers)} peers, {len(self._rooms)} rooms, "
            f"{len(self._active)} orders active, {len(self._queued)} queued>"
        )

    def _report_progress(self, done_bytes: int, total_bytes: int) -> None:
        self._link.send(WorkerProgress(rank=self._identity.rank, done_bytes=done_bytes, total_bytes=total_bytes))

    def _report_ready(self) -> None:
        description = RankDescription(manifest=self._identity.manifest, endpoints=self._transports.endpoints())
        self._link.send(WorkerReady(rank=self._identity.rank, pid=self._pid, description=description))

    # ------------------------------------------------------------------ messages

    def _handle(self, message: NodeToWorker) -> None:
        match message:
            case ConnectPeer():
                self._connect_later(message)
            case DisconnectPeer():
                self._to_connect.pop(message.peer, None)
                self._retire(message.peer, "the peer was disconnected")
            case OpenRoom():
                self._open_room(message)
            case Send():
                self._queued.append(Order(message, self._clock()))
            case CloseRoom():
                self._close_room((message.room, message.generation))
            case Shutdown():
                self._stopping = True
            case _:
                pass

    def _open_room(self, message: OpenRoom) -> None:
        key = message.room, message.generation
        try:
            source, destination = tables_from_wire(message.source), tables_from_wire(message.destination)
        except BridgeError as error:  # its orders will find the room not open
            log.error("room_not_opened", room=message.room, code=error.code, reason=str(error))
            return
        self._rooms[key] = OpenedRoom(message, source, destination)

    def _close_room(self, key: RoomKey) -> None:
        self._closing.add(key)
        for order in [*self._active, *self._queued]:
            if order.key == key:
                order.fail("aborted", "the room was closed")
        self._confirm_closed(key)

    def _confirm_closed(self, key: RoomKey) -> None:
        """Answer RoomClosed once no order of a room that is being closed is left."""
        if key not in self._closing or any(order.key == key for order in [*self._active, *self._queued]):
            return
        self._closing.discard(key)
        self._rooms.pop(key, None)
        self._link.send(RoomClosed(room=key[0], generation=key[1], rank=self._identity.rank, quiet=True))

    # ------------------------------------------------------------------ peers

    def _connect_later(self, message: ConnectPeer) -> None:
        """Connect as soon as nothing is in flight to the peer as it was known so far. Every order is answered."""
        name = message.peer
        replaced = self._to_connect.pop(name, None)
        if replaced is not None:
            self._report_unconnected(name, PeerError("a later order has replaced this one"))
        known = self._peers.get(name)
        if known is not None and known.ranks == message.ranks:
            self._report_connected(known)
            return
        self._retire(name, "the peer has changed")
        self._to_connect[name] = message

    def _retire(self, name: str, why: str) -> None:
        """End the orders that go to a peer as it was known so far, and let go of it when they have ended."""
        peer = self._peers.take(name)
        if peer is None:
            return
        self._retired.append(peer)
        for order in self._active:
            if order.peer is peer:
                order.fail(PeerError.code, why)
        for order in self._queued:
            room = self._rooms.get(order.key)
            if room is not None and room.opening.peer == name:
                order.fail(PeerError.code, why)

    def _tend_peers(self) -> None:
        """Disconnect who is not used any more; connect who waited for that."""
        for peer in list(self._retired):
            if not any(order.peer is peer for order in self._active):
                self._retired.remove(peer)
                self._peers.disconnect(peer)
        leaving = {peer.name for peer in self._retired}
        for name in [name for name in self._to_connect if name not in leaving]:
            self._connect(self._to_connect.pop(name))

    def _connect(self, message: ConnectPeer) -> None:
        try:
            peer = self._peers.connect(message.peer, message.ranks)
        except BridgeError as error:
            self._report_unconnected(message.peer, error)
            return
        self._report_connected(peer)

    def _report_connected(self, peer: ConnectedPeer) -> None:
        self._link.send(PeerConnected(rank=self._identity.rank, peer=peer.name, transports=peer.transports))

    def _report_unconnected(self, name: str, error: BridgeError) -> None:
        reason = str(error)[:REASON_CHARS]
        self._link.send(PeerConnected(rank=self._identity.rank, peer=name, error_code=error.code, error=reason))

    # ------------------------------------------------------------------ orders

    def _advance(self) -> bool:
        """Start queued orders, poll active ones, report what ended. Returns whether anything changed."""
        self._tend_peers()
        moved = self._start_queued()
        for order in list(self._active):
            if order not in self._active:
                continue  # a rebuilt transport has ended it already
            ended, loud = order.poll()
            for transport in loud:
                self._rebuild(transport)
            if ended and order in self._active:
                self._report(order)
            moved = moved or ended
        return moved

    def _start_queued(self) -> bool:
        """Start the orders whose peer is there and not too busy, in the order in which they came."""
        waiting: list[Order] = []
        orders, self._queued = self._queued, waiting
        for order in orders:
            if order.error_code or not self._must_wait(order):
                self._start(order)
            else:
                waiting.append(order)
        return len(waiting) < len(orders)

    def _must_wait(self, order: Order) -> bool:
        room = self._rooms.get(order.key)
        if room is None:
            return False
        name = room.opening.peer
        if name in self._to_connect:
            return True
        return sum(other.peer is not None and other.peer.name == name for other in self._active) >= ACTIVE_ORDERS

    def _start(self, order: Order) -> None:
        self._active.append(order)
        if order.error_code:
            return
        room = self._rooms.get(order.key)
        if room is None:
            why = f"room {order.request.room} is not open on rank {self._identity.rank}"
            order.fail(ConflictError.code, why)
            return
        peer = self._peers.get(room.opening.peer)
        if peer is None:
            why = f"rank {self._identity.rank} is not connected to peer {room.opening.peer}"
            order.fail(NotReadyError.code, why)
            return
        order.start(room, peer, timeout_s=self._transfer_timeout_s, clock=self._clock)

    def _report(self, order: Order) -> None:
        self._active.remove(order)
        request = order.request
        order.seconds["move"] = self._clock() - order.received_s - order.seconds.get("first_byte", 0.0)
        self._link.send(
            Sent(
                room=request.room,
                generation=request.generation,
                rank=self._identity.rank,
                order=request.order,
                amounts={} if order.error_code else order.amounts,
                seconds=order.seconds,
                error_code=order.error_code,
                error=order.error,
            )
        )
        self._confirm_closed(order.key)

    def _rebuild(self, broken: Transport) -> None:
        """Tear a transport down that would not go quiet, and build it again with new endpoints.

        Every order that used it ends here, unless another transport still works on it. Peers that were reached through
        it are connected again at once; the node hears of both.
        """
        name = broken.name
        log.warning("transport_rebuilt", rank=str(self._identity.rank), transport=name, why="a transfer was not quiet")
        self._transports.tear_down(name)
        for order in list(self._active):
            if order.lose(broken) and not order.transfers:
                self._report(order)
        for peer in self._retired:
            peer.targets = [target for target in peer.targets if target.transport is not broken]
        self._transports.build(name)
        for peer in self._peers.using(broken):
            try:
                self._peers.reconnect(peer, broken)
            except BridgeError as error:
                self._retire(peer.name, f"it could not be reached again: {error}")
                self._report_unconnected(peer.name, error)
            else:
                self._report_connected(peer)
        self._report_ready()

"""One rank at work: the loop that executes the node's orders by the rank's transport agents.

When a transfer ends without being quiet, its transport is replaced (`worker/transports.py`). Once the successor is there, new
transfers go through the successor, and the old transport is closed when its other transfers have ended. Only then is a room of that
transport closed, and only then does an order end that went on by another path. A failure of one order or one peer ends that order
or peer (`contained` in `worker/rank.py`). The end of the node ends the worker, and so does a transport that does not close; the
worker tears its agents down first.

A transfer that ends badly counts as a lost path, because no library tells a refused operation from a dead link. The bytes that the
path has not confirmed are sent again over another one. The first copy of these bytes may still be on its way: the source is as it
was, the destination is leased to the room, and the node keeps the destination from being read until the receiver has shut the lost
endpoint (`Rerouted.in_transit`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import structlog

from kvbridge.core.errors import BridgeError, ConflictError, DeadlineError, NotReadyError, PeerError
from kvbridge.core.ids import MemoryKind
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import REASON_CHARS, Heartbeat, RankDescription
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    ConnectPeer,
    CopyPages,
    DisconnectPeer,
    EndpointsRevoked,
    OpenRoom,
    RenewEndpoints,
    Rerouted,
    RevokeEndpoints,
    RoomClosed,
    Send,
    Shutdown,
    Verify,
    WorkerReady,
)
from kvbridge.pool.memory.gpu_memory import StreamPoints
from kvbridge.transport.base import TransferStatus
from kvbridge.worker.copies import PageCopies
from kvbridge.worker.digests import Verifications
from kvbridge.worker.orders import OpenedRoom, Order, OrderBook, Part, RoomKey
from kvbridge.worker.peers import RankPeers, Target
from kvbridge.worker.rank import NodeLink, Pauses, RankIdentity, WorkerLimits
from kvbridge.worker.transports import Background, RankTransports, TransportFactory, in_background

log = structlog.get_logger(__name__)

IDLE_WAIT_S = 0.05
"""Time that the loop waits for a message while nothing is in flight."""
CONNECTING_WAIT_S = 0.0005
"""The same while peers are being connected or released."""
HEARTBEAT_INTERVAL_S = 1.0
ACTIVE_ORDERS = 16
"""Most orders in flight to one peer; further ones wait, so that a burst of rooms cannot fill a library's queue."""
CLOSING_PAUSE_S = 0.01
"""Time between two checks whether everything is closed."""
MESSAGES_A_STEP = 64
"""Most messages that are taken before transfers are pushed forward again."""


class RankWorker:
    """Executes the node's orders for one rank, in `run` or `step`. Not thread-safe."""

    def __init__(
        self,
        identity: RankIdentity,
        link: NodeLink,
        create_transport: TransportFactory,
        limits: WorkerLimits,
        *,
        clock: Clock = monotonic,
        background: Background = in_background,
    ) -> None:
        """`background` runs the building and closing of agents."""
        self._identity = identity
        self._link = link
        self._limits = limits
        self._clock = clock
        self._transports = RankTransports(identity, create_transport, link, clock=clock, background=background)
        self._peers = RankPeers(identity, self._transports, link, clock=clock)
        self._rooms: dict[RoomKey, OpenedRoom] = {}
        self._closing: set[RoomKey] = set()
        self._revoking: RevokeEndpoints | None = None
        """The node's order to shut out writers by earlier endpoints, until it is carried out."""
        self._orders = OrderBook()
        self._verifications = Verifications(identity, link, clock=clock)
        self._copies = PageCopies(identity, link, clock=clock)
        self._points = StreamPoints()
        self._pauses = Pauses(clock, with_gpu=any(extent.kind is MemoryKind.VRAM for extent in identity.memory))
        self._handlers: dict[type, Callable[[Any], None]] = {
            ConnectPeer: lambda message: self._peers.connect(message.peer, message.ranks),
            DisconnectPeer: self._disconnect,
            OpenRoom: lambda message: self._rooms.update({(message.room, message.generation): OpenedRoom.of(message)}),
            Send: self._queue,
            Verify: self._verifications.take,
            CopyPages: self._copies.take,
            CloseRoom: self._close_room,
            RenewEndpoints: self._renew,
            RevokeEndpoints: self._revoke,
        }
        self._stopping = False
        self._beaten_s = clock()
        self.closed = False
        """Whether every transport has been torn down and the GPU copies nothing."""

    # ------------------------------------------------------------------ lifecycle

    def run(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Build the transports, report ready and serve until told to shut down, or until `stopped()`."""
        self._pauses.sleep_precisely()
        try:
            for name in self._identity.transports:
                self._transports.build(name)
            self._report_ready()
            while not self._stopping and not stopped():
                self.step()
        finally:
            self.close()

    def step(self) -> None:
        """Take the node's messages, push every transfer forward once, and pause if nothing moved."""
        self._beat()
        busy = self._orders or self._verifications or self._copies
        self._receive(0.0 if busy else CONNECTING_WAIT_S if self._peers.busy else IDLE_WAIT_S)
        if self._advance():
            self._pauses.moved()
        elif self._orders or self._copies:
            time.sleep(self._pauses.next_s())

    def _receive(self, wait_s: float) -> None:
        for _ in range(MESSAGES_A_STEP):
            message = self._link.receive(wait_s)
            if message is None or isinstance(message, Shutdown):
                self._stopping = message is not None
                return
            self._handlers.get(type(message), lambda _: None)(message)
            wait_s = 0.0

    def _beat(self) -> None:
        now_s = self._clock()
        if now_s - self._beaten_s >= HEARTBEAT_INTERVAL_S:
            self._beaten_s = now_s
            self._link.send(Heartbeat())

    def close(self) -> None:
        """Tear every transport down; this worker moves no byte afterwards.

        On an error `closed` stays False: a transport's own, or DeadlineError when closing takes too long.
        """
        until_s = self._clock() + self._limits.close_s
        with ExitStack() as stack:  # in reverse, whatever fails: the transports are closed before a GPU is waited for
            stack.callback(self._points.close)
            stack.callback(self._close_copies, until_s)
            stack.callback(self._close_transports, until_s)
            self._peers.close()
        self.closed = True

    def _close_transports(self, until_s: float) -> None:
        self._transports.begin_close()
        self._wait_while(self._transports.closing, until_s, "its transports have not closed")
        self._transports.end_close()

    def _close_copies(self, until_s: float) -> None:
        self._wait_while(lambda: not self._copies.idle(), until_s, "its GPU has not ended its copies of pages")
        self._copies.close()

    def _wait_while(self, is_busy: Callable[[], bool], until_s: float, why: str) -> None:
        while is_busy():
            if self._clock() >= until_s:
                raise DeadlineError(
                    f"rank {self._identity.rank}: {why} within {self._limits.close_s:g} s (the longest close_timeout_s or "
                    "connect_timeout_s of its transports, and some seconds)"
                )
            with suppress(BridgeError):  # the node may be what is gone
                self._beat()
            time.sleep(CLOSING_PAUSE_S)

    def _report_ready(self) -> None:
        description = RankDescription(manifest=self._identity.manifest, endpoints=self._transports.endpoints())
        self._link.send(
            WorkerReady(
                rank=self._identity.rank,
                pid=os.getpid(),
                description=description,
                epoch=self._transports.epoch,
                device=self._identity.made,
            )
        )

    # ------------------------------------------------------------------ messages

    def _queue(self, message: Send) -> None:
        order = Order(message, self._clock())
        room = self._rooms.get(order.key)
        if room is not None:
            order.to = room.opening.peer
            if message.source:
                self._rooms[room.key] = room.grown(message.source)
        self._orders.add(order)
        if room is None:
            why = f"room {message.room} is not open on rank {self._identity.rank}"
            self._orders.fail(order, ConflictError.code, why)

    def _close_room(self, message: CloseRoom) -> None:
        key = message.room, message.generation
        left = self._orders.of_room(key)
        if message.all_sent and not left:
            self._rooms.pop(key, None)
            return
        self._closing.add(key)
        for order in left:
            self._orders.fail(order, "aborted", "the room was closed")
        self._confirm_closed(key)

    def _confirm_closed(self, key: RoomKey) -> None:
        """Answer RoomClosed once no order of a room that is being closed is left, other than orders that are not quiet."""
        left = self._orders.of_room(key)
        if key not in self._closing or not all(order.reported for order in left):
            return
        reason = ""
        if left:
            names = ", ".join(sorted({transport.name for order in left for transport in order.not_quiet}))
            reason = f"{names} would not become quiet; it is torn down when its other transfers have ended"
        else:
            self._closing.discard(key)
            self._rooms.pop(key, None)
        room, generation = key
        rank = self._identity.rank
        self._link.send(RoomClosed(room=room, generation=generation, rank=rank, quiet=not left, reason=reason))

    # ------------------------------------------------------------------ peers

    def _disconnect(self, message: DisconnectPeer) -> None:
        """End the orders that go to a peer, and release the peer when they have ended."""
        name = message.peer
        self._peers.cancel(name)
        self._peers.retire(name)
        active = [order for order in self._orders.active if order.peer is not None and order.peer.name == name]
        for order in [*active, *self._orders.waiting_for(name)]:
            self._orders.fail(order, PeerError.code, "the peer was disconnected")

    # ------------------------------------------------------------------ orders

    def _advance(self) -> bool:
        """Start queued orders, poll active ones, report those that ended. Return whether anything changed."""
        self._peers.tend(lambda used: any(order.uses(used) for order in self._orders.active))
        moved = self._start_queued()
        for order in list(self._orders.active):
            if order.reported:
                continue
            ended = self._push(order)
            for transport in order.not_quiet:
                self._transports.replace(transport)
            if ended and order.digests is None:
                self._report(order)
                moved = True
        self._tend_transports()
        copied = self._copies.step()
        return self._digest_some() or copied or moved

    def _push(self, order: Order) -> bool:
        """Push an order forward. Return whether it is over, which needs every transport that failed it to be quiet or closed."""
        order.poll()
        for part, failure in order.losses:
            self._recover(order, part, failure)
        ended = all(part.ended for part in order.parts) and not order.losses
        return ended and bool(order.error_code or not order.not_quiet)

    def _recover(self, order: Order, part: Part, failure: TransferStatus) -> None:
        """Send again by another path, wait for a path that is being connected, or fail. A failed order needs nothing."""
        peer, ordinal, lost = order.peer, part.ordinal, part.target
        assert peer is not None, "an order that has sent anything was started"
        self._peers.lost(peer, ordinal, lost)
        path = self._peers.other_path(peer, ordinal)
        if order.error_code:
            part.failure = None
        elif path is not None:
            if not lost.told:
                self._peers.tell_paths(peer, lost=lost.transport.name, error=failure.error[:REASON_CHARS])
            self._tell_rerouted(order, lost, path, failure)
            order.send_again(part, failure, path, timeout_s=self._limits.transfer_s)
        elif not self._peers.awaits_path(peer, ordinal):
            order.fail_by(part, failure)

    def _tell_rerouted(self, order: Order, lost: Target, path: Target, failure: TransferStatus) -> None:
        """Tell the node once for each room, and again when something turns out to be in transit."""
        if order.key in lost.told and not (failure.in_transit and not lost.told[order.key]):
            return
        lost.told[order.key] = failure.in_transit
        room, generation = order.key
        self._link.send(
            Rerouted(
                room=room,
                generation=generation,
                rank=self._identity.rank,
                lost=lost.transport.name,
                over=path.transport.name,
                epoch=lost.endpoint.epoch,
                in_transit=failure.in_transit,
                error=failure.error[:REASON_CHARS],
            )
        )

    def _digest_some(self) -> bool:
        """Compute one slice of digests for the oldest order that lacks some, and one of rows that have arrived."""
        found = next(((order, order.digests) for order in self._orders.active if order.digests is not None), None)
        if found is not None:
            found[0].digest_some(found[1], self._clock)
        return self._verifications.step() or found is not None

    def _start_queued(self) -> bool:
        """Start the orders whose peer is there and not too busy, for each peer in the order in which they came."""
        begun = self._orders.begin(
            ACTIVE_ORDERS, is_ready=lambda peer: not self._peers.connecting(peer), is_written=self._is_written
        )
        for order in begun:
            if order.error_code:
                continue
            room = self._rooms[order.key]
            to = room.opening.peer
            peer = self._peers.get(to)
            if peer is None:
                order.fail(NotReadyError.code, f"rank {self._identity.rank} is not connected to peer {to}")
                continue
            order.start(room, peer, timeout_s=self._limits.transfer_s, clock=self._clock)
            order.begin_digests(self._identity.geometry, room)
        return bool(begun)

    def _is_written(self, order: Order) -> bool:
        """Whether the engine's GPU has written the rows that the order reads. A GPU that cannot be asked fails the order."""
        with order.guarded("asking whether the engine's rows are written"):
            return self._points.reached(order.request.after)
        return True

    def _report(self, order: Order) -> None:
        """Report how an order ended. An order that is not quiet stays active until its transport has been closed."""
        order.reported = True
        if not order.not_quiet:
            self._orders.end(order)
        order.seconds["move"] = self._clock() - order.received_s - order.seconds.get("first_byte", 0.0)
        for message in order.report(self._identity.rank):
            self._link.send(message)
        self._confirm_closed(order.key)

    # ------------------------------------------------------------------ transports

    def _revoke(self, message: RevokeEndpoints) -> None:
        self._transports.release(message.before_epoch)
        self._revoking = message

    def _renew(self, message: RenewEndpoints) -> None:
        """Give out endpoints of a later epoch, once they are there. Peers that write by earlier endpoints go on for now."""
        if message.epoch > self._transports.asked_epoch:
            asked = message.model_dump(include={"epoch", "transports"})
            log.info("endpoints_asked_for", rank=str(self._identity.rank), **asked)
            self._transports.renew(message.epoch, message.transports)

    def _tend_transports(self) -> None:
        """Change to successors, close agents that have nothing left to do, and report when earlier endpoints are shut."""
        changed = self._transports.tend()
        for old in self._transports.replaced:
            log.info("transport_replaced", rank=str(self._identity.rank), transport=old.name)
            self._peers.replaced(old)
        self._transports.replaced.clear()
        if changed:
            self._report_ready()
        for transport in self._transports.leaving():
            if not any(order.uses(transport) for order in self._orders.active):
                self._peers.lose(transport)
                self._transports.close_retired(transport)
        for transport in self._transports.closed():
            log.info("transport_closed", rank=str(self._identity.rank), transport=transport.name)
            for order in [order for order in self._orders.active if transport in order.not_quiet]:
                order.lose(transport)
                if order.reported and not order.not_quiet:
                    self._orders.end(order)
                    self._confirm_closed(order.key)
        revoking = self._revoking
        if revoking is not None and self._transports.revoked(revoking.before_epoch, revoking.transports):
            self._link.send(EndpointsRevoked(rank=self._identity.rank, before_epoch=revoking.before_epoch))
            self._revoking = None

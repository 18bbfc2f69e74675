"""Rank workers and engines as models, for `room_simulation`: queues of orders that end well, badly or with their worker."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.geometry.pages import joined_tables, tables_from_wire
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.core.plan.digests import DigestKind, PageDigests
from kvbridge.core.plan.operations import Amounts, add_amounts
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import plan
from kvbridge.core.wire.codec import unpack_rank
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import RoomMessage, to_wire
from kvbridge.core.wire.worker_messages import (
    CloseRoom,
    ConnectPeer,
    Digested,
    DisconnectPeer,
    NodeToWorker,
    OpenRoom,
    PeerConnected,
    Rerouted,
    RoomClosed,
    Send,
    Sent,
    Verify,
    WorkerToNode,
)
from kvbridge.pool.accounts.pages import Owner
from tests.helpers.rooms import GEOMETRY, PAGE, R0, manifest
from tests.helpers.simulated_memory import GARBAGE, RANKS, Memory, pages_sent

DESTINATION = manifest(base=1 << 40)
PAIRINGS = {
    rank: Pairing.create(
        GEOMETRY, manifest(rank=rank, tp_size=2), DESTINATION, destination_ordinal=0, destination_count=1
    )
    for rank in RANKS
}


def cover(tokens: int) -> int:
    return -(-tokens // PAGE)


def table(ids: list[int], first_page: int = 0) -> Tables:
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first_page)}


def owner_of(order: Send) -> Owner:
    return Owner(order.room, order.generation)


TRANSPORTS = ("local", "nixl")
Path = tuple[str, int]
"""A transport, and the epoch of the endpoint that is written to."""


def epochs_of(message: ConnectPeer) -> dict[str, int]:
    """Of the endpoints of each transport."""
    return {endpoint.transport: endpoint.epoch for endpoint in unpack_rank(message.ranks[0]).endpoints}


@dataclass
class Worker:
    """A rank worker: rooms it has open, orders that may be moving bytes, and both directions of its connection."""

    rank: Rank
    inbox: deque[NodeToWorker] = field(default_factory=deque)
    outbox: deque[WorkerToNode] = field(default_factory=deque)
    rooms: dict[Owner, OpenRoom] = field(default_factory=dict)
    orders: list[Send] = field(default_factory=list)
    paths: dict[int, Path] = field(default_factory=dict)
    """By which each order is carried out."""
    endpoints: dict[int, dict[str, int]] = field(default_factory=dict)
    """Epochs of the endpoints that each order was started with: it goes over no newer ones, whatever the worker hears meanwhile."""
    active: list[Send] = field(default_factory=list)
    """Orders that have failed without being quiet."""
    connected: dict[str, int] | None = None
    """Epochs of the endpoints of the decode node; None while it is not connected."""
    closing: set[Owner] = field(default_factory=set)
    memory: tuple[Memory, Memory] = field(default_factory=lambda: ({}, {}))
    """What its pages hold, and those that it writes."""
    arrived: Counter[Owner] = field(default_factory=Counter)
    """The digest of what it has sent of each room that asks for one, as far as it has arrived."""

    def writes(self) -> set[tuple[Owner, Path]]:
        """Rooms whose pages this worker may touch, now or when it reads its messages, and by which paths."""
        found = {(owner_of(order), self.paths[order.order]) for order in [*self.orders, *self.active]}
        connected = self.connected
        for message in self.inbox:
            if isinstance(message, ConnectPeer):
                connected = epochs_of(message)
            elif isinstance(message, DisconnectPeer):
                connected = None
            elif isinstance(message, Send) and connected is not None:
                found.add((owner_of(message), (TRANSPORTS[0], connected[TRANSPORTS[0]])))
        return found

    def read(self) -> None:
        message = self.inbox.popleft()
        match message:
            case ConnectPeer():
                self.connected = epochs_of(message)
                self.outbox.append(PeerConnected(rank=self.rank, peer=message.peer, transports=("local",)))
            case OpenRoom():
                self.rooms[Owner(message.room, message.generation)] = message
                self.arrived.pop(Owner(message.room, message.generation), None)
            case Send():
                self._grow(message)
                self.orders.append(message)
                if self.connected is None:
                    self.end(message, well=False)
                else:
                    self.endpoints[message.order] = self.connected
                    self.paths[message.order] = TRANSPORTS[0], self.connected[TRANSPORTS[0]]
            case CloseRoom(all_sent=True):
                self.rooms.pop(Owner(message.room, message.generation), None)
            case CloseRoom():
                self.closing.add(Owner(message.room, message.generation))
                self._confirm(Owner(message.room, message.generation))
            case DisconnectPeer():
                self.connected = None

    def _grow(self, order: Send) -> None:
        room = self.rooms.get(owner_of(order))
        if room is not None and order.source:
            source = joined_tables(tables_from_wire(room.source), tables_from_wire(order.source))
            self.rooms[owner_of(order)] = room.model_copy(update={"source": to_wire(source)})

    def reroute(self, order: Send, *, in_transit: bool) -> None:
        """An order has lost its path, and goes on over the other one that the decode node had when it was started."""
        lost, epoch = self.paths[order.order]
        over = next(name for name in TRANSPORTS if name != lost)
        self.paths[order.order] = over, self.endpoints[order.order][over]
        room, generation = order.room, order.generation
        self.outbox.append(
            Rerouted(
                room=room,
                generation=generation,
                rank=self.rank,
                lost=lost,
                over=over,
                epoch=epoch,
                in_transit=in_transit,
            )
        )

    def end(self, order: Send, *, well: bool, in_transit: bool = False, quiet: bool = True) -> None:
        self.orders.remove(order)
        if not quiet:
            self.active.append(order)
        owner = owner_of(order)
        amounts: Amounts = {}
        if well:
            room = self.rooms[owner]
            source, destination = tables_from_wire(room.source), tables_from_wire(room.destination)
            planned = plan(PAIRINGS[self.rank], order.section, source, destination, max_operation_bytes=1 << 30)
            amounts = add_amounts(amounts, planned.amounts)
            self._move(order, source, destination)
            if room.digest is not DigestKind.NONE:
                self.arrived[owner] ^= order.order
                self.outbox.append(digested(order, self.rank, order.order, order=order.order))
        error = {} if well else {"error_code": "transport_failed", "error": "cable"}
        self.outbox.append(
            Sent(
                room=order.room,
                generation=order.generation,
                rank=self.rank,
                order=order.order,
                amounts=amounts,
                quiet=quiet,
                in_transit=in_transit or not quiet,
                **error,
            )
        )
        self._confirm(owner)

    def _move(self, order: Send, source: Tables, destination: Tables) -> None:
        """Every byte of an order arrives: what the source holds now."""
        ours, theirs = self.memory
        for page in pages_sent(order):
            from_table, to_table = source[IndexSpace.FULL], destination[IndexSpace.FULL]
            held = ours.get((self.rank, int(from_table.ids[page - from_table.first_page])), "nothing")
            theirs[self.rank, int(to_table.ids[page - to_table.first_page])] = held

    def spoil(self, order: Send) -> None:
        """Bytes of an order that has failed arrive, or some of them."""
        to_table = tables_from_wire(self.rooms[owner_of(order)].destination)[IndexSpace.FULL]
        for page in pages_sent(order):
            self.memory[1][self.rank, int(to_table.ids[page - to_table.first_page])] = GARBAGE

    def close_transport(self) -> None:
        """The transport that would not become quiet is gone."""
        quiet, self.active = self.active, []
        for order in quiet:
            self._confirm(owner_of(order))

    def _confirm(self, owner: Owner) -> None:
        if owner not in self.closing or any(owner_of(order) == owner for order in self.orders):
            return
        quiet = not any(owner_of(order) == owner for order in self.active)
        if quiet:
            self.closing.discard(owner)
            self.rooms.pop(owner, None)
        self.outbox.append(RoomClosed(room=owner.room, generation=owner.generation, rank=self.rank, quiet=quiet))


def digested(about: RoomMessage, rank: Rank, value: int, *, order: int = 0) -> Digested:
    """The digest of the first page of the first layer, and of nothing else."""
    component = GEOMETRY.components[0]
    one = PageDigests(
        component=component.kind,
        lane_start=0,
        lane_stop=component.lanes,
        layers=component.layers[:1],
        first_page=0,
        values=value.to_bytes(4, "little"),
    )
    return Digested(room=about.room, generation=about.generation, rank=rank, order=order, digests=(one,))


class DecodeRanks:
    """The one rank worker of the decode node: what it is to verify, in the order in which it was told."""

    def __init__(self) -> None:
        self.orders: list[Verify] = []
        self.layers = {R0: tuple(range(GEOMETRY.layer_count))}

    def missing(self) -> str:
        return ""

    def manifests(self) -> tuple[RankManifest, ...]:
        return (DESTINATION,)

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        assert rank == R0
        if isinstance(message, Verify):
            self.orders.append(message)


class Engines:
    """Engine processes of one node by name, and whose pages they use."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.using: dict[str, set[Owner]] = {name: set() for name in names}
        self.events: list[RoomEvent] = []
        self.on_event: Callable[[RoomEvent], None] = lambda event: None

    def push(self, event: RoomEvent) -> None:
        self.events.append(event)
        self.on_event(event)

    @staticmethod
    def ranks_of(name: str) -> tuple[Rank, ...]:
        """Each serves a rank of its own."""
        return (Rank(pp=0, tp=ord(name[-1])),)

    def serving(self) -> dict[str, tuple[Rank, ...]]:
        return {name: self.ranks_of(name) for name in sorted(self.names)}

    def in_use(self) -> set[Owner]:
        return set().union(*self.using.values())

    def uses(self, name: str, owner: Owner) -> None:
        """An engine uses the pages of a room, and no others of an earlier attempt at it."""
        self.using[name] = {one for one in self.using[name] if one.room != owner.room} | {owner}

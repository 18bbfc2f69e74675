"""Rank workers and engines as models, for `room_simulation`: queues of orders that end well, badly or with their worker."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvbridge.config.limits import AdmissionConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.geometry.manifest import RankManifest
from kvbridge.core.geometry.pages import joined_tables, tables_from_wire
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Tables
from kvbridge.core.plan.digests import DigestKind, PageDigests
from kvbridge.core.plan.operations import Amounts, add_amounts
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import plan
from kvbridge.core.wire.codec import unpack_rank
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import PeerMessage, RoomMessage, to_wire
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
from kvbridge.node.admission import AdmissionController
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.engines import Engines as AttachedEngines
from kvbridge.node.prefill.decode_nodes import DecodeNodes
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.node.workers import WorkerState
from kvbridge.pool.accounts.book import Owner, PageBook
from kvbridge.telemetry.facts import EventStream
from tests.helpers.rooms import DECODE, GEOMETRY, PAGE, PREFILL_LIMITS, R0, EngineVerbs, manifest, welcome_of
from tests.helpers.simulated_memory import GARBAGE, PAGES, RANKS, EnginePool, Memory, pages_sent

if TYPE_CHECKING:
    from tests.helpers.room_simulation import World

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
    endpoints: dict[int, dict[str, int]] = field(default_factory=dict)
    """Epochs of the endpoints that each order was started with: it goes over no newer ones, whatever the worker hears meanwhile."""
    active: list[Send] = field(default_factory=list)
    connected: dict[str, int] | None = None
    """Epochs of the endpoints of the decode node; None while it is not connected."""
    closing: set[Owner] = field(default_factory=set)
    memory: tuple[Memory, Memory] = field(default_factory=lambda: ({}, {}))
    """The contents of its pages, and of those that it writes."""
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
        about = {"room": order.room, "generation": order.generation, "rank": self.rank}
        self.outbox.append(Rerouted(**about, lost=lost, over=over, epoch=epoch, in_transit=in_transit))

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
        about = {"room": order.room, "generation": order.generation, "rank": self.rank, "order": order.order}
        about |= {} if well else {"error_code": "transport_failed", "error": "cable"}
        self.outbox.append(Sent(**about, amounts=amounts, quiet=quiet, in_transit=in_transit or not quiet))
        self._confirm(owner)

    def _move(self, order: Send, source: Tables, destination: Tables) -> None:
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
        return (Rank(pp=0, tp=ord(name[-1])),)

    def serving(self) -> dict[str, tuple[Rank, ...]]:
        return {name: self.ranks_of(name) for name in sorted(self.names)}

    def in_use(self) -> set[Owner]:
        return set().union(*self.using.values())

    def uses(self, name: str, owner: Owner) -> None:
        """An engine uses the pages of a room, and no others of an earlier attempt at it."""
        self.using[name] = {one for one in self.using[name] if one.room != owner.room} | {owner}


class PrefillNode:
    """A prefill daemon in one life, with its workers and its engines (one for each rank)."""

    def __init__(self, world: World, incarnation: str) -> None:
        self.world = world
        self.incarnation = incarnation
        self.memory: Memory = {}
        self.workers = {rank: self.new_worker(rank) for rank in RANKS}
        self.engines = Engines("e0", "e1")
        self.pool = EnginePool(self.memory)
        self.engines.on_event = self.engine_hears
        space = {IndexSpace.FULL: PAGES}
        self.book = PageBook({}, adopted=space) if world.adopted else PageBook(space)
        self.prefixes = world.prefix_cache(self.book)
        self.succeeded: set[int] = set()
        self.ordered: dict[Owner, set[int]] = {}
        self.service = PrefillRooms(
            RoomPages(
                self.book,
                RoomSettings(
                    geometry=GEOMETRY,
                    adopted=world.adopted,
                    shares_prefixes=world.shares,
                    computes=True,
                    limits=PREFILL_LIMITS,
                ),
                world.events,
                self.prefixes,
            ),
            self,
            self.engines,
            self,
            clock=world.clock,
        )
        self.verbs = EngineVerbs(self.service)
        self.admission = own_admission(self.service, self.book, world)
        introduction = welcome_of(incarnation, tp_size=len(RANKS), ranks=RANKS)
        self.nodes = DecodeNodes(introduction, GEOMETRY, self, self, EventStream(), check_s=20, clock=world.clock)
        self.nodes.rooms = self.service

    @property
    def layers(self) -> dict[Rank, tuple[int, ...]]:
        return {rank: tuple(range(GEOMETRY.layer_count)) for rank in RANKS}

    def states(self) -> dict[Rank, WorkerState]:
        return dict.fromkeys(RANKS, WorkerState.READY)

    def missing(self) -> str:
        return ""

    def send(self, whom: str | Rank, message: PeerMessage | NodeToWorker) -> None:
        """Both ports in one: to a peer (by incarnation) or to a worker (by rank)."""
        if isinstance(whom, Rank):
            if isinstance(message, Send):
                self.ordered.setdefault(Owner(message.room, message.generation), set()).add(message.order)
            self.workers[whom].inbox.append(message)
        elif whom == DECODE:
            self.world.to_decode(message)

    def name(self, peer: str) -> str:
        return f"decode/{peer}"

    def transport(self, peer: str, rank: Rank) -> str:
        return self.nodes.transport(peer, rank)

    def key_of(self, peer: str) -> str:
        return ""

    def names_of(self, key: str) -> frozenset[str]:
        return frozenset()

    def inspect(self, work: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
        self.world.inspections.append((work, ended))

    def take(self, message: PeerMessage) -> None:
        self.nodes.received(DECODE, message)

    def hear(self, rank: Rank) -> None:
        message = self.workers[rank].outbox.popleft()
        match message:
            case PeerConnected():
                self.nodes.worker_connected(message)
            case Digested() | Sent() | Rerouted() | RoomClosed():
                if isinstance(message, Sent) and not message.error_code:
                    self.succeeded.add(message.order)
                self.service.hear_rank(message)

    def engine_hears(self, event: RoomEvent) -> None:
        if event.kind in {"completed", "aborted", "failed"}:
            self.pool.give_back(Owner(event.room, event.generation))

    def kill_worker(self, rank: Rank) -> None:
        self.world.lose(self.workers[rank])
        self.workers[rank] = self.new_worker(rank)
        self.service.worker_gone(rank, "killed")
        self.nodes.worker_ready(rank)

    def new_worker(self, rank: Rank) -> Worker:
        return Worker(rank, memory=(self.memory, self.world.memory))

    def in_flight(self) -> set[tuple[Owner, Path]]:
        """Rooms that workers may read and write, and the paths by which they would."""
        return set().union(*(worker.writes() for worker in self.workers.values()))


class OneLink:
    """Between the decode node and the prefill node, whatever life it is in."""

    def names_of(self, key: str) -> frozenset[str]:
        return frozenset()

    def soon(self, do: Callable[[], None]) -> None:
        do()

    def __init__(self, world: World) -> None:
        self.world = world

    def connect(self, address: PeerAddress) -> None:
        assert not self.world.linked
        self.world.linked = True

    def send(self, address: PeerAddress, message: PeerMessage) -> None:
        self.world.towards_prefill.append(message)

    def disconnect(self, address: PeerAddress) -> None:
        self.world.linked = False
        self.world.towards_decode.clear()
        self.world.towards_prefill.append(None)


def own_admission(service: PrefillRooms | DecodeRooms, book: PageBook, world: World) -> AttachedEngines:
    controller = AdmissionController(service, book, limits=AdmissionConfig(), events=EventStream(), clock=world.clock)
    engines = AttachedEngines((), EventStream(), settle_s=0)
    engines.serve(service, controller, attached=lambda *_: None)
    return engines

"""A prefill daemon of `room_simulation` in one life, with its workers, its engines and the link to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbridge.config.limits import AdmissionConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import PeerMessage
from kvbridge.core.wire.worker_messages import Digested, NodeToWorker, PeerConnected, Rerouted, RoomClosed, Send, Sent
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.engines import Engines as AttachedEngines
from kvbridge.node.prefill.decode_nodes import DecodeNodes
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.node.room_pages import RoomSettings
from kvbridge.node.rooms import RoomParts
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.pages import Owner
from kvbridge.telemetry.stream import EventStream
from tests.helpers.rooms import DECODE, GEOMETRY, PREFILL_LIMITS, EngineVerbs, welcome_of
from tests.helpers.simulated_memory import PAGES, RANKS, EnginePool, Memory
from tests.helpers.simulated_nodes import Engines, Path, Worker

if TYPE_CHECKING:
    from tests.helpers.room_simulation import World


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
            RoomParts(
                book=self.book,
                workers=self,
                engines=self.engines,
                events=world.events,
                prefixes=self.prefixes,
            ),
            RoomSettings(geometry=GEOMETRY, adopted=world.adopted, shares_prefixes=world.shares, limits=PREFILL_LIMITS),
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
                self.service.orders.hear(message)

    def engine_hears(self, event: RoomEvent) -> None:
        if event.kind in {"completed", "aborted", "failed"}:
            self.pool.give_back(Owner(event.room, event.generation))

    def kill_worker(self, rank: Rank) -> None:
        self.world.lose(self.workers[rank])
        self.workers[rank] = self.new_worker(rank)
        self.service.orders.worker_gone(rank, "killed")
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
    engines = AttachedEngines(lambda _engine, _message: None, (), EventStream())
    engines.serve(service, controller, pid=lambda _: 0, attached=lambda *_: None)
    return engines

"""One real prefill and one real decode node in memory, between links, workers and engines that are as nasty as real ones may be."""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial, reduce
from operator import xor
from types import SimpleNamespace

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.decode import DecodeState
from kvbridge.core.wire.codec import pack_rank
from kvbridge.core.wire.messages import NodeDescription, PeerMessage, RankDescription, TransportEndpoint
from kvbridge.core.wire.worker_messages import NodeToWorker, RenewEndpoints, RevokeEndpoints, Send, Verified, Verify
from kvbridge.node.decode.fence import Fence
from kvbridge.node.decode.prefill_nodes import PrefillNodes
from kvbridge.node.decode.room import DecodeRoom
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from kvbridge.telemetry.facts import EventStream
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import NO_KEYS, Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers import simulated_nodes
from tests.helpers.accounts import check_book
from tests.helpers.manual_clock import ManualClock
from tests.helpers.prefix_recount import check_cache
from tests.helpers.rooms import (
    ADDRESS,
    DECODE,
    DECODE_LIMITS,
    GEOMETRY,
    PAGE,
    R0,
    EngineVerbs,
    RecordedEvents,
    describe_decode,
    pages_in,
    run_inspection,
)
from tests.helpers.simulated_calls import SimulatedCalls
from tests.helpers.simulated_memory import PAGES, RANKS, EnginePool, Memory, keys_of, wrong_pages

STAGES = ("admitted", "provided", "begun", "published", "finished", "arrived", "committed", "claimed")
"""Orders stay in flight until `arrived`; what has arrived is looked at (where digests are wanted) until `committed`."""
BEGUN = STAGES[: STAGES.index("begun") + 1]
Tried = Callable[[Callable[[], object]], object]


class World(SimulatedCalls):
    """Both nodes and what lies between them. Pages are never used twice, and what a room has been given is what its prompt says."""

    def __init__(self, *, adopted: bool, digest: DigestKind = DigestKind.NONE, shares: bool = False) -> None:
        self.adopted = adopted
        self.shares = shares
        self.memory: Memory = {}
        """Belongs to the decode node."""
        self.reused = {"prefill": 0, "decode": 0}
        """Pages that rooms found there."""
        self.digest = digest
        self.ranks = simulated_nodes.DecodeRanks()
        self.verified: set[Owner] = set()
        """Rooms of which our rank found what was sent."""
        self.clock = ManualClock()
        self.events = RecordedEvents()
        self.lives = 0
        self.linked = False
        """Whether decode has a connection to prefill; what is sent to one that it has closed is lost with it."""
        self.forgotten = False
        """The prefill side knows nothing of the link (any more): what decode sends is answered with a reset."""
        self.towards_prefill: deque[PeerMessage | None] = deque()
        """None marks where decode has given the prefill node up and begins a new conversation with it."""
        self.towards_decode: deque[tuple[str, PeerMessage]] = deque()
        self.inspections: deque[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = deque()
        self.prompts: dict[Owner, int] = {}
        self.engines = simulated_nodes.Engines("a", "b")
        self.pool = EnginePool(self.memory)
        self.decoding: set[Owner] = set()
        """Requests whose room was handed over to an engine with pages of its own."""
        self.engines.on_event = self.decode_engine_hears
        self.on_their_way: set[tuple[Owner, simulated_nodes.Path]] = set()
        """Bytes of dead or failed writers, or of writers that lost a path, that may still arrive."""
        self.given_epochs = dict.fromkeys(simulated_nodes.TRANSPORTS, 0)
        self.revoked_before = dict.fromkeys(simulated_nodes.TRANSPORTS, 0)
        self.towards_rank: deque[NodeToWorker] = deque()
        told = SimpleNamespace(
            layers=(R0,),
            send=lambda rank, message: self.towards_rank.append(message),
            has_endpoints=lambda _rank: True,
        )
        self.fence = Fence(told, EventStream(), fence_s=30, clock=self.clock)
        space = {IndexSpace.FULL: PAGES}
        self.book = PageBook({}, adopted=space) if adopted else PageBook(space)
        self.prefixes = self.prefix_cache(self.book)
        self.decode_nodes = PrefillNodes(self.describe, simulated_nodes.OneLink(self), EventStream())
        settings = RoomSettings(
            geometry=GEOMETRY, adopted=adopted, shares_prefixes=shares, digest=digest, limits=DECODE_LIMITS
        )
        pages = RoomPages(self.book, settings, self.events, self.prefixes)
        self.decode = DecodeRooms(pages, self.ranks, self.engines, self.decode_nodes, self.fence, clock=self.clock)
        self.decode_verbs = EngineVerbs(self.decode)
        self.admission = simulated_nodes.own_admission(self.decode, self.book, self)
        self.prefill = self.new_life()

    def describe(self) -> NodeDescription:
        endpoints = (TransportEndpoint(transport=name, data=b"", epoch=at) for name, at in self.given_epochs.items())
        rank = RankDescription(manifest=simulated_nodes.DESTINATION, endpoints=tuple(endpoints))
        return describe_decode(ranks=(pack_rank(rank),))

    def prefix_cache(self, book: PageBook) -> PrefixCache | None:
        return PrefixCache(book, PrefixIndex((IndexSpace.FULL,), PAGES), clock=self.clock) if self.shares else None

    def new_life(self) -> simulated_nodes.PrefillNode:
        self.lives += 1
        return simulated_nodes.PrefillNode(self, f"aaaa{self.lives:012d}")

    def to_decode(self, message: PeerMessage) -> None:
        if self.linked and not self.forgotten and None not in self.towards_prefill:
            self.towards_decode.append((self.prefill.incarnation, message))

    def deliver_to_prefill(self) -> None:
        if self.forgotten:
            # The server answers a frame of a link that it does not know: everything unacknowledged is undelivered.
            self.towards_prefill.clear()
            self.forgotten = False
            self.decode_nodes.lost(ADDRESS, "a message was not acknowledged")
            self.decode_nodes.restarted(ADDRESS)
            return
        message = self.towards_prefill.popleft()
        if message is None:
            self.prefill.nodes.gone(DECODE, "it had given us up, and begins anew")
        else:
            self.prefill.take(message)

    def inspection_ends(self) -> None:
        run_inspection(*self.inspections.popleft())

    def deliver_all(self) -> None:
        while self.towards_prefill or self.towards_decode or self.inspections:
            if self.inspections:
                self.inspection_ends()
            elif self.towards_prefill:
                self.deliver_to_prefill()
            else:
                self.deliver_to_decode()
            self.check()

    def deliver_to_decode(self) -> None:
        self.decode_nodes.received(ADDRESS, *self.towards_decode.popleft())

    def verify(self, order: Verify, *, changed: bool = False, error: str = "") -> None:
        self.ranks.orders.remove(order)
        owner = Owner(order.room, order.generation)
        value = reduce(xor, (worker.arrived[owner] for worker in self.prefill.workers.values()), int(changed))
        if not changed and not error:
            self.verified.add(owner)
        if not error:
            self.decode.hear_rank(simulated_nodes.digested(order, R0, value))
        code = "unsupported" if error else ""
        self.decode.hear_rank(
            Verified(room=order.room, generation=order.generation, rank=R0, error_code=code, error=error)
        )

    def prefill_forgets_decode(self) -> None:
        self.prefill.nodes.gone(DECODE, "silent")
        self.towards_decode.clear()
        self.forgotten = True

    def decode_loses_prefill(self) -> None:
        self.decode_nodes.lost(ADDRESS, "silent")

    def decode_rank_acts(self) -> None:
        message = self.towards_rank.popleft()
        match message:
            case RenewEndpoints():
                self._give_out(message.epoch, message.transports)
            case RevokeEndpoints():
                for name in message.transports or simulated_nodes.TRANSPORTS:
                    self.revoked_before[name] = max(self.revoked_before[name], message.before_epoch)
                self.on_their_way = {(owner, path) for owner, path in self.on_their_way if self.is_open(path)}
                self.fence.revoked(R0, message.before_epoch)

    def decode_rank_dies(self) -> None:
        """Its successor gives out endpoints of the present epoch from the start."""
        self.towards_rank.clear()
        self.decode.worker_gone(R0, "killed")
        self._give_out(self.fence.epoch)

    def is_open(self, path: simulated_nodes.Path) -> bool:
        transport, epoch = path
        return epoch >= self.revoked_before[transport]

    def _give_out(self, epoch: int, transports: tuple[str, ...] = ()) -> None:
        self.given_epochs |= dict.fromkeys(transports or simulated_nodes.TRANSPORTS, epoch)
        self.decode_nodes.refresh()
        self.fence.ready(R0, epoch)

    def lose(self, worker: simulated_nodes.Worker, orders: Iterable[Send] | None = None) -> None:
        """The bytes of some orders of a worker (or of all) stay behind."""
        for order in [*worker.orders, *worker.active] if orders is None else orders:
            if self.is_open(worker.paths[order.order]):
                self.on_their_way.add((simulated_nodes.owner_of(order), worker.paths[order.order]))
                worker.spoil(order)

    def path_lost(self, worker: simulated_nodes.Worker, order: Send, *, in_transit: bool) -> None:
        """An order goes on over the other path, and something may still arrive by the one that it has lost."""
        if in_transit:
            self.lose(worker, [order])
        worker.reroute(order, in_transit=in_transit)

    def order_ends(self, worker: simulated_nodes.Worker, order: Send, *, how: str) -> None:
        """`how`: well, stopped (nothing of it is on its way), lost (something is), active (it goes on)."""
        cut_off = not self.is_open(worker.paths[order.order])
        if how == "lost":
            self.lose(worker, [order])
        well = how == "well" and not cut_off
        worker.end(order, well=well, in_transit=how == "lost", quiet=how != "active")

    def transport_closed(self, worker: simulated_nodes.Worker) -> None:
        self.lose(worker, worker.active)
        worker.close_transport()

    def prefill_dies(self) -> None:
        for worker in self.prefill.workers.values():
            self.lose(worker)
        self.towards_decode.clear()
        self.inspections.clear()
        self.forgotten = True
        self.prefill = self.new_life()

    def admit(self, owner: Owner, tokens: int, *, on_prefill: bool, keys: Keys | None = None) -> None:
        """`keys`: what its router says of the prompt, when that is not what the engines will compute."""
        self.prompts.setdefault(owner, tokens)
        if keys is None:
            keys = keys_of(owner, self.prompts[owner]) if self.shares else NO_KEYS
        request = AdmissionRequest(
            room=owner.room,
            generation=owner.generation,
            prompt_tokens=self.prompts[owner],
            prefill=() if on_prefill else (ADDRESS,),
            page_hashes=keys.data,
        )
        if on_prefill:
            self.prefill.service.admit(request)
        else:
            self.decode.admit(request)

    def calls(self, stage: str, owner: Owner, tokens: int) -> list[Callable[[], object]]:
        room = owner.room
        prefill, decode = sorted(self.prefill.engines.names), sorted(self.engines.names)
        return {
            "admitted": [partial(self.admit, owner, tokens, on_prefill=on_prefill) for on_prefill in (True, False)],
            "provided": [partial(self.provide, room)] if self.adopted else [],
            "begun": [partial(self.begin, engine, room) for engine in prefill],
            "published": [partial(self.publish, engine, room, tokens) for engine in prefill],
            "finished": [partial(self.prefill_engine_ends, engine, room, well=True) for engine in prefill],
            "claimed": [partial(self.claim, engine, room) for engine in decode if not self.adopted],
        }.get(stage, [])

    def bring(self, owner: Owner, tokens: int, stages: Iterable[str] = STAGES, tried: Tried = lambda call: call()):
        """Lead a room that nobody disturbs through stages; its orders stay in flight until `arrived`."""
        for stage in stages:
            for call in self.calls(stage, owner, tokens):
                tried(call)
            self.settle(orders=stage in {"arrived", "committed"}, verifying=stage == "committed")

    def settle(self, *, orders: bool = True, verifying: bool = True) -> None:
        """Do everything that is under way, or all but what moves bytes or looks at them; nobody dies meanwhile."""
        for _ in range(10_000):
            if self.towards_decode:
                self.deliver_to_decode()
            elif self.towards_prefill:
                self.deliver_to_prefill()
            elif self.inspections:
                self.inspection_ends()
            elif self.towards_rank:
                self.decode_rank_acts()
            elif self.ranks.orders and verifying:
                self.verify(self.ranks.orders[0])
            elif not self._work(orders=orders):
                return
            self.check()
        raise AssertionError("it never comes to rest")

    def _work(self, *, orders: bool) -> bool:
        for rank, worker in self.prefill.workers.items():
            if worker.inbox:
                worker.read()
            elif worker.orders and orders:
                self.order_ends(worker, worker.orders[0], how="well")
            elif worker.active and orders:
                self.transport_closed(worker)
            elif worker.outbox:
                self.prefill.hear(rank)
            else:
                continue
            return True
        return False

    def everybody_lets_go(self) -> None:
        """Engines give up all that they use, and time passes until no wait is left."""
        for engine, using in self.prefill.engines.using.items():
            for owner in sorted(using):
                self.prefill_engine_ends(engine, owner.room, well=False)
        for engine, using in self.engines.using.items():
            for owner in sorted(using):
                self.decode_engine_ends(engine, owner.room, well=True)
        for owner in sorted(self.decoding):
            self.decode_request_ends(owner.room)
        for room in self.decode.book:
            if room.admitted_by.name:
                self.decode_verbs.abort(room.admitted_by.name, room.room, "enough")
        for seconds in (130, 700, 130):
            self.clock.advance(seconds)
            self.tick()
            self.deliver_all()  # no message is on its way for as long as that
            self.check()

    def tick(self) -> None:
        self.decode.tick()
        self.fence.tick()
        self.prefill.service.tick()

    def free(self) -> tuple[int, int]:
        if not self.shares:
            return pages_in(self.prefill.book, PageState.FREE), pages_in(self.book, PageState.FREE)
        return sum(self.prefill.book.available_pages().values()), sum(self.book.available_pages().values())

    def check(self) -> None:
        prefill = self.prefill
        check_book(prefill.book)
        check_book(self.book)
        prefill.pool.check()
        self.pool.check()
        self._check_cached(prefill.prefixes, prefill.memory)
        self._check_cached(self.prefixes, self.memory)
        touched = {PageState.LEASED, PageState.QUARANTINED}
        for owner, _ in prefill.in_flight():
            assert prefill.book.state(owner) in touched, f"source pages of {owner} are {prefill.book.state(owner)}"
        for owner, path in prefill.in_flight() | self.on_their_way:
            if self.is_open(path):
                assert self.book.state(owner) in touched, f"destination of {owner} is {self.book.state(owner)}"
        if not self.adopted:
            for owner in prefill.engines.in_use():
                assert prefill.book.state(owner) is not PageState.FREE, f"{owner} is free while an engine writes it"
        for owner in self.engines.in_use():
            assert self.book.state(owner) in {PageState.HELD, PageState.QUARANTINED}, f"{owner} is read, not held"
        taken_for_lies = [code for code in self.events.refusals if code.startswith(("unexpected_", "foreign_"))]
        assert not taken_for_lies, "both nodes keep to the protocol, whatever crosses"
        self.events.facts.clear()
        for rooms in (self.decode.book, prefill.service.book):
            assert list(rooms.open) == [room for room in rooms if not room.user_state.final]
        for room in self.decode.book:
            self._check_commit(room)
            if self.shares and room.owner in self.engines.in_use():
                self._check_bytes(room)

    def _check_cached(self, prefixes: PrefixCache | None, memory: Memory) -> None:
        """Pins add up, and every prefix that a next room would find holds what it says."""
        if prefixes is None:
            return
        check_cache(prefixes)
        for generation in range(3):
            keys = keys_of(Owner(0, generation), 3 * PAGE)
            pages = prefixes.index.pages(prefixes.index.match(keys.in_namespace("")))[IndexSpace.FULL]
            tables = {IndexSpace.FULL: PageTable(IndexSpace.FULL, pages)}
            wrong = wrong_pages(memory, RANKS, tables, keys.to_list()[: len(pages)])
            assert not wrong, f"cached, and wrong: {wrong}"

    def _check_bytes(self, room: DecodeRoom) -> None:
        wrong = wrong_pages(self.memory, RANKS, room.tables, self.labels(room))
        assert not wrong, f"{room.owner} is committed, and {wrong}"

    def _check_commit(self, room: DecodeRoom) -> None:
        if room.state is not DecodeState.COMMITTED or self.prefill.incarnation not in room.writers:
            return
        if self.shares:
            self._check_bytes(room)
        assert room.owner not in {owner for owner, _ in self.prefill.in_flight() | self.on_their_way}
        assert self.prefill.ordered[room.owner] <= self.prefill.succeeded
        assert set(room.metadata) == {str(rank) for rank in RANKS}
        assert self.digest is DigestKind.NONE or room.owner in self.verified

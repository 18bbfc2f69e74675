"""One prefill node and one decode node in memory, with everything that can happen to them; for property tests.

The services, the handshake and the books are the real ones. Links, rank workers and engines are models that are as nasty as the
real ones may be: a link keeps its order and loses nothing, but a side may take the other for lost, forget it or die; a worker is a
queue of orders that end well, badly or with it; engines call when they like and die when they like.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial, reduce
from operator import xor

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.config.admission import AdmissionConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role, Tables
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.session.receiver import ReceiverState
from kvbridge.core.wire.engine_messages import Fetch, Hold, RoomEvent
from kvbridge.core.wire.features import PEER_FEATURES
from kvbridge.core.wire.messages import (
    Abort,
    Digests,
    Done,
    Drained,
    Failed,
    Hello,
    Intend,
    NodeDescription,
    Offer,
    PathLost,
    PeerMessage,
    RankDescription,
    Rejected,
    TransportEndpoint,
    Welcome,
    to_wire,
)
from kvbridge.core.wire.packed_ranks import pack_rank
from kvbridge.core.wire.worker_messages import (
    Digested,
    NodeToWorker,
    PeerConnected,
    RenewEndpoints,
    Rerouted,
    RevokeEndpoints,
    RoomClosed,
    Send,
    Sent,
    Verified,
    Verify,
)
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engine_admission import EngineAdmission
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.handshake.decode_nodes import DecodeNodes
from kvbridge.node.handshake.inspections import Inspections
from kvbridge.node.handshake.introduction import Self
from kvbridge.node.handshake.prefill_nodes import PrefillNodes
from kvbridge.node.receiver.fence import Fence
from kvbridge.node.receiver.room import ReceiverPorts, ReceiverRoom
from kvbridge.node.receiver.rooms import ReceiverRooms, receiver_rooms
from kvbridge.node.room_pages import RoomSettings
from kvbridge.node.sender.room import SenderPorts, SenderRoom
from kvbridge.node.sender.rooms import SenderRooms, sender_rooms
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import Owner, PageState
from kvbridge.telemetry.stream import EventStream
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import NO_KEYS, Keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import (
    ADDRESS,
    DECODE,
    GEOMETRY,
    PAGE,
    R0,
    R1,
    RECEIVER_LIMITS,
    SENDER_LIMITS,
    EngineVerbs,
    RecordedEvents,
    pages_in,
    run_inspection,
)
from tests.helpers.simulated_memory import Label, Memory, keys_of, label, write, wrong_pages
from tests.helpers.simulated_nodes import (
    DESTINATION,
    PAGES,
    RANKS,
    TRANSPORTS,
    DecodeRanks,
    Engines,
    Path,
    Worker,
    cover,
    digested,
    owner_of,
    table,
)
from tests.helpers.simulated_pool import EnginePool

STAGES = ("admitted", "provided", "begun", "published", "finished", "arrived", "committed", "claimed")
"""Orders stay in flight until `arrived`; what has arrived is looked at (where digests are wanted) until `committed`."""


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
        self.service = sender_rooms(
            SenderPorts(
                book=self.book,
                workers=self,
                nodes=self,
                engines=self.engines,
                events=world.events,
                prefixes=self.prefixes,
            ),
            RoomSettings(geometry=GEOMETRY, adopted=world.adopted, shares_prefixes=world.shares, limits=SENDER_LIMITS),
            clock=world.clock,
        )
        self.verbs = EngineVerbs(self.service)
        self.admission = own_admission(self.service, self.book, world)
        inspections = Inspections(
            lambda work, ended: world.inspections.append((work, ended)), limit_s=20, clock=world.clock
        )
        inspections.deliver_to(lambda _, message: self.take(message))
        self.nodes = DecodeNodes(
            Self(
                Welcome(
                    instance="prefill",
                    node="p0",
                    incarnation=incarnation,
                    pp_size=1,
                    tp_size=len(RANKS),
                    ranks=RANKS,
                    features=PEER_FEATURES,
                ),
                GEOMETRY,
            ),
            WorkersOf(self),
            inspections=inspections,
            events=EventStream(),
            send=lambda peer, message: world.to_decode(message),
        )
        self.nodes.watch(self.service.peers.peer_gone)

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

    def take(self, message: PeerMessage) -> None:
        if self.nodes.holds(DECODE, message):
            return
        match message:
            case Hello():
                self.nodes.hello(DECODE, message)
            case Intend() | Offer() | Abort() | Failed():
                self.service.peers.hear(DECODE, message)

    def hear(self, rank: Rank) -> None:
        message = self.workers[rank].outbox.popleft()
        match message:
            case PeerConnected():
                self.nodes.worker_connected(message)
            case Digested() | Sent() | Rerouted() | RoomClosed():
                if isinstance(message, Sent) and not message.error_code:
                    self.succeeded.add(message.order)
                self.service.workers.hear(message)

    def engine_hears(self, event: RoomEvent) -> None:
        """What an engine with pages of its own makes of an event."""
        if event.kind in {"completed", "aborted", "failed"}:
            self.pool.give_back(Owner(event.room, event.generation))

    def kill_worker(self, rank: Rank) -> None:
        self.world.lose(self.workers[rank])
        self.workers[rank] = self.new_worker(rank)
        self.service.workers.gone(rank, "killed")
        self.nodes.worker_ready(rank)

    def new_worker(self, rank: Rank) -> Worker:
        return Worker(rank, memory=(self.memory, self.world.memory))

    def in_flight(self) -> set[tuple[Owner, Path]]:
        """Rooms that workers may read and write, and the paths by which they would."""
        return set().union(*(worker.writes() for worker in self.workers.values()))


class WorkersOf:
    def __init__(self, node: PrefillNode) -> None:
        self.layers = node.layers
        self.send = node.send


class OneLink:
    """Between the decode node and the prefill node, whatever life it is in."""

    def __init__(self, world: World) -> None:
        self.world = world

    def open(self, address: PeerAddress) -> None:
        assert not self.world.linked
        self.world.linked = True

    def send(self, address: PeerAddress, message: PeerMessage) -> None:
        self.world.towards_prefill.append(message)

    def close(self, address: PeerAddress) -> None:
        self.world.linked = False
        self.world.towards_decode.clear()
        self.world.towards_prefill.append(None)


class World:
    """Both nodes and what lies between them."""

    def __init__(self, *, adopted: bool, digest: DigestKind = DigestKind.NONE, shares: bool = False) -> None:
        self.adopted = adopted
        self.shares = shares
        """Whether rooms have page keys, and pages stay."""
        self.memory: Memory = {}
        """Of the decode node."""
        self.reused = {"prefill": 0, "decode": 0}
        """Pages that rooms found there."""
        self.digest = digest
        self.ranks = DecodeRanks()
        self.verified: set[Owner] = set()
        """Rooms of which our rank found what was sent."""
        self.clock = ManualClock()
        self.events = RecordedEvents()
        """Of the rooms of both nodes."""
        self.lives = 0
        self.linked = False
        """Whether decode has a connection to prefill; what is sent to one that it has closed is lost with it."""
        self.forgotten = False
        """The prefill side knows nothing of the link (any more): what decode sends is answered with a reset."""
        self.towards_prefill: deque[PeerMessage | None] = deque()
        """None marks where decode has given the prefill node up and begins a new conversation with it."""
        self.towards_decode: deque[tuple[str, PeerMessage]] = deque()
        self.inspections: deque[tuple[Callable[[], None], Callable[[BaseException | None], None]]] = deque()
        """Introductions that the prefill node checks elsewhere."""
        self.prompts: dict[Owner, int] = {}
        self.engines = Engines("a", "b")
        self.pool = EnginePool(self.memory)
        self.decoding: set[Owner] = set()
        """Requests whose room was handed over to an engine with pages of its own."""
        self.engines.on_event = self.decode_engine_hears
        self.on_their_way: set[tuple[Owner, Path]] = set()
        """What dead or failed writers have sent, or others by a path that they have lost, and may still arrive."""
        self.given_epochs = dict.fromkeys(TRANSPORTS, 0)
        self.revoked_before = dict.fromkeys(TRANSPORTS, 0)
        self.towards_rank: deque[NodeToWorker] = deque()
        """Orders of the fence to the decode node's rank worker."""
        self.fence = Fence(
            (R0,),
            send=lambda rank, message: self.towards_rank.append(message),
            events=EventStream(),
            fence_s=30,
            clock=self.clock,
        )
        space = {IndexSpace.FULL: PAGES}
        self.book = PageBook({}, adopted=space) if adopted else PageBook(space)
        self.prefixes = self.prefix_cache(self.book)
        self.decode_nodes = PrefillNodes(
            describe=self.describe,
            links=OneLink(self),
            events=EventStream(),
        )
        self.receiver = receiver_rooms(
            ReceiverPorts(
                book=self.book,
                workers=self.ranks,
                nodes=self.decode_nodes,
                fence=self.fence,
                engines=self.engines,
                events=self.events,
                prefixes=self.prefixes,
            ),
            RoomSettings(
                geometry=GEOMETRY, adopted=adopted, shares_prefixes=shares, digest=digest, limits=RECEIVER_LIMITS
            ),
            clock=self.clock,
        )
        self.receiver_verbs = EngineVerbs(self.receiver)
        self.admission = own_admission(self.receiver, self.book, self)
        self.fence.watch(self.receiver.writers)
        self.decode_nodes.watch(self.receiver.writers)
        self.prefill = self.new_life()

    def describe(self) -> NodeDescription:
        endpoints = (TransportEndpoint(transport=name, data=b"", epoch=at) for name, at in self.given_epochs.items())
        rank = RankDescription(manifest=DESTINATION, endpoints=tuple(endpoints))
        return NodeDescription(
            instance="decode",
            node="d0",
            role=Role.DECODE,
            incarnation=DECODE,
            geometry=GEOMETRY,
            ranks=(pack_rank(rank),),
        )

    def prefix_cache(self, book: PageBook) -> PrefixCache | None:
        return PrefixCache(book, PrefixIndex((IndexSpace.FULL,), PAGES), clock=self.clock) if self.shares else None

    def keys(self, room: SenderRoom | ReceiverRoom) -> Keys:
        return keys_of(room.owner, room.prompt_tokens) if self.shares else NO_KEYS

    def prompt(self, owner: Owner, tokens: int) -> list[bytes]:
        """The keys of a prompt's whole pages, where prefixes are shared by nodes or by engines that bring their pages."""
        return keys_of(owner, tokens).to_list() if self.shares or self.adopted else []

    def labels(self, room: SenderRoom | ReceiverRoom) -> list[Label]:
        return self.labels_of(room.owner, room.prompt_tokens)

    def labels_of(self, owner: Owner, tokens: int) -> list[Label]:
        keys = self.prompt(owner, tokens)
        return [label(owner, keys, page) for page in range(cover(tokens))]

    def new_life(self) -> PrefillNode:
        self.lives += 1
        return PrefillNode(self, f"aaaa{self.lives:012d}")

    # ------------------------------------------------------------------ the link

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
        """Whatever is on its way between the nodes arrives, and is dealt with."""
        while self.towards_prefill or self.towards_decode or self.inspections:
            if self.inspections:
                self.inspection_ends()
            elif self.towards_prefill:
                self.deliver_to_prefill()
            else:
                self.deliver_to_decode()
            self.check()

    def deliver_to_decode(self) -> None:
        peer, message = self.towards_decode.popleft()
        match message:
            case Welcome():
                self.decode_nodes.welcome(ADDRESS, message)
            case Rejected():
                self.decode_nodes.rejected(ADDRESS, message)
            case Digests() | Done() | PathLost() | Failed() | Drained():
                self.receiver.peers.hear(peer, message)

    def verify(self, order: Verify, *, changed: bool = False, error: str = "") -> None:
        """Our rank looks at what has arrived: as it was sent, or `changed`, or it cannot look."""
        self.ranks.orders.remove(order)
        owner = Owner(order.room, order.generation)
        value = reduce(xor, (worker.arrived[owner] for worker in self.prefill.workers.values()), int(changed))
        if not changed and not error:
            self.verified.add(owner)
        if not error:
            self.receiver.workers.digested(digested(order, R0, value))
        code = "unsupported" if error else ""
        self.receiver.workers.verified(
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
                for name in message.transports or TRANSPORTS:
                    self.revoked_before[name] = max(self.revoked_before[name], message.before_epoch)
                self.on_their_way = {(owner, path) for owner, path in self.on_their_way if self.is_open(path)}
                self.fence.revoked(R0, message.before_epoch)

    def decode_rank_dies(self) -> None:
        """Its successor gives out endpoints of the present epoch from the start."""
        self.towards_rank.clear()
        self.receiver.workers.gone(R0, "killed")
        self._give_out(self.fence.epoch)

    def is_open(self, path: Path) -> bool:
        """Whether anything can arrive by it."""
        transport, epoch = path
        return epoch >= self.revoked_before[transport]

    def _give_out(self, epoch: int, transports: tuple[str, ...] = ()) -> None:
        self.given_epochs |= dict.fromkeys(transports or TRANSPORTS, epoch)
        self.decode_nodes.refresh()
        self.fence.ready(R0, epoch)

    def lose(self, worker: Worker, orders: Iterable[Send] | None = None) -> None:
        """What some orders of a worker (or all) have sent stays behind."""
        for order in [*worker.orders, *worker.active] if orders is None else orders:
            if self.is_open(worker.paths[order.order]):
                self.on_their_way.add((owner_of(order), worker.paths[order.order]))
                worker.spoil(order)

    def path_lost(self, worker: Worker, order: Send, *, in_transit: bool) -> None:
        """An order goes on over the other path, and something may still arrive by the one that it has lost."""
        if in_transit:
            self.lose(worker, [order])
        worker.reroute(order, in_transit=in_transit)

    def order_ends(self, worker: Worker, order: Send, *, how: str) -> None:
        """`how`: well, stopped (nothing of it is on its way), lost (something is), active (it goes on)."""
        cut_off = not self.is_open(worker.paths[order.order])
        if how == "lost":
            self.lose(worker, [order])
        well = how == "well" and not cut_off
        worker.end(order, well=well, in_transit=how == "lost", quiet=how != "active")

    def transport_closed(self, worker: Worker) -> None:
        self.lose(worker, worker.active)
        worker.close_transport()

    def prefill_dies(self) -> None:
        for worker in self.prefill.workers.values():
            self.lose(worker)
        self.towards_decode.clear()
        self.inspections.clear()
        self.forgotten = True
        self.prefill = self.new_life()

    # ------------------------------------------------------------------ users

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
            self.prefill.service.requests.admit(request)
        else:
            self.receiver.requests.admit(request)

    # ------------------------------------------------------------------ engines

    def begin(self, engine: str, room: int) -> None:
        found = self.prefill.service.book.get(room)
        pool, brought = self.prefill.pool, {}
        fresh = found.owner not in pool.of
        if self.adopted:
            brought = self.take_source(found.owner, found.prompt_tokens)
        try:
            self.prefill.verbs.begin(
                engine,
                (rank_of(engine),),
                room,
                prompt_tokens=found.prompt_tokens,
                page_hashes=self.keys(found).data,
                **({"tables": {}} | brought),
            )
        except BridgeError:
            if fresh:
                pool.give_back(found.owner)
            raise
        self.prefill.engines.uses(engine, found.owner)
        computed = found.computed_tokens // PAGE
        self.reused["prefill"] += computed
        if self.shares or self.adopted:
            wrong = wrong_pages(self.prefill.memory, (rank_of(engine),), found.tables, self.labels(found)[:computed])
            assert not wrong, f"{found.owner} begins with {wrong}"

    def take_source(self, owner: Owner, tokens: int) -> dict[str, object]:
        """The engine finds what it has of a prompt, and takes one page more: the others follow with what is published."""
        pool, labels = self.prefill.pool, self.labels_of(owner, tokens)
        pool.take(owner, labels, at_most=(tokens - 1) // PAGE, fresh=1)
        return {"tables": table(pool.of[owner]), "computed_tokens": pool.found[owner] * PAGE}

    def hold(self, owner: Owner, *, begun: bool) -> None:
        """The engine of the prefill node (its rank 0 speaks for both) admits a room itself, for a request that it has."""
        tokens = self.prompts.setdefault(owner, PAGE + 7)
        pool, named = self.prefill.pool, {}
        fresh = owner not in pool.of
        if begun:
            taken = self.take_source(owner, tokens)
            named = taken | {"tables": to_wire(taken["tables"])}
        call = Hold(call=1, room=owner.room, generation=owner.generation, prompt_tokens=tokens, **named)
        try:
            self.prefill.admission.hold(AttachedEngine("e0", 0, RANKS), call)
        except BridgeError:
            if fresh:
                pool.give_back(owner)
            raise
        if begun:
            self.prefill.engines.uses("e0", owner)

    def fetch(self, owner: Owner, *, named: bool) -> None:
        """The engine of the decode node admits a room itself, with its pages or before it has any."""
        tokens = self.prompts.setdefault(owner, PAGE + 7)
        place = (PeerAddress(endpoint=ADDRESS.endpoint),)
        fresh, tables = owner not in self.pool.of, {}
        if named:
            self.pool.take(owner, self.labels_of(owner, tokens), at_most=tokens // PAGE)
            has = self.pool.found[owner]
            tables = {"tables": to_wire(table(self.pool.of[owner][has:], has)), "prefix_tokens": has * PAGE}
        facts = {"room": owner.room, "generation": owner.generation, "prompt_tokens": tokens}
        try:
            self.admission.fetch(AttachedEngine("a", 0, (R0,)), Fetch(call=1, prefill=place, **facts, **tables))
        except BridgeError:
            if fresh:
                self.pool.give_back(owner)
            raise

    def prefill_engine_ends(self, engine: str, room: int, *, well: bool, again: bool = False) -> None:
        """Finish or abort (`again`: it will compute the room once more); on a room that is over either lets go of its pages."""
        ranks, using = (rank_of(engine),), self.prefill.engines.using[engine]
        mine = next((owner for owner in sorted(using) if owner.room == room), None)
        if mine is not None and (held := self.prefill.service.book.find(*mine)) is not None and held.admitted_by:
            ranks = RANKS
        if well:
            try:
                self.prefill.verbs.finish(engine, ranks, room, metadata=engine.encode())
            except BridgeError:
                ended = mine is not None and self.over(self.prefill.service.book.find(*mine))
                if not ended:
                    raise
        else:
            self.prefill.verbs.abort(engine, room, "enough", again=again)
        if mine is not None:
            using.discard(mine)

    @staticmethod
    def over(room: SenderRoom | None) -> bool:
        return room is None or room.over or room.stopping

    def prefill_engine_dies(self, engine: str) -> None:
        self.prefill.service.engines.gone(engine, "killed")
        self.check()  # its GPU still writes what it had begun: nobody else may have those pages
        self.prefill.engines.using[engine].clear()
        self.prefill.service.engines.ended(engine)

    def provide(self, room: int) -> None:
        found = self.receiver.book.get(room)
        fresh = found.owner not in self.pool.of
        self.pool.take(found.owner, self.labels(found), at_most=found.prompt_tokens // PAGE)
        has = self.pool.found[found.owner]
        try:
            self.receiver_verbs.provide(room, table(self.pool.of[found.owner][has:], has), prefix_tokens=has * PAGE)
        except BridgeError:
            if fresh:
                self.pool.give_back(found.owner)
            raise

    def decode_engine_hears(self, event: RoomEvent) -> None:
        """What an engine with pages of its own makes of an event."""
        owner = Owner(event.room, event.generation)
        if not self.adopted:
            return
        if event.kind == "committed":
            room = self.receiver.book.find(*owner)
            self._check_commit(room)
            wrong = wrong_pages(self.memory, RANKS, table(self.pool.of[owner]), self.labels(room))
            assert not wrong, f"{owner} is handed over, and {wrong}"
            self.pool.know(owner, self.prompt(owner, room.prompt_tokens))
            self.decoding.add(owner)
        elif event.kind in {"aborted", "failed"}:
            self.pool.give_back(owner)

    def decode_request_ends(self, room: int) -> None:
        """An engine with pages of its own is through with a request."""
        for owner in [owner for owner in self.decoding if owner.room == room]:
            self.decoding.discard(owner)
            self.pool.give_back(owner)

    def claim(self, engine: str, room: int) -> None:
        found = self.receiver.book.get(room)
        claimed = self.receiver_verbs.claim(engine, room, self.keys(found).data)
        self.reused["decode"] += claimed.prefix_tokens // PAGE
        self.engines.using[engine].add(claimed.owner)

    def decode_engine_ends(self, engine: str, room: int, *, well: bool) -> None:
        using = self.engines.using[engine]
        mine = next((owner for owner in sorted(using) if owner.room == room), None)
        # It stops to read before it says so.
        if mine is not None:
            using.discard(mine)
        if well:
            self.receiver_verbs.release(engine, room)
        else:
            self.receiver_verbs.abort(engine, room, "enough")

    def decode_engine_dies(self, engine: str) -> None:
        self.engines.names.discard(engine)
        self.receiver.engines.gone(engine, "killed")
        self.check()
        self.engines.using[engine].clear()
        self.receiver.engines.ended(engine)
        self.engines.names.add(engine)

    def publish(self, engine: str, room: int, upto: int, layers: tuple[int, ...] | None = None) -> None:
        rank, more = rank_of(engine), {}
        found = self.prefill.service.book.find(
            *next((o for o in self.prefill.engines.using[engine] if o.room == room), (room, 0))
        )
        alive = found is not None and not found.over and found.tables
        if (self.shares or self.adopted) and alive:
            pages = range(found.computed_tokens // PAGE, cover(min(upto, found.prompt_tokens)))
            tables = found.tables
            if self.adopted:
                tables, more = self.more_source(found, pages.stop)
            ranks = RANKS if found.admitted_by else (rank,)
            for written in ranks:
                write(self.prefill.memory, written, tables, pages, self.labels(found))
        ranks = RANKS if alive and found.admitted_by else (rank,)
        self.prefill.verbs.publish(engine, ranks, room, upto_token=upto, layers=layers, tables=more)
        if self.adopted and alive:
            self.prefill.pool.know(found.owner, self.prompt(found.owner, upto))

    def more_source(self, room: SenderRoom, pages: int) -> tuple[Tables, Tables]:
        """The engine takes what it lacks for so many pages of a prompt. Returns all, and those that the node does not know."""
        pool, owner = self.prefill.pool, room.owner
        pool.take_more(owner, max(0, pages - len(pool.of[owner])))
        known = len(room.tables[IndexSpace.FULL])
        return table(pool.of[owner]), table(pool.of[owner][known:], known)

    # ------------------------------------------------------------------ a room that nobody disturbs

    def calls(self, stage: str, owner: Owner, tokens: int) -> list[Callable[[], object]]:
        """What users and engines call to bring a room from the stage before to this one."""
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

    # ------------------------------------------------------------------ what must always be true

    def check(self) -> None:
        prefill = self.prefill
        prefill.book.check_integrity()
        self.book.check_integrity()
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
        for rooms in (self.receiver.book, prefill.service.book):
            assert rooms.open() == [room for room in rooms if not rooms._describe_state(room).final]
        for room in self.receiver.book:
            self._check_commit(room)
            if self.shares and room.owner in self.engines.in_use():
                self._check_bytes(room)

    def _check_cached(self, prefixes: PrefixCache | None, memory: Memory) -> None:
        """Pins add up, and every prefix that a next room would find holds what it says."""
        if prefixes is None:
            return
        prefixes.check_integrity()
        for generation in range(3):
            keys = keys_of(Owner(0, generation), 3 * PAGE)
            pages = prefixes.index.pages(prefixes.index.match(keys.in_namespace("")))[IndexSpace.FULL]
            tables = {IndexSpace.FULL: PageTable(IndexSpace.FULL, pages)}
            wrong = wrong_pages(memory, RANKS, tables, keys.to_list()[: len(pages)])
            assert not wrong, f"cached, and wrong: {wrong}"

    def _check_bytes(self, room: ReceiverRoom) -> None:
        wrong = wrong_pages(self.memory, RANKS, room.tables, self.labels(room))
        assert not wrong, f"{room.owner} is committed, and {wrong}"

    def _check_commit(self, room: ReceiverRoom) -> None:
        if room.state is not ReceiverState.COMMITTED or self.prefill.incarnation not in room.writers:
            return
        if self.shares:
            self._check_bytes(room)
        assert room.owner not in {owner for owner, _ in self.prefill.in_flight() | self.on_their_way}
        assert self.prefill.ordered[room.owner] <= self.prefill.succeeded
        assert set(room.metadata) == {str(rank) for rank in RANKS}
        assert self.digest is DigestKind.NONE or room.owner in self.verified

    # ------------------------------------------------------------------ coming to rest

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
        for room in self.receiver.book:
            if room.admitted_by:
                self.receiver_verbs.abort(room.admitted_by, room.room, "enough")
        for seconds in (130, 700, 130):
            self.clock.advance(seconds)
            self.tick()
            self.deliver_all()  # no message is on its way for as long as that
            self.check()

    def tick(self) -> None:
        self.receiver.deadlines.tick()
        self.fence.tick()
        self.prefill.service.deadlines.tick()
        self.prefill.service.peers.tick()

    def free(self) -> tuple[int, int]:
        """Pages that a room could have now."""
        if not self.shares:
            return pages_in(self.prefill.book, PageState.FREE), pages_in(self.book, PageState.FREE)
        return sum(self.prefill.book.available_pages().values()), sum(self.book.available_pages().values())


def own_admission(service: SenderRooms | ReceiverRooms, book: PageBook, world: World) -> EngineAdmission:
    controller = AdmissionController(
        service.requests, book, limits=AdmissionConfig(), events=EventStream(), clock=world.clock
    )
    return EngineAdmission(service, controller)


def rank_of(engine: str) -> Rank:
    return {"e0": R0, "e1": R1}[engine]

"""The rooms of a prefill node or of a decode node, with all that surrounds them faked, and what others say to them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.core.errors import InvalidInputError, NotFoundError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, PageTable, Rank
from kvbridge.core.plan.digests import DigestKind
from kvbridge.core.wire import messages, worker_messages
from kvbridge.core.wire.engine_messages import AskRestorable, Pages
from kvbridge.node.decode.room import DecodeRoom
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.prefill.room import PrefillRoom
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.node.room_pages import RoomPages, RoomSettings
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.node.workers import WorkerSet
from kvbridge.pool.accounts.book import PageBook, PageState
from kvbridge.telemetry.logs import Seldom
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers import rooms
from tests.helpers.accounts import check_book
from tests.helpers.manual_clock import ManualClock
from tests.helpers.prefix_recount import check_cache

FULL, SWA, FULL_COPY, SWA_COPY = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.FULL_COPY, IndexSpace.SWA_COPY
GQA, V4 = rooms.GEOMETRY, preset("tiny-v4")
IDENTITY = PrefixIdentity(model="m", revision="1", fingerprint=fingerprint(rooms.GEOMETRY), tokens_per_page=rooms.PAGE)
HISTORY = list(range(1_000, 1_000 + 20 * rooms.PAGE))
"""Tokens; prompts begin with them."""


def keys_of(tokens: int | list[int]) -> Keys:
    return page_keys(IDENTITY, HISTORY[:tokens] if isinstance(tokens, int) else tokens)


@dataclass
class NodeBench:
    """A node of either role with `pages` pages of the full space, and `twins` pages of a host tier."""

    adopted: bool = False
    shares_prefixes: bool = True
    pages: int = 16
    twins: int = 0
    clock: ManualClock = field(default_factory=ManualClock)
    engines: rooms.FakeEngines = field(default_factory=lambda: rooms.FakeEngines("engine"))
    events: rooms.RecordedEvents = field(default_factory=rooms.RecordedEvents)
    prefill: tuple = ()
    peer: str = rooms.DECODE
    """The speaker when a test names nobody."""

    def _make(self, spaces: dict[IndexSpace, int]) -> None:
        self.book = PageBook({}, adopted=spaces) if self.adopted else PageBook(spaces)
        self.prefixes: PrefixCache | None = None
        if self.shares_prefixes and not self.adopted:  # as the daemon makes it: for pages that the node gives out
            index = PrefixIndex((FULL,), self.pages + self.twins, has_copies=bool(self.twins))
            self.prefixes = PrefixCache(self.book, index, clock=self.clock, restores=True)

    def _settings(self, **fields) -> RoomSettings:
        return RoomSettings(adopted=self.adopted, shares_prefixes=self.shares_prefixes, **fields)

    def admit(self, room: int = 1, tokens: int = rooms.TOKENS, **fields) -> RoomReport:
        fields = {"prefill": self.prefill, "prompt_tokens": tokens} | fields
        return self.service.admit(AdmissionRequest(room=room, **fields))

    def hear(self, message: messages.PeerMessage, peer: str = "") -> None:
        self.service.hear(peer or self.peer, message)

    def tick(self) -> None:
        self.service.tick()

    def room(self, room: int = 1) -> PrefillRoom | DecodeRoom:
        return self.service.book.get(room)

    def state(self, generation: int = 1) -> object:
        found = self.service.book.find(1, generation)
        assert found is not None
        return found.state

    def report(self, room: int = 1) -> RoomReport:
        return self.service.book.report(room)

    def stop(self, room: int = 1) -> None:
        self.service.stop(self.room(room), "by its client")

    @property
    def quarantined(self) -> set[str]:
        return {cause for cause, count in self.service.book.quarantined().items() if count}

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.tick()

    @property
    def free(self) -> int:
        """Pages that a request can have: nobody has them, or they are cached and nobody reads them."""
        return sum(self.book.available_pages().values())

    def all_is_back(self) -> None:
        """Every page is free or cached, and no client is charged for a room."""
        for space, counts in self.book.counts().items():
            assert {state for state, count in counts.items() if count} <= {PageState.FREE, PageState.CACHED}, space
        assert not self.service.book.in_use
        check_book(self.book)
        if self.prefixes is not None:
            assert not self.prefixes.readers
            check_cache(self.prefixes)


@dataclass
class PrefillBench(NodeBench):
    """A prefill node. Rooms of models with windows take pages of the window space and a request slot, too."""

    ranks: tuple[Rank, ...] = (rooms.R0,)
    geometry: ModelGeometry = rooms.GEOMETRY
    windows: int = 16
    interval: int = 0
    """Tokens between checkpoints."""
    part_of_instance: bool = False
    peers: rooms.FakePeers = field(default_factory=rooms.FakePeers)

    def __post_init__(self) -> None:
        spaces = {FULL: self.pages}
        if self.geometry is V4:
            spaces |= {SWA: self.windows, IndexSpace.REQUEST: 8}
        self._make(spaces | ({FULL_COPY: self.twins, SWA_COPY: 8} if self.twins else {}))
        self.workers = rooms.FakeWorkers(*self.ranks, geometry=self.geometry)
        settings = self._settings(
            geometry=self.geometry,
            limits=rooms.PREFILL_LIMITS,
            computes=True,
            checkpoint_interval_tokens=self.interval,
            part_of_instance=self.part_of_instance,
        )
        pages = RoomPages(self.book, settings, self.events, self.prefixes)
        self.service = PrefillRooms(pages, self.workers, self.engines, self.peers, clock=self.clock)
        self.verbs = rooms.EngineVerbs(self.service, self.ranks)

    def offer(self, room: int = 1, *, peer: str = "", **fields) -> None:
        fields = {
            "generation": 1,
            "prompt_tokens": rooms.TOKENS,
            "tables": messages.to_wire(rooms.pages_table(7, 8)),
        } | fields
        self.hear(messages.Offer(room=room, **fields), peer)

    def abort(self, room: int = 1) -> None:
        self.hear(messages.Abort(room=room, generation=1, code="aborted", message="enough"))

    def told(self, kind: type, peer: str | None = None) -> list:
        return rooms.pick(self.peers.messages, kind, peer)

    def orders(self, rank: Rank | None = None, room: int = 1) -> list[worker_messages.Send]:
        return [order for order in rooms.pick(self.workers.messages, worker_messages.Send, rank) if order.room == room]

    def sent(self, order: worker_messages.Send | None = None, rank: Rank = rooms.R0, **fields) -> None:
        order = order or self.orders(rank)[-1]
        about = {"room": order.room, "generation": order.generation, "order": order.order}
        fields = {"amounts": rooms.full_amounts(rooms.TOKENS), "seconds": {"move": 1.0}} | fields
        self.service.hear_rank(worker_messages.Sent(rank=rank, **about, **fields))

    def closed(self, room: int = 1, generation: int = 1, *, quiet: bool = True, **fields) -> None:
        for rank in self.ranks:
            self.service.hear_rank(
                worker_messages.RoomClosed(room=room, generation=generation, rank=rank, quiet=quiet, **fields)
            )


@dataclass
class PrefixBench(PrefillBench):
    """A prefill node whose rooms are named by their tokens, and go on from what others have left."""

    geometry: ModelGeometry = V4
    pages: int = 64

    def admit(self, room: int, tokens: list[int], **fields) -> PrefillRoom:
        super().admit(room, len(tokens), page_hashes=keys_of(tokens).data, **fields)
        return self.room(room)

    def begin(self, room: int, tokens: list[int], ranks=None, **more) -> Pages:
        keys = keys_of(tokens).data
        return self.verbs.begin("engine", ranks, room, prompt_tokens=len(tokens), page_hashes=keys, **more)

    def restorable(self, room: int) -> tuple[int, ...]:
        call = AskRestorable(call=1, room=room)
        return self.service.calls[AskRestorable](AttachedEngine("engine", 0, self.ranks), call).tokens

    def offer(self, room: int, tokens: list[int], held: int = 0) -> None:
        table = PageTable(
            FULL, np.arange(-(-len(tokens) // rooms.PAGE) - held // rooms.PAGE, dtype=np.int32), held // rooms.PAGE
        )
        super().offer(room, prompt_tokens=len(tokens), prefix_tokens=held, tables=messages.to_wire({FULL: table}))

    def all_sent(self, room: int) -> None:
        for rank in self.ranks:
            for order in self.orders(rank, room):
                self.sent(order, rank, amounts={})

    def publish(self, room: int, tokens: list[int], **more) -> None:
        self.verbs.publish("engine", None, room, upto_token=len(tokens), **more)

    def finish(self, room: int, written: tuple[int, ...] = (), **more) -> None:
        self.verbs.finish("engine", None, room, checkpoints=written, **more)

    def cross(self, room: int, tokens: list[int]) -> Pages:
        """A whole room; its engine leaves every checkpoint that is asked for."""
        self.admit(room, tokens)
        self.offer(room, tokens)
        begun = self.begin(room, tokens)
        self.publish(room, tokens)
        self.finish(room, tuple(one.tokens for one in begun.checkpoints))
        self.all_sent(room)
        check_cache(self.prefixes)
        return begun


def ids(pages: Pages, space: IndexSpace = FULL) -> list[int]:
    table = next(table for table in pages.tables if table.space is space)
    return np.frombuffer(table.ids, "<i4").tolist()


@dataclass
class DecodeBench(NodeBench):
    keeps_answers: bool = True
    digest: DigestKind = DigestKind.NONE
    store: StoredPrefixes | None = None
    nodes: rooms.FakeNodes = field(default_factory=rooms.FakeNodes)
    fence: rooms.FakeFence = field(default_factory=rooms.FakeFence)
    ranks: rooms.FakeWorkers = field(default_factory=rooms.FakeWorkers)
    peer: str = rooms.PREFILL
    prefill: tuple = (rooms.ADDRESS,)

    def __post_init__(self) -> None:
        self._make({FULL: self.pages} | ({FULL_COPY: self.twins} if self.twins else {}))
        answers = {"keeps_answers": self.keeps_answers, "digest": self.digest}
        settings = self._settings(geometry=rooms.GEOMETRY, limits=rooms.DECODE_LIMITS, **answers)
        pages = RoomPages(self.book, settings, self.events, self.prefixes, self.store)
        self.service = DecodeRooms(pages, self.ranks, self.engines, self.nodes, self.fence, clock=self.clock)
        self.verbs = rooms.EngineVerbs(self.service)

    def told(self, kind: type, peer: str | None = None) -> list:
        return rooms.pick(self.nodes.messages, kind, peer)

    def done(self, peer: str = "", rank: Rank = rooms.R0, room: int = 1, generation: int = 1, **fields) -> None:
        fields = {"amounts": rooms.full_amounts(rooms.TOKENS), "phases_s": {"move": 1.0}, "metadata": b"meta"} | fields
        self.hear(messages.Done(room=room, generation=generation, writer=rank, **fields), peer)

    def failed(self, peer: str = "") -> None:
        self.hear(messages.Failed(room=1, generation=1, code="transport_failed", message="cable"), peer)

    def drained(self, peer: str = "", room: int = 1, generation: int = 1, *, in_transit: bool = False) -> None:
        self.hear(messages.Drained(room=room, generation=generation, in_transit=in_transit), peer)


def offered(**fields) -> DecodeBench:
    bench = DecodeBench(**fields)
    bench.nodes.know()
    bench.admit()
    return bench


@dataclass
class KeyedDecode(DecodeBench):
    """A decode node, and a prefill node whose engine says which prompt it has computed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.nodes.know()

    def keyed(self, room: int, tokens: int, *, keys: Keys | None = None, **fields) -> DecodeRoom:
        self.admit(
            room, tokens, **({"max_new_tokens": rooms.TOKENS, "page_hashes": (keys or keys_of(tokens)).data} | fields)
        )
        return self.room(room)

    def arrives(self, room: DecodeRoom, keys: Keys | None = None, **fields) -> None:
        """All of a room is sent; `keys`: what the engine of the prefill node has stated."""
        stated = keys_of(room.prompt_tokens) if keys is None else keys
        said = {"keys_digest": stated.digest, "end_key": stated.end} | fields
        self.done(
            room=room.room, amounts=rooms.full_amounts(room.prompt_tokens, room.prefix_tokens), metadata=b"", **said
        )

    def arrived(self, room: int, tokens: int, **fields) -> DecodeRoom:
        found = self.keyed(room, tokens, **fields)
        self.arrives(found)
        return found

    def claim(self, room: DecodeRoom) -> Pages:
        keys = keys_of(room.prompt_tokens)
        return self.verbs.claim_pages("engine", room.room, keys.data, end_key=keys.end)

    def claimed(self, room: int, tokens: int, **fields) -> DecodeRoom:
        found = self.arrived(room, tokens, **fields)
        self.claim(found)
        return found

    def whole(self, room: int, tokens: int, **fields) -> DecodeRoom:
        found = self.claimed(room, tokens, **fields)
        self.verbs.release("engine", room)
        return found

    def answers(self, room: int, tokens: int) -> None:
        """The engine releases a room with so many tokens, prompt and answer together."""
        self.verbs.release("engine", room, valid_tokens=tokens, page_hashes=keys_of(tokens).data)

    @property
    def cached(self) -> int:
        return rooms.pages_in(self.book, PageState.CACHED)


def setup(rank: Rank) -> worker_messages.WorkerSetup:
    sizes = {"pp_size": 1, "tp_size": 2, "layers": (0,), "device": (), "host": ()}
    return worker_messages.WorkerSetup(
        geometry=rooms.GEOMETRY, rank=rank, **sizes, transports="{}", transfer_timeout_s=1.0
    )


class FakeProcess:
    followed = True

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.calls: list[Callable[[], None]] = []

    def when_ended(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def end(self) -> None:
        for call in self.calls:
            call()


class FakeServer:
    """The socket of a node's workers (or engines); nobody is behind a link that is `gone`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, object]] = []
        self.gone: set[str] = set()
        self.dropped: list[str] = []
        self.processes: dict[str, FakeProcess] = {}

    def send(self, client: str, message: object) -> None:
        if isinstance(message, Pages):
            raise InvalidInputError("4000000 bytes long, a frame takes at most 3145728")
        if client in self.gone:
            raise NotFoundError(f"{client} is gone")
        self.sent.append((client, message))

    def process(self, client: str) -> FakeProcess:
        return self.processes.setdefault(client, FakeProcess(len(self.processes) + 1))

    def drop(self, client: str) -> None:
        self.dropped.append(client)


class WorkerBench:
    """A node of two ranks whose workers engines bring, and what its parts hear of them."""

    def __init__(self, limit_s: float = 15.0) -> None:
        self.server = FakeServer()
        self.messages = self.server.sent
        self.events = rooms.RecordedEvents()
        self.up: list[Rank] = []
        self.down: list[str] = []
        self.said: list[object] = []
        config = SimpleNamespace(timeouts=SimpleNamespace(worker_start_s=limit_s, worker_silence_s=limit_s))
        self.workers = WorkerSet(config, {rooms.R0: (0, 1), rooms.R1: (0, 1)}, self.events, Seldom(lambda _event: None))
        reports = dict.fromkeys((worker_messages.RoomClosed, worker_messages.EndpointsRevoked), self.said.append)
        self.workers.serve(self.up.append, lambda _rank, reason: self.down.append(reason), reports)
        self.workers._server = self.server
        self.workers.start(setup, None)

    def hello(self, rank: Rank = rooms.R0, link: str = "link") -> None:
        self.workers.hear(link, worker_messages.WorkerHello(rank=rank, pid=11, adopted=True))

    def ready(self, rank: Rank = rooms.R0, link: str = "link", **fields) -> None:
        endpoint = messages.TransportEndpoint(transport="local", data=b"1")
        described = messages.RankDescription(manifest=rooms.manifest(rank=rank, tp_size=2), endpoints=(endpoint,))
        self.workers.hear(link, worker_messages.WorkerReady(rank=rank, pid=11, description=described, **fields))

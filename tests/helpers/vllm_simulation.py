"""Two vLLM instances as models, with the real decisions of our connector, and between them the two simulated nodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, NotReadyError, PeerError
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import IndexSpace, Rank, Role
from kvbridge.core.wire.engine_messages import Fetch, Hold, RoomEvent
from kvbridge.engine.link import RoomCall
from kvbridge.engine.vllm.requests import Request, Source, params_of
from kvbridge.node.engines import AttachedEngine
from kvbridge.pool.accounts.book import Owner
from tests.helpers.room_simulation import World
from tests.helpers.rooms import ADDRESS, PAGE, R0
from tests.helpers.simulated_memory import GARBAGE, RANKS
from tests.helpers.simulated_vllm import Engine, Job, Memory, job
from tests.helpers.vllm_links import attach, rooms_at

BLOCKS = 6
"""Blocks of each engine: two prompts of three blocks."""
LONGEST_WAIT_S = 1_000
"""All limits of the nodes are shorter."""
E0 = AttachedEngine("e0", 0, RANKS)
A = AttachedEngine("a", 0, (R0,))
ENGINE_RANKS = {"prefill": RANKS, "decode": (R0,)}


class Link:
    """Between an engine and its node: messages that were posted, and are read when the node likes. In an `EngineLink`'s place."""

    lost = ""

    def __init__(self, take: Callable[[RoomCall], None]) -> None:
        self.take = take
        self.posted: deque[RoomCall] = deque()
        self.news: list[RoomEvent] = []
        self.deaf = False
        self.dead = False

    def number(self) -> int:
        return 1

    def post(self, message: RoomCall) -> None:
        if self.dead:
            raise PeerError("the node has closed its socket")
        if self.deaf:
            raise NotReadyError("the node does not read", retry_after_s=0.1)
        self.posted.append(message)
        self.take(message)

    def events(self, timeout_s: float) -> list[RoomEvent]:
        if self.dead and not self.news:
            raise PeerError("the node has closed its socket")
        news, self.news = self.news, []
        return news


class Side:
    def __init__(self, pair: Pair, name: str, *, recompute: bool, rooms: Callable[[], int], caches: bool = True):
        self.pair = pair
        self.name = name
        self.link = Link(self.note)
        self.life = 1
        self.used: dict[Owner, tuple[int, ...]] = {}
        self.newest: dict[int, int] = {}
        self.dying: dict[Rank, set[int]] = {}
        """Blocks that a rank's transports of a dead node may still touch."""
        self.failures: list[str] = []
        """Codes of the errors that no hook has let out."""
        ranks = ENGINE_RANKS[name]
        self.rooms = rooms_at(Role(name), self.link, block_tokens=PAGE, ranks=len(ranks), failures=self.failures)
        self.rooms._draw_room = rooms
        memory = Memory(self.write, self.wrong, self.in_use)
        self.engine = Engine(self.rooms, len(ranks), BLOCKS, PAGE, memory, recompute=recompute, caches=caches)

    @property
    def incarnation(self) -> str:
        return f"n{self.life}"

    @property
    def memory(self) -> dict[tuple[Rank, int], Hashable]:
        world = self.pair.world
        return world.prefill.memory if self.name == "prefill" else world.memory

    def write(self, block: int, label: Hashable) -> None:
        for rank in RANKS:
            self.memory[rank, block] = label

    def wrong(self, blocks: Sequence[int], labels: Sequence[Hashable]) -> str:
        for block, label in zip(blocks, labels, strict=False):
            for rank in RANKS:
                if self.memory.get((rank, block)) != label:
                    return f"block {block} holds {self.memory.get((rank, block))!r}, not {label!r}"
        return ""

    def in_use(self) -> set[int]:
        return self.touched().union(*self.dying.values())

    def touched(self) -> set[int]:
        world = self.pair.world
        owners = world.prefill.in_flight()
        if self.name == "decode":
            owners = {one for one in owners | world.on_their_way if world.is_open(one[1])}
        return {block for owner, _ in owners for block in self.used.get(owner, ())}

    def note(self, message: RoomCall) -> None:
        if isinstance(message, Hold | Fetch):
            self.newest[message.room] = message.generation
        if tables := tables_from_wire(getattr(message, "tables", None) or ()):
            owner = Owner(message.room, self.newest[message.room])
            self.used[owner] = (*self.used.get(owner, ()), *map(int, tables[IndexSpace.FULL].ids))

    def node_reads(self) -> None:
        """The node carries one call out; a refusal is heard by whoever said it, behind all events before."""
        message, world = self.link.posted.popleft(), self.pair.world
        try:
            if isinstance(message, Hold):
                world.prefill.admission.admit_own(E0, message)
            elif isinstance(message, Fetch):
                world.admission.admit_own(A, message)
            elif self.name == "prefill":
                world.prefill.verbs.rooms.calls[type(message)](E0, message)
            else:
                world.decode_verbs.rooms.calls[type(message)](A, message)
        except BridgeError as error:
            if "still belongs to" in str(error):
                raise AssertionError("the engine gave blocks away that a room has") from error
            why = {"code": error.code, "reason": str(error), "generation": getattr(message, "generation", 0)}
            self.link.news.append(RoomEvent(room=message.room, kind="refused", **why))

    def hears(self, event: RoomEvent) -> None:
        self.engine.events.append(event)
        self.link.news.append(event)

    def node_dies(self) -> None:
        """Everything that it had not read is lost; its ranks' transports are open until they say so."""
        touched = self.touched()
        self.link.posted.clear()
        self.link.news.clear()
        self.link.dead = True
        for rank in ENGINE_RANKS[self.name]:
            self.dying.setdefault(rank, set()).update(touched)

    def rank_closes(self, index: int) -> None:
        rank = ENGINE_RANKS[self.name][index]
        if self.dying.pop(rank, None) is not None:
            self.engine.closed[index].append(self.incarnation)

    def node_comes_back(self) -> None:
        """The engine attaches to its successor once every rank has noticed."""
        if self.link.dead:
            for index in range(len(ENGINE_RANKS[self.name])):
                self.rank_closes(index)
            self.rooms.look()
            self.life += 1
            self.link = Link(self.note)
            attach(self.rooms.attachment, self.link, self.incarnation)
            self.rooms.look()


class Pair:
    def __init__(self, *, recompute: bool, caches: bool = True) -> None:
        self.rooms = 0
        self.world = World(adopted=True)
        self.prefill = Side(self, "prefill", recompute=recompute, rooms=self.draw, caches=caches)
        self.decode = Side(self, "decode", recompute=recompute, rooms=self.draw)
        self.jobs = 0
        self.listen()

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.prefill, self.decode

    def draw(self) -> int:
        self.rooms += 1
        return self.rooms

    def listen(self) -> None:
        self.world.prefill.engines.on_event = self.prefill.hears
        self.world.engines.on_event = self.decode.hears

    def prompt_arrives(self, tokens: Sequence[int]) -> None:
        self.prefill.engine.add(self.job("p", tokens, {"do_remote_decode": True}))

    def pair_arrives(self, tokens: Sequence[int], *, to: Sequence[str] = ("prefill", "decode"), room: int = 0) -> int:
        """One request for both, in this order, or for one of them; returns its room."""
        room = room or self.draw()
        source = Source(room=room, prefill=(PeerAddress(endpoint=ADDRESS.endpoint),))
        for name in to:
            params = params_of(source)
            if name == "prefill":
                params = {"do_remote_decode": True, "kvbridge": {"room": str(room)}}
            getattr(self, name).engine.add(self.job(name[0], tokens, params))
        return room

    def answer_arrives(self, answered: Job, params: dict, tokens: Sequence[int]) -> None:
        self.decode.engine.add(self.job("d", tokens, params))

    def answer_is_refused(self, params: dict) -> None:
        """By the API of decode: vLLM has another prompt in its place."""
        self.decode.engine.scheduler.declined(Request("refused", 1, b"", params))

    def job(self, name: str, tokens: Sequence[int], params: dict | None) -> Job:
        self.jobs += 1
        return job(f"{name}{self.jobs}", tokens, PAGE, params)

    def prefill_node_dies(self) -> None:
        self.prefill.node_dies()
        memory = dict(self.world.prefill.memory)
        self.world.prefill_dies()
        self.world.prefill.memory.update(memory)
        self.listen()

    def both_nodes_die(self) -> None:
        for side in self.sides:
            side.node_dies()
        memories = [dict(side.memory) for side in self.sides]
        self.world = World(adopted=True)
        for side, memory in zip(self.sides, memories, strict=True):
            side.memory.update(memory)
        self.listen()

    def late_bytes_arrive(self) -> None:
        """Write the bytes that were under way when decode's node died, while its transports are open."""
        for block in set().union(*self.decode.dying.values()):
            for rank in RANKS:
                self.decode.memory[rank, block] = GARBAGE

    def settle(self, *, orders: bool = True) -> None:
        """Nodes and workers do what they have to; without `orders` what moves bytes is under way then."""
        for side in self.sides:
            while side.link.posted:
                side.node_reads()
        self.world.settle(orders=orders)

    def come_to_rest(self) -> None:
        """Everybody lives and nothing is in the way: all requests end, one after another."""
        left, idle_s = self.left(), 0
        for side in self.sides:
            side.link.deaf = False
        while left:
            assert idle_s < LONGEST_WAIT_S, f"requests hang: {left}"
            for side in self.sides:
                side.node_comes_back()
            self.settle()
            for side in self.sides:
                side.engine.step()
            self.world.clock.advance(5)
            self.world.tick()
            before, left = left, self.left()
            idle_s = idle_s + 5 if len(left) == len(before) else 0

    def left(self) -> dict[str, str]:
        left = {name: one.status.name for side in self.sides for name, one in side.engine.requests.items()}
        return left | ({"pins": "ENDING"} if self.prefill.rooms.has_pins else {})

"""The services' surroundings, faked: workers, peers, engines and nodes that only write down what they are told."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from kvbridge.config.limits import DaemonTimeouts
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.manifest import RankManifest, fingerprint, lane_interval
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role, Tables
from kvbridge.core.plan.operations import Amount, Amounts
from kvbridge.core.plan.pairing import Demand, LaneRows
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire import engine_messages
from kvbridge.core.wire.codec import pack_rank
from kvbridge.core.wire.messages import (
    FEATURES,
    NodeDescription,
    PeerMessage,
    RankDescription,
    TransportEndpoint,
    Welcome,
    to_wire,
)
from kvbridge.core.wire.worker_messages import NodeToWorker
from kvbridge.node.decode.rooms import DecodeRooms
from kvbridge.node.engines import AttachedEngine
from kvbridge.node.prefill.rooms import PrefillRooms
from kvbridge.node.room import Room
from kvbridge.node.workers import WorkerState
from kvbridge.pool.accounts.book import Owner, PageBook, PageState
from kvbridge.telemetry import facts
from tests.helpers.manifests import new_region

GEOMETRY = preset("tiny-gqa")
PAGE = GEOMETRY.tokens_per_page
R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)
ADDRESS = PeerAddress(endpoint="tcp://prefill-a:7000")
OTHER_ADDRESS = PeerAddress(endpoint="tcp://prefill-b:7000")
PREFILL_LIMITS = DaemonTimeouts(begin_s=80, offer_s=60, room_s=600, early_offer_s=10, drain_s=50, room_keep_s=300)
DECODE_LIMITS = DaemonTimeouts(
    pages_s=10, handshake_s=20, room_s=600, claim_s=120, verify_s=40, drain_s=50, room_keep_s=300
)
TOKENS = 2 * PAGE
PREFILL, DECODE = "aaaa000000000001", "dddd000000000001"
"""Incarnations."""

MessageT = TypeVar("MessageT")


def manifest(
    geometry: ModelGeometry = GEOMETRY,
    rank: Rank = R0,
    *,
    tp_size: int = 1,
    pages: int = 16,
    host: frozenset[ComponentKind] = frozenset(),
    base: int = 1 << 30,
) -> RankManifest:
    """A rank of one pipeline stage, whose regions lie one after another from `base`."""
    regions = []
    for component in geometry.components:
        lanes = lane_interval(component, rank.tp, tp_size)
        page_bytes = component.page_bytes(lanes[1] - lanes[0])
        for layer in component.layers:
            form = {"space": IndexSpace.HOST if component.kind in host else component.space, "lanes": lanes}
            regions.append(new_region(component.kind, layer, (base,), pages=pages, page_bytes=page_bytes, **form))
            base += pages * page_bytes
    return RankManifest(
        fingerprint=fingerprint(geometry), rank=rank, pp_size=1, tp_size=tp_size, regions=tuple(regions)
    )


def describe_decode(incarnation: str = DECODE, endpoint: bytes = b"1", **fields) -> NodeDescription:
    rank = RankDescription(manifest=manifest(), endpoints=(TransportEndpoint(transport="local", data=endpoint),))
    fields = {"role": Role.DECODE, "geometry": GEOMETRY, "ranks": (pack_rank(rank),)} | fields
    return NodeDescription(instance="decode", node="d0", incarnation=incarnation, **fields)


def welcome_of(incarnation: str = PREFILL, **fields) -> Welcome:
    fields = {"tp_size": 1, "ranks": (R0,), "features": FEATURES} | fields
    return Welcome(instance="prefill", node="p0", incarnation=incarnation, pp_size=1, **fields)


def full_amounts(prompt_tokens: int, prefix_tokens: int = 0) -> Amounts:
    """Return the report of one writer of everything to a decode node of one rank."""
    rows = all_rows(GEOMETRY, Demand(GEOMETRY, [manifest()]), prompt_tokens, prefix_tokens)
    return {kind: Amount(lane_rows=count, bytes=count) for kind, count in rows.items()}


def all_rows(geometry: ModelGeometry, demand: Demand, prompt_tokens: int, prefix_tokens: int = 0) -> LaneRows:
    live = {part.kind: part.live_rows(prompt_tokens, prefix_tokens).count for part in geometry.components}
    return {kind: live[kind] * lanes for kind, lanes in demand.lanes().items()}


def lane_rows(amounts: Amounts) -> dict[ComponentKind, int]:
    return {kind: amount.lane_rows for kind, amount in amounts.items()}


def pick(messages: list[tuple[object, object]], kind: type[MessageT], to: object = None) -> list[MessageT]:
    return [message for whom, message in messages if isinstance(message, kind) and to in {None, whom}]


class RecordedEvents(facts.EventStream):
    def __init__(self) -> None:
        super().__init__()
        self.facts: list[facts.Fact] = []
        self.add_reader({facts.Fact: lambda _now_s, fact: self.facts.append(fact)})

    def of(self, kind: type[MessageT]) -> list[MessageT]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    @property
    def refusals(self) -> Counter[str]:
        return Counter(
            fact.code for fact in self.facts if isinstance(fact, facts.RequestRefused | facts.RoomMessageRefused)
        )

    @property
    def states(self) -> list[RoomState]:
        return [fact.state for fact in self.of(facts.RoomEntered)]

    @property
    def mismatches(self) -> dict[ComponentKind, int]:
        return {fact.component: fact.pages for fact in self.of(facts.PagesDiffer)}

    @property
    def waits(self) -> list[tuple[str, float]]:
        return [(fact.outcome, fact.seconds) for fact in self.of(facts.RequestWaited)]


class Recorder:
    def __init__(self) -> None:
        self.messages: list[tuple[object, object]] = []

    def send(self, to: object, message: PeerMessage | NodeToWorker) -> None:
        self.messages.append((to, message))


class FakeWorkers(Recorder):
    def __init__(self, *ranks: Rank, geometry: ModelGeometry = GEOMETRY) -> None:
        super().__init__()
        self.layers = {rank: tuple(range(geometry.layer_count)) for rank in ranks or (R0,)}
        self.lacking = ""
        self.starting: set[Rank] = set()

    def states(self) -> dict[Rank, WorkerState]:
        return {rank: WorkerState.STARTING if rank in self.starting else WorkerState.READY for rank in self.layers}

    def missing(self) -> str:
        return self.lacking

    def manifests(self) -> tuple[RankManifest, ...]:
        return (manifest(),)


class FakePeers(Recorder):
    def name(self, peer: str) -> str:
        return f"decode/{peer}"

    def transport(self, peer: str, rank: Rank) -> str:
        return "local"


class FakeEngines:
    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.ranks: dict[str, tuple[Rank, ...]] = {}
        """For each that was asked about: one of its own, unless a test says otherwise."""
        self.events: list[engine_messages.RoomEvent] = []

    def push(self, event: engine_messages.RoomEvent) -> None:
        self.events.append(event)

    def ranks_of(self, name: str) -> tuple[Rank, ...]:
        return self.ranks.setdefault(name, (Rank(pp=0, tp=len(self.ranks)),))

    def serving(self) -> dict[str, tuple[Rank, ...]]:
        return {name: self.ranks_of(name) for name in sorted(self.names)}

    @property
    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


class FakeNodes(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[PeerAddress, Welcome | BridgeError] = {}

    def know(self, address: PeerAddress = ADDRESS, peer: str = PREFILL, ranks=(R0,), **fields) -> None:
        fields = {"instance": "prefill", "tp_size": 1, "stage_boundaries": ()} | fields
        stages = len(fields["stage_boundaries"]) + 1
        self.answers[address] = Welcome(incarnation=peer, node=peer[:4], ranks=ranks, pp_size=stages, **fields)

    def known_node(self, address: PeerAddress) -> Welcome | None:
        answer = self.answers.get(address)
        if isinstance(answer, BridgeError):
            raise answer
        return answer


class FakeFence:
    def __init__(self) -> None:
        self.asked: list[Owner] = []
        self.paths: list[tuple[Owner, str, int]] = []
        self.shut_before = 0
        """The epoch before which every endpoint is shut."""

    def ask(self, owner: Owner) -> None:
        if owner not in self.asked:
            self.asked.append(owner)

    def ask_path(self, owner: Owner, transport: str, epoch: int) -> bool:
        self.paths.append((owner, transport, epoch))
        return epoch >= self.shut_before


def run_inspection(work: Callable[[], None], ended: Callable[[BaseException | None], None]) -> None:
    try:
        work()
    except BridgeError as error:
        ended(error)
    else:
        ended(None)


def pages_table(*ids: int, first: int = 0) -> Tables:
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first)}


def pages_in(book: PageBook, state: PageState) -> int:
    return sum(counts[state] for counts in book.counts().values())


@dataclass(frozen=True)
class EngineVerbs:
    """The verbs of engines on the rooms of a node, carried out as its API does. The defaults are those of most tests."""

    rooms: PrefillRooms | DecodeRooms
    ranks: tuple[Rank, ...] = (R0,)

    def _call(
        self, engine: str, ranks: tuple[Rank, ...] | None, message: engine_messages.Call
    ) -> engine_messages.Pages | None:
        return self.rooms.calls[type(message)](AttachedEngine(engine, 0, ranks or self.ranks), message)

    def begin(
        self, engine="engine", ranks=None, room=1, *, prompt_tokens=TOKENS, tables=None, **fields
    ) -> engine_messages.Pages:
        wire = to_wire(tables or {})
        return self._call(
            engine, ranks, engine_messages.Begin(call=1, room=room, prompt_tokens=prompt_tokens, tables=wire, **fields)
        )

    def publish(self, engine="engine", ranks=None, room=1, *, upto_token=TOKENS, layers=None, tables=None, **fields):
        wire = to_wire(tables or {})
        self._call(
            engine,
            ranks,
            engine_messages.Publish(call=1, room=room, upto_token=upto_token, layers=layers, tables=wire, **fields),
        )

    def finish(self, engine="engine", ranks=None, room=1, *, metadata=b"meta", **fields) -> None:
        self._call(engine, ranks, engine_messages.Finish(call=1, room=room, metadata=metadata, **fields))

    def provide(self, room, tables, *, prefix_tokens=0) -> None:
        self._call(
            "", None, engine_messages.Provide(call=1, room=room, tables=to_wire(tables), prefix_tokens=prefix_tokens)
        )

    def claim(self, engine="engine", room=1, page_hashes=b"", **fields) -> Room:
        self.claim_pages(engine, room, page_hashes, **fields)
        return self.rooms.book.used_by(engine, room)

    def claim_pages(self, engine, room, page_hashes=b"", **fields) -> engine_messages.Pages:
        ranks = self.rooms.engines.ranks_of(engine)
        answer = self._call(engine, ranks, engine_messages.Claim(call=1, room=room, page_hashes=page_hashes, **fields))
        assert answer is not None
        return answer

    def loaded(self, engine="engine", room=1, ranks=None, generation=1, **figures) -> None:
        self._call(engine, ranks, engine_messages.Loaded(call=1, room=room, generation=generation, **figures))

    def extend(self, engine, room, tokens) -> Tables:
        self._call(engine, None, engine_messages.Extend(call=1, room=room, tokens=tokens))
        return self.rooms.book.used_by(engine, room).tables

    def release(self, engine="engine", room=1, generation=0, ranks=None, **answer) -> None:
        self._call(engine, ranks, engine_messages.Release(call=1, room=room, generation=generation, **answer))

    def abort(self, engine="engine", room=1, reason="enough", **fields) -> None:
        self._call(engine, None, engine_messages.AbortRoom(call=1, room=room, reason=reason, **fields))

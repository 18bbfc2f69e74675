"""Nodes and daemons to pair, without sockets."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Self

from redis.asyncio import Redis

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.nodes import Instance, NodeEntry, NodeRecord, by_instance
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.redis_store import RedisStore, redis_client
from kvbridge.bootstrap.store import MemoryStore, RoomTimes
from kvbridge.config.limits import BootstrapTimeouts
from kvbridge.config.schema import PairingConfig
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, CapacityError, StaleError, UnknownRoomError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import Rank, Role
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.session.tables import RoomState
from kvbridge.telemetry.metrics import STORE_FAILED, MetricSpec
from tests.helpers.manual_clock import ManualClock
from tests.helpers.redis_server import RedisServer, let_time_pass

EXPIRE_AFTER_S = 80.0
"""Redis has a clock of its own: what is to be alive is so with seconds to spare."""
TIMES = RoomTimes(claim_s=30.0, keep_s=600.0, max_rooms=100)
LIMITS = {"config": PairingConfig(), "timeouts": BootstrapTimeouts()}


def url_of(name: str) -> str:
    """Return where a node of that name is reached: not all of a name may be in a URL."""
    return "http://" + re.sub("[^A-Za-z0-9_.-]", "-", name)


def node(name: str, role: Role, *, model: str = "tiny-v4", free: int = 100, **changes) -> NodeRegistration:
    """One node that is a whole instance called `name`, with pools of 100 pages."""
    geometry = preset(model)
    spaces = ("full", "swa", "request") if role is Role.PREFILL else ("full", "swa", "request", "host")
    values = {
        "instance": name,
        "node": "node-0",
        "role": role,
        "incarnation": f"{name}-incarnation-1",
        "http_url": url_of(name),
        "control": PeerAddress(endpoint=f"tcp://{name}:1"),
        "pp_size": 1,
        "tp_size": 1,
        "ranks": (Rank(pp=0, tp=0),),
        "fingerprint": fingerprint(geometry),
        "geometry": geometry,
        "load": Load(available_pages=dict.fromkeys(spaces, free), total_pages=dict.fromkeys(spaces, 100)),
    }
    return NodeRegistration(**{**values, **changes})


def half(name: str, role: Role, number: int, **changes) -> NodeRegistration:
    """One node of a two-node instance, tensor-parallel rank `number`."""
    own = {
        "node": f"node-{number}",
        "tp_size": 2,
        "ranks": (Rank(pp=0, tp=number),),
        "incarnation": f"{name}-{number}-incarnation-1",
        "http_url": url_of(f"{name}-{number}"),
        "control": PeerAddress(endpoint=f"tcp://{name}-{number}:1"),
    }
    return node(name, role, **{**own, **changes})


def beat(incarnation: str, **changes) -> NodeHeartbeat:
    return NodeHeartbeat(**{"incarnation": incarnation, "ready": True, **changes})


def loaded(free: int = 100, rooms: int = 0, kept_s: float | None = None) -> Load:
    """The load of a node with so many free pages of 100 in each pool."""
    totals = dict.fromkeys(("full", "swa", "request", "host"), 100)
    pages = {"available_pages": dict.fromkeys(totals, free), "total_pages": totals}
    return Load(rooms=rooms, prefixes_kept_s=kept_s, **pages)


def entry_of(registration: NodeRegistration) -> NodeEntry:
    return NodeEntry(registration=registration)


def instances_of(*registrations: NodeRegistration) -> tuple[Instance, ...]:
    """The instances that nodes make up, without a store."""
    records = (NodeRecord(entry, entry.beat, 0.0) for entry in map(entry_of, registrations))
    return by_instance(records)


FLEET = (
    node("p1", Role.PREFILL, free=90),
    node("p2", Role.PREFILL, free=80),
    node("d1", Role.DECODE, free=90),
    node("d2", Role.DECODE, free=80),
)


class World:
    """A store, and what it takes to make time pass in it. `replica` is another user of the same store."""

    store: MemoryStore | RedisStore

    async def directory(self, *registrations: NodeRegistration, daemons: FakeDaemons | None = None) -> Directory:
        directory = Directory(self.store, daemons or FakeDaemons(), probe_s=5.0)
        for registration in registrations:
            await directory.register(registration)
        return directory

    async def pairing(
        self, port: FakeDaemons, *fleet: NodeRegistration, clock: Clock = monotonic, **limits: float
    ) -> PairingService:
        # Not validated: a test may have a limit that is shorter than any that makes sense.
        changed = {
            name: section.model_copy(
                update={key: value for key, value in limits.items() if key in type(section).model_fields}
            )
            for name, section in LIMITS.items()
        }
        return PairingService(await self.directory(*(fleet or FLEET)), self.store, port, clock=clock, **changed)

    def advance(self, seconds: float) -> None:
        raise NotImplementedError


class MemoryFleet(World):
    """The default: the store of one process, on a clock of the test's own."""

    def __init__(self, times: RoomTimes = TIMES) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(expire_after_s=EXPIRE_AFTER_S, rooms=times, clock=self.clock)

    def limit(self, times: RoomTimes) -> None:
        self.store = MemoryStore(expire_after_s=EXPIRE_AFTER_S, rooms=times, clock=self.clock)

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)


class RedisFleet(World):
    """A namespace of a real Redis, and any number of replicas over it."""

    def __init__(self, server: RedisServer, namespace: str) -> None:
        self.server = server
        self.namespace = namespace
        self.counted: Counter[str] = Counter()
        self.times = TIMES
        self._opened: list[RedisStore] = []
        self.store = self.replica()

    def replica(self, *, timeout_s: float = 5.0) -> RedisStore:
        """Another store over the same keys, as another process would have it."""
        return self.over(redis_client(self.server.url, timeout_s=timeout_s), timeout_s=timeout_s)

    def over(self, client: Redis, *, timeout_s: float = 5.0) -> RedisStore:
        limits = {"expire_after_s": EXPIRE_AFTER_S, "rooms": self.times, "timeout_s": timeout_s}
        self._opened.append(RedisStore(client, namespace=self.namespace, metrics=self, **limits))
        return self._opened[-1]

    def limit(self, times: RoomTimes) -> None:
        self.times = times
        self.store = self.replica()

    def advance(self, seconds: float) -> None:
        with self.server.client() as client:
            let_time_pass(client, self.namespace, seconds)

    def count(self, metric: MetricSpec, reason: str) -> None:
        """Count what the store says, as its metrics would."""
        self.counted[f"{'call' if metric is STORE_FAILED else 'value'} {reason}"] += 1

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for store in self._opened:
            await store.close()


class FakeDaemons:
    """All daemons at once: admits what it is not told to refuse, and keeps a log of calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, int]] = []
        self.admitted: dict[str, dict[int, AdmissionRequest]] = {}
        self.refuse: dict[str, BridgeError] = {}
        self.full: set[str] = set()
        """Daemons that have pages only for those who wait for them."""
        self.hang: set[str] = set()
        self.misreports: dict[str, dict[str, object]] = {}
        """These daemons report something else than they have admitted."""
        self.lives: dict[str, str] = {}
        """The incarnations that answer; nobody does elsewhere."""
        self.asked: list[str] = []
        """Where it was asked who is there."""
        self.late: set[str] = set()
        """Daemons that admit but whose answer is lost."""
        self.cancel_gate: asyncio.Event | None = None
        """Cancels wait for it."""
        self.cancel_errors: dict[str, BridgeError] = {}
        self.takes_s: dict[str, float] = {}
        """How long an admission takes, on `clock`."""
        self.clock = ManualClock()
        self.pauses: dict[str, asyncio.Event] = {}
        """Admissions by these daemons wait before they answer."""
        self.stuck = asyncio.Event()
        """Set once a call hangs."""

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        self.calls.append(("admit", url, request.generation))
        self.clock.advance(self.takes_s.get(url, 0.0))
        if url in self.refuse:
            raise self.refuse[url]
        if url in self.full and not request.wait_s:
            raise CapacityError("full now", retry_after_s=3.0)
        if url not in self.hang:
            self.admitted.setdefault(url, {})[request.room] = request
        if url in self.hang or url in self.late:
            self.stuck.set()
            await asyncio.Event().wait()
        report = self._report(url, request.room)
        if url in self.pauses:
            self.stuck.set()
            await self.pauses[url].wait()
        return report.model_copy(update=self.misreports.get(url, {}))

    async def incarnation(self, url: str) -> str:
        self.asked.append(url)
        if url in self.hang:
            await asyncio.Event().wait()
        if url in self.refuse:
            raise self.refuse[url]
        return self.lives.get(url, "")

    async def report(self, url: str, room: int) -> RoomReport:
        return self._report(url, room)

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        self.calls.append(("cancel", url, generation))
        if self.cancel_gate is not None:
            self.stuck.set()
            await self.cancel_gate.wait()
        if url in self.cancel_errors:
            raise self.cancel_errors[url]
        report = self._report(url, room)
        if report.generation != generation:
            raise StaleError("another generation")
        del self.admitted[url][room]
        return report.model_copy(update={"state": RoomState.ABORTED, "reason": reason})

    def rooms(self) -> dict[str, list[int]]:
        return {url: list(rooms) for url, rooms in self.admitted.items() if rooms}

    def generations(self) -> set[tuple[str, int, int]]:
        """Return daemon, room and generation of each reservation."""
        return {(url, room, one.generation) for url, rooms in self.admitted.items() for room, one in rooms.items()}

    def _report(self, url: str, room: int) -> RoomReport:
        request = self.admitted.get(url, {}).get(room)
        if request is None:
            raise UnknownRoomError(f"no room {room} at {url}")
        role = Role.DECODE if request.prefill else Role.PREFILL
        known = {"generation": request.generation, "prompt_tokens": request.prompt_tokens}
        return RoomReport(room=room, role=role, state=RoomState.ADMITTED, **known)

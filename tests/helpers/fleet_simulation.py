"""A large fleet on virtual time: the real pairing, directory, store and fit over daemons that are numbers.

A prefill instance computes prompts one after another and has their pages until each is sent; a decode instance has the pages of a
request from its admission to its last token. Daemons refuse what they have no pages for, tell of their pools as real ones do
(`Announcer`: at an interval, and of changes that matter after a pause), die without a word, and are drained and started again in
turn. Nothing waits for real time, so a run is the same each time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvbridge.api.directory import Load, NodeHeartbeat, NodeRegistration, NodeView, PairRequest, Registered
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.fit import demand
from kvbridge.bootstrap.nodes import Instance, NodeKey
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.stores.base import RoomTimes
from kvbridge.bootstrap.stores.memory import MemoryStore
from kvbridge.cli.trace import TraceRequest
from kvbridge.config.schema import PairingConfig
from kvbridge.config.timeouts import BootstrapTimeouts
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import CapacityError, NotReadyError, PeerError, UnknownRoomError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import Rank, Role
from kvbridge.core.session.states import RoomState
from kvbridge.daemon.announce import CHANGE_PAUSE_S, is_significant
from tests.helpers.manual_clock import ManualClock

EXPIRE_AFTER_S, BEAT_S, SWEEP_S = 8.0, 2.0, 1.0
TIMES = RoomTimes(claim_s=30.0, keep_s=60.0, max_rooms=100_000)
GEOMETRY = preset("deepseek-v4-flash")
FINGERPRINT = fingerprint(GEOMETRY)
BEST = 8
"""Instances of each role that somebody who looks at all of them hands over."""


@dataclass(frozen=True)
class Fleet:
    """What is simulated."""

    instances: int
    """Half of them prefill."""
    pages: int = 640
    """Of 256 tokens, on each instance."""
    prefill_tokens_s: float = 20_000.0
    token_s: float = 0.025
    """Between two tokens of an answer."""
    dies_each_s: float = 0.0
    """One instance dies so often, and is started again after `down_s`."""
    drained_each_s: float = 0.0
    """So often the next instance is drained, and started again when its rooms have ended."""
    down_s: float = 15.0
    fresh: bool = False
    """Every change is told at once."""
    seed: int = 1


@dataclass(eq=False)
class Daemon:
    """One instance of one node."""

    registration: NodeRegistration
    pages: int
    free: int = 0
    rooms: dict[int, int] = field(default_factory=dict)
    """Pages of each room."""
    life: int = 0
    """Counts its starts; what was scheduled in an earlier one does not happen."""
    up: bool = True
    ready: bool = True
    computes_until_s: float = 0.0
    told: Load = field(default_factory=Load)
    told_s: float = 0.0
    due_s: float = 0.0
    """When it tells of itself next."""

    @property
    def role(self) -> Role:
        return self.registration.role

    @property
    def load(self) -> Load:
        return Load(rooms=len(self.rooms), available_pages={"full": self.free}, total_pages={"full": self.pages})

    @property
    def incarnation(self) -> str:
        return f"{self.registration.instance}-{self.life}"

    @property
    def entry(self) -> NodeRegistration:
        return self.registration.model_copy(
            update={"incarnation": self.incarnation, "load": self.load, "ready": self.ready}
        )


@dataclass
class Outcome:
    """What became of the requests."""

    paired: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By reason: `full` when no instance of one role had place, `needless` when a pair had."""
    in_vain: int = 0
    """Daemons that were asked and refused."""
    lost: int = 0
    """Rooms that died with an instance."""
    waits_s: list[float] = field(default_factory=list)
    """How long each prompt waited for its prefill instance to begin with it."""
    used: dict[Role, list[tuple[float, float, float]]] = field(default_factory=lambda: {role: [] for role in Role})
    """Each second: mean share of pages in use, its standard deviation over instances, and the largest."""
    beats: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, float]:
        """The figures of one run."""
        asked = self.paired + self.refused.total()
        waits = sorted(self.waits_s)
        found = {
            "requests": asked,
            "refused_full": self.refused["full"] / asked,
            "refused_needlessly": self.refused["needless"] / asked,
            "asked_in_vain": self.in_vain / asked,
            "lost": self.lost / asked,
            "wait_mean_s": statistics.fmean(waits),
            "wait_median_s": statistics.median(waits),
            "wait_p99_s": waits[int(len(waits) * 0.99)],
            "beats_s": self.beats / self.seconds,
        }
        for role, seen in self.used.items():
            mean, deviation, largest = (statistics.fmean(column) for column in zip(*seen, strict=True))
            found |= {f"{role}_used": mean, f"{role}_deviation": deviation, f"{role}_largest": largest}
        return found


class AllSeeing(Directory):
    """Keeps what every instance said and was charged since, and hands over the best of each role of all that are ready."""

    def __init__(self, store: MemoryStore, daemons: Simulation, *, chance: random.Random) -> None:
        super().__init__(store, daemons, chance=chance)
        self._free: dict[Role, dict[str, int]] = {role: {} for role in Role}

    async def heartbeat(self, instance: str, node: str, heartbeat: NodeHeartbeat) -> NodeView:
        self._hear(instance, heartbeat)
        return await super().heartbeat(instance, node, heartbeat)

    async def register(self, registration: NodeRegistration) -> Registered:
        self._hear(registration.instance, registration.heartbeat)
        return await super().register(registration)

    def _hear(self, instance: str, heartbeat: NodeHeartbeat) -> None:
        free = self._free[Role(instance.split("-", maxsplit=1)[0])]
        free.pop(instance, None)
        if heartbeat.ready:
            free[instance] = heartbeat.load.available_pages["full"]

    async def expire(self) -> tuple[NodeKey, ...]:
        gone = await super().expire()
        for free in self._free.values():
            for instance, _ in gone:
                free.pop(instance, None)
        return gone

    async def charge(self, pages: Iterable[tuple[Instance, Mapping[str, int]]]) -> None:
        pages = list(pages)
        for instance, counts in pages:
            self._free[instance.role][instance.name] -= counts["full"]
        await super().charge(pages)

    async def draw(self, count: int, fingerprint: str = "", names: Iterable[str] = ()) -> tuple[Instance, ...]:
        best = (heapq.nlargest(BEST, free, key=free.__getitem__) for free in self._free.values())
        return await super().draw(0, names=list(itertools.chain(*best)))


class Simulation:
    """One run; it is also every daemon that bootstrap can ask."""

    def __init__(self, fleet: Fleet, *, all_seeing: bool = False) -> None:
        self.fleet = fleet
        self.clock = ManualClock()
        self.outcome = Outcome()
        self._chance = random.Random(fleet.seed)
        store = MemoryStore(expire_after_s=EXPIRE_AFTER_S, rooms=TIMES, clock=self.clock)
        self.directory = (AllSeeing if all_seeing else Directory)(store, self, chance=random.Random(fleet.seed))
        self.service = PairingService(
            self.directory, store, self, config=PairingConfig(), timeouts=BootstrapTimeouts(), clock=self.clock
        )
        self.daemons = {one.registration.http_url: one for one in map(self._daemon, range(fleet.instances))}
        self._events: list[tuple[float, int, str, Daemon | None, object]] = []
        self._order = itertools.count()
        self._turn = itertools.cycle(self.daemons.values())

    def _daemon(self, number: int) -> Daemon:
        role = (Role.PREFILL, Role.DECODE)[number % 2]
        name = f"{role}-{number}"
        registration = NodeRegistration(
            instance=name,
            node="node-0",
            role=role,
            incarnation=f"{name}-0",
            http_url=f"http://{name}",
            control=PeerAddress(endpoint=f"tcp://{name}:1"),
            pp_size=1,
            tp_size=1,
            ranks=(Rank(pp=0, tp=0),),
            fingerprint=FINGERPRINT,
            geometry=GEOMETRY,
        )
        return Daemon(registration, self.fleet.pages, free=self.fleet.pages)

    # --------------------------------------------------------------------------------- events

    async def run(self, requests: Iterable[tuple[float, TraceRequest]]) -> Outcome:
        """Lead the fleet through requests, (when, what) in order, and through what happens meanwhile."""
        for one in self.daemons.values():
            await self.directory.register(one.entry)
            self._beat_at(one, self._chance.random() * BEAT_S)
        self._at(SWEEP_S, "sweep")
        self._at(1.0, "look")
        for each_s, kind in ((self.fleet.dies_each_s, "die"), (self.fleet.drained_each_s, "drain")):
            if each_s:
                self._at(each_s, kind)
        for when_s, request in requests:
            await self._until(when_s)
            await self._pair(request)
        self.outcome.seconds = self.clock.now_s
        return self.outcome

    def _at(self, when_s: float, kind: str, daemon: Daemon | None = None, what: object = None) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), kind, daemon, what))

    async def _until(self, when_s: float) -> None:
        while self._events and self._events[0][0] <= when_s:
            at_s, _, kind, daemon, what = heapq.heappop(self._events)
            self.clock.now_s = at_s
            await getattr(self, f"_on_{kind}")(daemon, what)
        self.clock.now_s = when_s

    async def _pair(self, request: TraceRequest) -> None:
        lengths = {"prompt_tokens": request.input_length, "max_new_tokens": request.output_length}
        asked = PairRequest(room=next(self._order), **lengths)
        try:
            ticket = await self.service.pair(asked)
        except CapacityError:
            self.outcome.refused["needless" if self._place(asked) else "full"] += 1
        else:
            self.outcome.paired += 1
            self._begin(self.daemons[ticket.prefill.http_urls[0]], self.daemons[ticket.decode.http_urls[0]], asked)

    def _begin(self, prefill: Daemon, decode: Daemon, asked: PairRequest) -> None:
        now_s = self.clock.now_s
        begins_s = max(now_s, prefill.computes_until_s)
        self.outcome.waits_s.append(begins_s - now_s)
        prefill.computes_until_s = begins_s + asked.prompt_tokens / self.fleet.prefill_tokens_s
        ends_s = prefill.computes_until_s + asked.max_new_tokens * self.fleet.token_s
        for one, at_s in ((prefill, prefill.computes_until_s), (decode, ends_s)):
            self._at(at_s, "end", one, (one.life, asked.room))

    def _place(self, asked: PairRequest) -> bool:
        """Whether a pair had place for a request."""
        return all(
            any(
                one.up and one.ready and one.free >= demand(one.registration, asked)["full"]
                for one in self.daemons.values()
                if one.role is role
            )
            for role in Role
        )

    async def _on_end(self, daemon: Daemon, what: tuple[int, int]) -> None:
        life, room = what
        if life == daemon.life and daemon.up:
            daemon.free += daemon.rooms.pop(room)
            await self._changed(daemon)

    # --------------------------------------------------------------------------------- heartbeats

    def _beat_at(self, daemon: Daemon, when_s: float) -> None:
        daemon.due_s = when_s
        self._at(when_s, "beat", daemon, (daemon.life, when_s))

    async def _on_beat(self, daemon: Daemon, what: tuple[int, float]) -> None:
        if what == (daemon.life, daemon.due_s) and daemon.up:
            await self._tell(daemon)
            self._beat_at(daemon, self.clock.now_s + BEAT_S)

    async def _tell(self, daemon: Daemon) -> None:
        daemon.told, daemon.told_s = daemon.load, self.clock.now_s
        beat = NodeHeartbeat(incarnation=daemon.incarnation, ready=daemon.ready, load=daemon.told)
        await self.directory.heartbeat(daemon.registration.instance, "node-0", beat)
        self.outcome.beats += 1

    async def _changed(self, daemon: Daemon) -> None:
        if self.fleet.fresh:
            await self._tell(daemon)
        elif is_significant(daemon.told, daemon.load):
            soon_s = max(self.clock.now_s, daemon.told_s + CHANGE_PAUSE_S)
            if soon_s < daemon.due_s:
                self._beat_at(daemon, soon_s)

    async def _on_sweep(self, _daemon: None, _what: object) -> None:
        await self.directory.expire()
        await self.directory.instances()  # for the overview
        self._at(self.clock.now_s + SWEEP_S, "sweep")

    async def _on_look(self, _daemon: None, _what: object) -> None:
        for role, seen in self.outcome.used.items():
            used = [1 - one.free / one.pages for one in self.daemons.values() if one.role is role and one.up]
            seen.append((statistics.fmean(used), statistics.pstdev(used), max(used)))
        self._at(self.clock.now_s + 1.0, "look")

    # --------------------------------------------------------------------------------- ends and starts

    async def _on_die(self, _daemon: None, _what: object) -> None:
        victim = self._chance.choice([one for one in self.daemons.values() if one.up])
        self._stop(victim)
        self._at(self.clock.now_s + self.fleet.down_s, "start", victim, victim.life)
        self._at(self.clock.now_s + self.fleet.dies_each_s, "die")

    async def _on_drain(self, _daemon: None, _what: object) -> None:
        victim = next(self._turn)
        if victim.up and victim.ready:
            victim.ready = False
            await self._tell(victim)
            self._at(self.clock.now_s + 1.0, "drained", victim, victim.life)
        self._at(self.clock.now_s + self.fleet.drained_each_s, "drain")

    async def _on_drained(self, daemon: Daemon, life: int) -> None:
        if daemon.life != life or not daemon.up:
            return
        if daemon.rooms:
            self._at(self.clock.now_s + 1.0, "drained", daemon, life)
            return
        self._stop(daemon)
        await self._on_start(daemon, life)

    def _stop(self, daemon: Daemon) -> None:
        self.outcome.lost += len(daemon.rooms)
        daemon.up, daemon.free, daemon.rooms, daemon.computes_until_s = False, daemon.pages, {}, 0.0

    async def _on_start(self, daemon: Daemon, life: int) -> None:
        if daemon.life == life:
            daemon.life, daemon.up, daemon.ready = life + 1, True, True
            daemon.told, daemon.told_s = daemon.load, self.clock.now_s
            await self.directory.register(daemon.entry)
            self._beat_at(daemon, self.clock.now_s + BEAT_S)

    # --------------------------------------------------------------------------------- what bootstrap asks

    async def admit(self, url: str, request: AdmissionRequest) -> RoomReport:
        """See ReservePort."""
        daemon, room = self.daemons[url], request.room or 0
        new = request.max_new_tokens if daemon.role is Role.DECODE else 0
        asked = PairRequest(prompt_tokens=request.prompt_tokens, max_new_tokens=new)
        needed = demand(daemon.registration, asked)["full"]
        if (refusal := _refusal(daemon, needed)) is not None:
            self.outcome.in_vain += 1
            if self.fleet.fresh and daemon.up:
                await self._tell(daemon)
            raise refusal
        daemon.free -= needed
        daemon.rooms[room] = needed
        await self._changed(daemon)
        return _report(daemon, room, request.generation, request.prompt_tokens)

    async def cancel(self, url: str, room: int, reason: str, *, generation: int) -> RoomReport:
        """See ReservePort: when decode refused, prefill is given back."""
        daemon = self.daemons[url]
        if room not in daemon.rooms:
            raise UnknownRoomError("refused before")
        await self._on_end(daemon, (daemon.life, room))
        return _report(daemon, room, generation, 1)

    async def report(self, url: str, room: int) -> RoomReport:
        """See ReservePort."""
        raise NotImplementedError

    async def incarnation(self, url: str) -> str:
        """See DaemonsPort: whoever holds a name that is registered again is gone."""
        return ""


def _refusal(daemon: Daemon, needed: int) -> Exception | None:
    if not daemon.up:
        return PeerError("nobody listens")
    if not daemon.ready:
        return NotReadyError("is being drained")
    return CapacityError(f"{daemon.free} of {needed} pages are free") if daemon.free < needed else None


def _report(daemon: Daemon, room: int, generation: int, prompt_tokens: int) -> RoomReport:
    return RoomReport(
        room=room, generation=generation, role=daemon.role, state=RoomState.ADMITTED, prompt_tokens=prompt_tokens
    )

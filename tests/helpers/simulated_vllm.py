"""vLLM's scheduler and worker as a model around our connector's two halves, with the assertions by which vLLM dies."""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.kit.transfers import ServedRole, StepMetadata, prompt_digest
from kvbridge.engine.vllm.decode_rooms import DecodeRooms
from kvbridge.engine.vllm.prefill_rooms import PrefillRooms
from kvbridge.engine.vllm.processes import Scheduler
from kvbridge.engine.vllm.requests import Request
from tests.helpers.vllm_links import instance

MOST_RUNNING = 3
TO_GENERATE = 2


class Status(Enum):
    WAITING = auto()
    LOADING = auto()
    """WAITING_FOR_REMOTE_KVS."""
    LOADED = auto()
    RUNNING = auto()
    FINISHED = auto()
    """Over, and its blocks are not free: they are being sent, or are still being filled."""


@dataclass
class Job:
    request: Request
    tokens: Sequence[int]
    labels: list[Hashable]
    """Label of each block of its prompt. Other requests find whole blocks by their labels."""
    whole: int
    """Number of whole blocks."""
    status: Status = Status.WAITING
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    in_flight: int = 0
    """Computed blocks with output that the scheduler has not read."""
    preempted: bool = False
    failed: bool = False
    to_generate: int = TO_GENERATE


def job(name: str, tokens: Sequence[int], block: int, params: dict | None) -> Job:
    """A request for a prompt whose blocks hold one token each, again and again."""
    request = Request(name, len(tokens), prompt_digest(tokens), params)
    ends = [min(start + block, len(tokens)) for start in range(0, len(tokens), block)]
    return Job(request, tokens, [(*tokens[:end:block], end) for end in ends], len(tokens) // block)


@dataclass
class Memory:
    """The blocks of an engine as its processor and the transfers see them."""

    write: Callable[[int, Hashable], None]
    wrong: Callable[[Sequence[int], Sequence[Hashable]], str]
    in_use: Callable[[], set[int]]
    """Blocks that transfers may still read or write."""


class Pins:
    """References to blocks beside those of requests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.pinned: Counter[int] = Counter()

    def pin(self, blocks: Sequence[int]) -> None:
        assert all(self.engine.readers[one] for one in blocks), "blocks are pinned that nobody has"
        self.engine.readers.update(blocks)
        self.pinned.update(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        self.pinned.subtract(blocks)
        assert min(self.pinned.values()) >= 0, "blocks are unpinned that were not pinned"
        self.engine.drop(blocks, "pins")


class Engine:
    """One vLLM instance: scheduler, and as many workers as it has ranks. Worker 0 hears the node."""

    def __init__(
        self,
        rooms: PrefillRooms | DecodeRooms,
        ranks: int,
        blocks: int,
        block: int,
        memory: Memory,
        *,
        recompute: bool,
        caches: bool = True,
    ) -> None:
        self.rooms = rooms
        self.scheduler = Scheduler(instance(rooms.role, block_tokens=block, tp_size=ranks), rooms._stats, rooms._guard)
        if isinstance(rooms, PrefillRooms):
            self.scheduler.prefill = rooms
        else:
            self.scheduler.decode = rooms
        self.reports = ServedRole(rooms.role, lambda: None)
        self.closed: list[list[str]] = [[] for _ in range(ranks)]
        """Incarnations of nodes that each worker has yet to report as closed."""
        self.block = block
        self.count = blocks
        self.memory = memory
        self.recompute = recompute
        self.requests: dict[str, Job] = {}
        self.queue: list[str] = []
        self.running: list[str] = []
        self.scheduled: list[str] = []
        self.preempted: set[str] = set()
        self.caches = caches
        """Whether blocks of one request are found by others."""
        self.reads_late = False
        """Whether a step is built before the output of the one before is read."""
        self.readers: Counter[int] = Counter()
        self.pins = Pins(self)
        if self.scheduler.prefill is not None:
            self.scheduler.prefill.pins = self.pins
        self.known: dict[Hashable, int] = {}
        self.events: deque[RoomEvent] = deque()
        self.answers: list[tuple[Job, dict]] = []
        self.seen = Counter()
        """Counts of events, to test that this test does something."""

    def unused(self) -> list[int]:
        known = set(self.known.values())
        return sorted((one for one in range(1, 1 + self.count) if not self.readers[one]), key=lambda one: one in known)

    def take(self, count: int) -> list[int]:
        fresh = self.unused()[:count]
        assert len(fresh) == count
        busy = self.memory.in_use() & set(fresh)
        assert not busy, f"blocks {busy} are given to another request while a transfer uses them"
        self.known = {label: one for label, one in self.known.items() if one not in fresh}
        self.readers.update(fresh)
        return fresh

    def free(self, job: Job) -> None:
        self.drop(job.blocks, job.request.id)
        job.blocks = []

    def drop(self, blocks: Sequence[int], whose: str) -> None:
        self.readers.subtract(blocks)
        assert min(self.readers.values(), default=0) >= 0
        busy = self.memory.in_use() & {one for one in blocks if not self.readers[one]}
        assert not busy, f"blocks {busy} of {whose} are freed while a transfer uses them"

    def know(self, job: Job) -> None:
        if not self.caches:
            return
        for label, one in zip(job.labels[: min(job.computed, job.whole)], job.blocks, strict=False):
            self.known.setdefault(label, one)

    def add(self, job: Job) -> None:
        self.requests[job.request.id] = job
        self.queue.append(job.request.id)
        self.scheduler.arrived(job.request)

    def abort(self, name: str) -> None:
        if self.requests[name].status is not Status.FINISHED:
            self.seen[f"aborted {self.requests[name].status.name}"] += 1
            self.finish(name, well=False)

    def step(self) -> None:
        self.schedule()
        if self.scheduler.prefill is not None:
            self.tell_computed(self.scheduler.prefill)
        self.preempted.clear()
        metadata = pickle.loads(pickle.dumps(self.scheduler.step())).get(self.rooms.role, StepMetadata())
        self.reports.heard(self.events)  # which may be of rooms that it has not been told of yet
        self.events.clear()
        self.reports.start(metadata)
        self.forward()
        self.update(*self.reports.results())
        for rank, closed in enumerate(self.closed):
            self.scheduler.closed(rank, self.rooms.role, closed)
            closed.clear()
        self.rooms.look()
        self.check()

    def tell_computed(self, rooms: PrefillRooms) -> None:
        rooms.preempted(frozenset(self.preempted))
        for name in rooms.computing:
            if name not in self.scheduled:
                continue
            job = self.requests[name]
            done = min(job.computed * self.block, job.request.tokens)
            known = min((job.computed - job.in_flight) * self.block, job.request.tokens)
            rooms.computed(name, done, done - known, (job.blocks,))

    def schedule(self) -> None:
        self.scheduled = []
        for name in list(self.running):
            if name not in self.running:
                continue
            if not self.grow(name):
                break
            self.scheduled.append(name)
        if self.preempted:
            return
        full = False
        for name in list(self.queue):
            job = self.requests[name]
            if job.status is Status.LOADED:
                self.resume(name, job)
            if job.status is Status.WAITING and not full:
                full = len(self.running) >= MOST_RUNNING or not self.admit(name, job)

    def grow(self, name: str) -> bool:
        """One block more for the next chunk, or for each token that it generates; the last request makes place."""
        job = self.requests[name]
        generated = TO_GENERATE - job.to_generate if job.computed == len(job.labels) else 0
        if len(job.blocks) > job.computed + generated:
            return True
        while not self.unused():
            gone = {one for one, other in self.requests.items() if other.preempted}
            if self.scheduler.prefill is not None and self.scheduler.prefill.blocks_return(gone):
                self.seen["waited for pins"] += 1
                return False
            victim = self.running[-1]
            self.preempt(victim)
            if victim == name:
                return False
        job.blocks += self.take(1)
        return True

    def preempt(self, name: str) -> None:
        self.seen["preempted"] += 1
        gone = self.requests[name]
        self.seen["preempted with pins"] += any(self.pins.pinned[one] for one in gone.blocks)
        self.running.remove(name)
        if name in self.scheduled:
            self.scheduled.remove(name)
        self.free(gone)
        gone.status, gone.computed, gone.in_flight, gone.preempted = Status.WAITING, 0, 0, True
        self.preempted.add(name)
        self.queue.insert(0, name)

    def admit(self, name: str, job: Job) -> bool:
        hits = []
        for label in job.labels[: (job.request.tokens - 1) // self.block]:
            if label not in self.known:
                break
            hits.append(self.known[label])
        local = len(hits) * self.block
        decode = self.scheduler.decode
        external = 0 if decode is None else decode.matched_tokens(job.request, local)
        assert decode is None or external == decode.matched_tokens(job.request, local)
        fresh = len(job.labels) - len(hits) if external else 1
        if len([one for one in self.unused() if one not in hits]) < fresh:
            return False
        self.readers.update(hits)
        job.blocks, job.computed = hits + self.take(fresh), len(hits)
        self.seen["prefix hits"] += bool(hits)
        # Lookahead: there may be a block behind the prompt's.
        spare = [self.take(1)[0]] if external and len(self.unused()) > 1 else []
        job.blocks += spare
        if decode is not None:
            decode.allocated(job.request, (job.blocks,), external)
        if external:
            assert external == job.request.tokens - local
            job.status = Status.LOADING
            self.seen["loads"] += 1
            self.seen["loads behind hits"] += bool(hits)
        else:
            self.run(name, job)
        return True

    def run(self, name: str, job: Job) -> None:
        self.queue.remove(name)
        self.running.append(name)
        self.scheduled.append(name)
        job.status, job.preempted = Status.RUNNING, False

    def resume(self, name: str, job: Job) -> None:
        if job.failed:
            self.free(job)
            job.status, job.computed, job.failed = Status.WAITING, 0, False
            return
        job.computed = len(job.labels)
        self.rooms.allocated(job.request, (job.blocks,), 0)  # only decode loads
        self.know(job)
        self.run(name, job)

    def forward(self) -> None:
        for name in self.scheduled:
            job = self.requests[name]
            job.in_flight = 0
            if job.computed < len(job.labels):
                job.in_flight = int(self.reads_late)
                self.memory.write(job.blocks[job.computed], job.labels[job.computed])
                job.computed += 1
                self.know(job)
            else:
                job.to_generate -= 1

    def update(self, sent: set[str], received: set[str], failed: set[str]) -> None:
        for name in [one for one in self.scheduled if one in self.running]:
            job = self.requests[name]
            done = job.computed == len(job.labels)
            if done and (job.request.is_for_another or job.to_generate <= 0):
                self.finish(name, well=True)
        assert failed <= received, "a load is called failed that is not over"
        for name in sorted(failed):
            if self.requests[name].status is Status.LOADING and not self.recompute:
                self.seen["failed by policy"] += 1
                self.finish(name, well=False)
        for name in sorted(received):
            self.received(name, name in failed)
        for name in sorted(sent):
            assert name in self.requests, f"{name} is reported as sent, and unknown"
            job = self.requests[name]
            assert job.status is Status.FINISHED
            assert job.request.is_for_another
            self.free(self.requests.pop(name))
        self.scheduler.reported(received, sent)

    def received(self, name: str, failed: bool) -> None:
        assert name in self.requests, f"{name} is reported as received, and unknown"
        job = self.requests[name]
        if job.status is Status.FINISHED:
            self.free(self.requests.pop(name))
            return
        assert job.status is Status.LOADING, f"{name} is reported as received, and {job.status.name}"
        job.status, job.failed = Status.LOADED, failed
        if failed:
            self.seen["failed loads"] += 1
        else:
            self.seen["good loads"] += 1
            wrong = self.memory.wrong(job.blocks, job.labels)
            assert not wrong, f"{name} is loaded, and {wrong}"

    def finish(self, name: str, *, well: bool) -> None:
        job = self.requests[name]
        loading = job.status is Status.LOADING
        blocks = job.blocks[: job.computed]
        delayed, params = self.scheduler.finished(job.request, (blocks,), well=well)
        for names in (self.queue, self.running):
            if name in names:
                names.remove(name)
        job.status = Status.FINISHED
        if params is not None:
            self.answers.append((job, params))
        assert not (loading and delayed), "sent and received would both be waited for"
        if not (loading or delayed):
            self.free(self.requests.pop(name))

    def check(self) -> None:
        """Check that computed and loaded blocks hold their content until they are freed, and known blocks that of their labels."""
        if any(job.status is Status.LOADING for job in self.requests.values()):
            assert not self.rooms.idle, "a load is under way, and steps do not look"
            assert not self.reports.idle
        for name in self.running:
            job = self.requests[name]
            wrong = self.memory.wrong(job.blocks[: job.computed], job.labels[: job.computed])
            assert not wrong, f"{name} runs, and {wrong}"
        wrong = self.memory.wrong(list(self.known.values()), list(self.known))
        assert not wrong, f"the prefix cache is wrong: {wrong}"

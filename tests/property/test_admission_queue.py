"""Whatever arrives and whatever ends: nobody gets pages that are not there, and nobody who fits the pool waits for ever.

The pages are counted by hand here; what is driven is the queue as the admission drives it.
"""

from collections import Counter, deque

from hypothesis import given, strategies as st

from kvbridge.core.ids import IndexSpace
from kvbridge.node.admission_queue import AdmissionQueue, Waiting

SPACES = (IndexSpace.FULL, IndexSpace.HOST)
POOL = 12
CLIENTS = "abcd"

demands = st.fixed_dictionaries({space: st.integers(0, POOL) for space in SPACES}).filter(lambda one: any(one.values()))
arrivals = st.tuples(st.just("join"), st.sampled_from(CLIENTS), demands)
steps = st.one_of(
    arrivals, st.tuples(st.just("end"), st.integers(0, 50)), st.tuples(st.just("leave"), st.integers(0, 50))
)


class Pool:
    """A pool and its queue; checks every admission."""

    def __init__(self, max_overtakes: int) -> None:
        self.max_overtakes = max_overtakes
        self.queue: AdmissionQueue[Waiting] = AdmissionQueue(max_waiting=1_000, max_overtakes=max_overtakes)
        self.free = dict.fromkeys(SPACES, POOL)
        self.running: deque[Waiting] = deque()
        self.lines: dict[str, list[Waiting]] = {client: [] for client in CLIENTS}
        self.passed: Counter[Waiting] = Counter()
        """How many were admitted from the pages of a head during its turn."""

    def in_use(self) -> dict[str, int]:
        return dict(Counter(entry.client for entry in self.running))

    def join(self, client: str, demand: dict[IndexSpace, int]) -> Waiting:
        entry = Waiting(client, demand, 0.0)
        self.queue.join(entry, self.free)
        self.lines[client].append(entry)
        self.serve()
        return entry

    def leave(self, number: int) -> None:
        waiting = [entry for line in self.lines.values() for entry in line]
        if waiting:
            entry = waiting[number % len(waiting)]
            self.queue.leave(entry)
            self.lines[entry.client].remove(entry)
            self.serve()

    def end(self, number: int = 0) -> None:
        if self.running:
            self.running.rotate(-(number % len(self.running)))
            entry = self.running.popleft()
            for space, count in entry.demand.items():
                self.free[space] += count
            self.serve()

    def heads(self) -> list[Waiting]:
        return [line[0] for line in self.lines.values() if line]

    def serve(self) -> None:
        while (entry := self.queue.next(self.free, self.in_use())) is not None:
            self.admit(entry)
        assert not any(self.fits(head, self.free) for head in self.heads() if self.alone(head)), "it fits, and waits"

    def admit(self, entry: Waiting) -> None:
        assert self.lines[entry.client][0] is entry, "inside a line nobody passes"
        assert self.fits(entry, self.free), "nobody gets pages that are not there"
        for head in self.heads():
            if head is entry:
                continue
            if self.queue.is_firm(head) and head.turn < entry.turn:
                for space, count in head.demand.items():
                    left = self.free[space] - entry.demand[space]
                    assert left >= min(self.free[space], count), f"{space}: taken from a firm head that came first"
            elif self.shares(head, entry):
                self.passed[head] += 1
            assert self.passed[head] <= self.max_overtakes + len(CLIENTS) - 1, "overtaken more often than the rule says"
        self.queue.granted(entry)
        self.lines[entry.client].remove(entry)
        self.running.append(entry)
        for space, count in entry.demand.items():
            self.free[space] -= count

    @staticmethod
    def fits(entry: Waiting, free: dict[IndexSpace, int]) -> bool:
        return all(count <= free[space] for space, count in entry.demand.items())

    @staticmethod
    def shares(one: Waiting, other: Waiting) -> bool:
        return any(one.demand[space] and other.demand[space] for space in SPACES)

    def alone(self, head: Waiting) -> bool:
        """Whether nobody firm before it holds pages back from it."""
        return not any(self.queue.is_firm(other) and other.turn < head.turn for other in self.heads())


@given(max_overtakes=st.integers(0, 4), script=st.lists(steps, max_size=60))
def test_everybody_who_fits_the_pool_is_admitted_once_rooms_end(max_overtakes, script):
    pool = Pool(max_overtakes)
    for step in script:
        match step:
            case ("join", client, demand):
                pool.join(client, demand)
            case ("end", number):
                pool.end(number)
            case ("leave", number):
                pool.leave(number)
    for _ in range(len(script)):
        pool.end()
    assert len(pool.queue) == 0
    assert not any(pool.lines.values())
    assert pool.free == dict.fromkeys(SPACES, POOL)


@given(
    max_overtakes=st.integers(0, 6),
    large=st.fixed_dictionaries({space: st.integers(1, POOL) for space in SPACES}),
    rush=st.lists(st.tuples(st.sampled_from("bcd"), st.integers(1, 3), st.integers(1, 3)), min_size=60, max_size=60),
)
def test_a_large_request_gets_its_turn_however_many_small_ones_keep_coming(max_overtakes, large, rush):
    pool = Pool(max_overtakes)
    for _ in range(POOL):
        pool.join("b", dict.fromkeys(SPACES, 1))
    before = len(pool.running)
    entry = pool.join("a", large)
    admitted = 0
    for client, full, host in rush:
        if entry in pool.running:
            break
        pool.join(client, dict(zip(SPACES, (full, host), strict=True)))
        count = len(pool.running)
        pool.end()
        admitted += len(pool.running) - count + 1
    assert entry in pool.running, f"{admitted} others were admitted first, {before} rooms ran when it came"
    assert admitted <= max_overtakes + len(CLIENTS) - 1 + 1

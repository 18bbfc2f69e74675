"""Retention in any order of uses, times and evictions: it never makes a page stay that others need, and its share is bounded."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvbridge.core.ids import IndexSpace
from kvbridge.core.prefixes import Retention
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.retention import Claim
from tests.helpers.examples import fewer
from tests.helpers.prefix_recount import all_pages, check_index

FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
PAGES = 24
TEXTS = st.text("ab", min_size=1, max_size=6)


def keys(namespace: str, text: str) -> Keys:
    return Keys.of([f"{namespace}{text[: end + 1]}".encode().ljust(16) for end in range(len(text))])


class RetentionMachine(RuleBasedStateMachine):
    @initialize(share=st.sampled_from([0.0, 0.25, 0.5, 1.0]))
    def begin(self, share):
        self.index = PrefixIndex([FULL], PAGES, retained_share=share)
        self.limit = int(share * PAGES)
        self.free = list(range(PAGES))
        self.now = 1.0
        self.pinned: list[np.ndarray] = []
        self.until: dict[int, list[float]] = {}
        """By record, when its priority falls below 1, 2, 3, by a naive reckoning."""

    @rule(seconds=st.sampled_from([0.25, 1.0, 5.0, 40.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule(
        namespace=st.sampled_from("XYZ"),
        text=TEXTS,
        priority=st.integers(0, 3),
        for_s=st.sampled_from([0.0, 1.0, 3.0, 30.0]),
        pin=st.booleans(),
    )
    def use(self, namespace, text, priority, for_s, pin):
        prompt = keys(namespace, text)
        path = self.index.match(prompt)
        lacking = len(prompt) - len(path) - len(self.free)
        self.index.pin(path)
        if lacking > 0:
            if self.index.evictable()[FULL] < lacking:
                self._give(self.index.unpin(path))
                return
            self.evict(lacking)
        pages = np.array([self.free.pop() for _ in range(len(path), len(prompt))], dtype=np.int32)
        self.index.insert(prompt, len(path), {FULL: pages}, now=self.now)
        whole = self.index.match(prompt)
        self.index.pin(whole)
        self._give(self.index.unpin(path))
        counted = self.index.retain(whole, self.now, Claim(namespace, Retention(priority=priority, for_s=for_s)))
        if counted and priority:
            for record in whole.tolist():
                until = self.until.setdefault(record, [0.0, 0.0, 0.0])
                for level in range(priority):
                    until[level] = max(until[level], self.now + for_s * (priority - level) / priority)
        if pin:
            self.pinned.append(whole)
        else:
            self._give(self.index.unpin(whole))

    @rule(which=st.integers(0, 5))
    def let_go(self, which):
        if self.pinned:
            self._give(self.index.unpin(self.pinned.pop(which % len(self.pinned))))

    @rule(share=st.floats(0, 1))
    def evict_some(self, share):
        self.evict(int(share * self.index.evictable()[FULL]))

    @rule()
    def drop(self):
        self._give(self.index.drop())

    def evict(self, count):
        """Whatever nobody reads can be had, and nothing goes while there is something of a lower priority."""
        self.index.decay(self.now)
        before = {int(record): self._priority(int(record)) for record in self._all()}
        pins = self.index.device._pins
        got = self.index.evict({FULL: count})
        assert len(got.get(FULL, ())) == count
        left = set(self._all())
        gone = [priority for record, priority in before.items() if record not in left]
        stay = [priority for record, priority in before.items() if record in left and not pins[record]]
        assert not gone or not stay or max(gone) <= min(stay)
        self._give(got)

    @invariant()
    def adds_up(self):
        if not hasattr(self, "index"):
            return
        check_index(self.index)
        assert sorted(self.free + all_pages(self.index)[FULL].tolist()) == list(range(PAGES))
        assert all(count <= self.limit for count in self.index.retentions.by_namespace.values())
        unpinned = sum(self.index.device._pins[record] == 0 for record in self._all())
        assert self.index.evictable()[FULL] == unpinned, "retention pins nothing"

    def _all(self) -> list[int]:
        return self.index.records.all().tolist()

    def _priority(self, record: int) -> int:
        """By the last look, which is at most a second old; the naive reckoning bounds it."""
        found = self.index.retentions.priority(record)
        until = self.until.get(record, [0.0] * 3)
        exact, at_most = (sum(end > now for end in until) for now in (self.now, self.now - 1.0))
        assert exact <= found <= at_most
        return found

    def _give(self, pages):
        self.free.extend(pages.get(FULL, np.empty(0)).tolist())
        there = set(self._all())
        self.until = {record: until for record, until in self.until.items() if record in there}


TestRetention = RetentionMachine.TestCase
TestRetention.settings = fewer(2, stateful_step_count=40)

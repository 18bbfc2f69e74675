"""The policies of backups: the pages that are on the host after each step. Nothing is copied: a test says when an order ends."""

from collections.abc import Iterator

import pytest

from kvbridge.config.tier import BackupPolicy, HostBackup
from kvbridge.pool.accounts.book import PageState
from kvbridge.tier import host_copies
from kvbridge.tier.host_copies import Backup, BackupController
from tests.helpers.prefix_bench import FULL, FULL_COPY, SWA, SWA_COPY, PrefixBench, keys
from tests.helpers.prefix_recount import check_cache

THROUGH, SELECTIVE, BACK = BackupPolicy


class Bench(PrefixBench):
    """A node without rank workers."""

    def __init__(self, *, device: int = 16, host: int = 32, **settings: object) -> None:
        super().__init__({FULL: device, SWA: 1, FULL_COPY: host, SWA_COPY: 1}, restores=False)
        backup = HostBackup.model_validate(settings)
        self.cache.controller = self.controller = BackupController(self.copies, backup, clock=self.clock)

    def begin(self) -> list[Backup]:
        return self.controller.begin(self.new_owner)

    def order(self, *, done: bool = True) -> int:
        """Carry out one order; return how many pages it had."""
        backups = self.begin()
        if backups:
            self.controller.ended(backups, done=done)
        return sum(backup.pages for backup in backups)

    def settle(self) -> None:
        """Carry out orders until there is nothing to do."""
        for _ in range(100):
            if not self.order():
                return
        raise AssertionError("it does not end")

    def on_host(self, name: str, pages: int) -> int:
        """Return how many first pages of a conversation are on the host."""
        return self.where(name, pages)[1]


@pytest.fixture
def make() -> Iterator[type[Bench]]:
    made: list[Bench] = []

    class Kept(Bench):
        def __init__(self, **settings: object) -> None:
            super().__init__(**settings)
            made.append(self)

    yield Kept
    for bench in made:
        check_cache(bench.cache)


def test_write_back_goes_ahead_of_need_oldest_first(make):
    bench = make(device=16, policy=BACK, low_share=0.5)
    for name in "abc":
        bench.warm(name, 4)
    assert bench.order() == 4, "four pages are free and eight are to be there without losing anything"
    assert [bench.on_host(name, 4) for name in "abc"] == [4, 0, 0]
    assert bench.order() == 0
    bench.warm("d", 2)
    bench.settle()
    assert [bench.on_host(name, 4) for name in "abc"] == [4, 4, 0]


@pytest.mark.parametrize("policy", list(BackupPolicy))
def test_no_admission_waits_for_a_backup(make, policy):
    bench = make(device=8, policy=policy, low_share=1.0)
    bench.warm("a", 4)
    backups = bench.begin()
    owner, got = bench.admit("b", 4)
    assert len(got.own[FULL]) == 4, "while pages of 'a' are being copied"
    bench.end(owner)
    if backups:
        bench.controller.ended(backups, done=True)
        assert bench.on_host("a", 4) == 4


def test_what_fails_frees_its_own_copies_and_is_tried_again_later(make):
    bench = make(policy=THROUGH)
    bench.warm("a", 3)
    assert bench.order(done=False) == 3
    assert (bench.count(FULL_COPY, PageState.CACHED), bench.count(FULL_COPY, PageState.FREE)) == (0, 32)
    assert bench.cache.known(keys("a", 3)) == 3, "nothing else has changed"
    assert bench.order() == 0, "not at once"
    bench.clock.advance(host_copies.FIRST_PAUSE_S)
    assert bench.order(done=False) == 3
    bench.clock.advance(host_copies.FIRST_PAUSE_S)
    assert bench.order() == 0, "twice as long after the second failure"
    bench.clock.advance(host_copies.FIRST_PAUSE_S)
    assert bench.order() == 3
    assert bench.on_host("a", 3) == 3


def test_a_host_that_is_read_as_a_whole_costs_no_order_more_than_a_few_looks(make, monkeypatch):
    """Each look walks along a whole prompt, in the loop that does everything else."""
    bench = make(policy=THROUGH, device=200, host=4)
    bench.warm("pinned", 4)
    bench.settle()
    owner, _ = bench.admit("pinned", 4)
    looking = bench.copies.pin(keys("pinned", 4))
    for number in range(150):
        bench.warm(f"p{number}", 1)
    tried = []
    start_backup = bench.copies.start_backup

    def counted(*given, **named):
        tried.append(given)
        return start_backup(*given, **named)

    monkeypatch.setattr(bench.copies, "start_backup", counted)
    waiting = bench.controller.waiting
    assert waiting >= 150
    assert bench.begin() == []
    assert len(tried) == host_copies.MOST_IN_VAIN < waiting
    while bench.controller.waiting:
        before = bench.controller.waiting
        assert bench.begin() == []
        assert bench.controller.waiting < before, "the others have their turn"
    assert bench.controller.refused >= 150
    bench.copies.unpin(looking)
    bench.end(owner)
    bench.warm("late", 2)
    assert bench.order() == 2

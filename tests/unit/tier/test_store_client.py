"""A node's end of a store without the store: what orders say, and what each report, silence and end of the process leads to."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvbridge.config.tier import FileStoreSettings, StoreLimits
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace
from kvbridge.core.wire.messages import FileOrigin, SharedRegion
from kvbridge.processes import ChildEnd, EndCause
from kvbridge.tier.stores.client import FIRST_OPEN_S, LONGEST_OPEN_S, Breaker, BreakerState, FailedKeys, StoreClient
from kvbridge.tier.stores.objects import Outcome, StoreOrder, StoreReport, Verb
from tests.helpers.manifests import new_region
from tests.helpers.stored_pages import ids, new_keys

HIT, STORED, ABSENT, BAD = Outcome.HIT, Outcome.STORED, Outcome.ABSENT, Outcome.WRONG_DIGEST
TIMEOUT_S = 60.0
"""Longer than any of these tests takes: silence is said by `late`."""


class Case:
    """A client whose process takes orders and does nothing."""

    def __init__(self, **limits: float) -> None:
        region = new_region(ComponentKind.C4_KV, 1, (0,), pages=8, page_bytes=10, space=IndexSpace.HOST)
        shared = SharedRegion(region=region, origins=(FileOrigin(path="/dev/shm/none"),))
        settings = FileStoreSettings(directory=Path("/none"), max_bytes=1)
        self.client = StoreClient(settings, [[shared]], StoreLimits(failures=1, settle_s=TIMEOUT_S, **limits))
        self.client.why_not = ""
        self.orders: list[StoreOrder] = []
        self.killed: list[str] = []
        self.client._send = self.orders.append  # type: ignore[method-assign]
        self.client._kill = self.killed.append  # type: ignore[method-assign]

    def get(self, keys=None, *pages: int):
        keys = keys or new_keys(1)
        return self.client.begin(Verb.GET, 0, keys, ids(*(pages or range(len(keys)))), timeout_s=TIMEOUT_S)

    def put(self, keys):
        return self.client.begin(Verb.PUT, 0, keys, ids(*range(len(keys))), timeout_s=TIMEOUT_S)

    def report(self, *outcomes: Outcome, settled: bool = True, number: int = 0) -> None:
        number = number or self.orders[-1].number
        self.client._on_report(StoreReport(number=number, outcomes=outcomes, settled=settled, detail="said so"))

    def late(self) -> None:
        self.client._late(self.orders[-1].number, 0.5)

    @property
    def state(self) -> BreakerState:
        return self.client.breaker.state


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def in_loop(test):
    """Run a test, which never waits, in a running loop."""

    def run(loop: asyncio.AbstractEventLoop) -> None:
        async def call() -> None:
            test()

        loop.run_until_complete(call())

    run.__name__ = test.__name__
    return run


def outcomes(operation) -> list[str]:
    return [outcome.value for outcome in operation.answer.result().outcomes]


@in_loop
def test_what_was_missing_or_bad_is_left_out_of_the_next_order_until_it_is_stored():
    case = Case()
    keys = new_keys(3)
    case.get(keys)
    case.report(HIT, ABSENT, BAD)
    again = case.get(keys, 3, 4, 5)
    assert case.orders[-1].keys == keys[:1].data
    assert np.frombuffer(case.orders[-1].pages, "<i4").tolist() == [3]
    case.report(HIT)
    assert outcomes(again) == ["hit", "absent", "absent"]
    stored = case.put(keys[1:2])
    case.report(STORED)
    assert outcomes(stored) == ["stored"]
    case.get(keys)
    assert case.orders[-1].keys == keys[:2].data


@in_loop
def test_silence_is_answered_and_the_pages_wait_for_a_late_report():
    case = Case()
    operation = case.get()
    case.late()
    assert outcomes(operation) == ["timed_out"]
    assert not operation.answer.result().settled
    assert case.client.unsettled == [operation]
    assert case.state is BreakerState.OPEN
    case.report(HIT)
    assert operation.settled.done()
    assert case.client.unsettled == []
    assert outcomes(operation) == ["timed_out"]
    assert case.client.counts == {(Verb.GET, Outcome.TIMED_OUT): 1}
    assert case.killed == []
    assert case.state is BreakerState.OPEN, "a late answer proves nothing about now"


@in_loop
def test_a_store_that_has_answered_others_meanwhile_is_asked_on():
    """Many requests at once make some late, and must not have the store denied to everybody."""
    case = Case()
    late, other = case.get(), case.get()
    case.report(ABSENT, number=2)
    case.client._late(1, 0.5)
    assert (outcomes(late), outcomes(other)) == (["timed_out"], ["absent"])
    assert case.state is BreakerState.CLOSED
    case.report(Outcome.TIMED_OUT, number=1)
    case.get()
    case.late()
    assert case.state is BreakerState.OPEN, "nothing was answered since this was asked"


@in_loop
def test_what_the_store_has_not_let_go_of_is_settled_by_the_end_of_its_process_only():
    case = Case()
    first, second = case.put(new_keys(1)), case.get()
    case.report(Outcome.UNREACHABLE, settled=False, number=1)
    assert outcomes(first) == ["unreachable"]
    assert not first.settled.done()
    assert len(case.killed) == 1
    assert "said so" in case.killed[0]
    case.client._ended(ChildEnd("killed by SIGKILL", EndCause.KILLED))
    assert first.settled.done()
    assert second.settled.done()
    assert outcomes(second) == ["unreachable"]
    assert second.answer.result().settled
    assert case.client.unsettled == []


@in_loop
def test_a_report_that_no_order_explains_ends_the_process():
    case = Case()
    operation = case.get()
    case.report(HIT, HIT)
    case.report(HIT, number=99)
    assert len(case.killed) == 2
    assert not operation.answer.done()


@in_loop
def test_an_answer_that_nobody_waits_for_any_more_counts_all_the_same():
    case = Case()
    operation = case.get()
    operation.answer.cancel()
    case.late()
    assert case.state is BreakerState.OPEN
    case.client.breaker._until_s = 0.0
    trial = case.get()
    assert case.state is BreakerState.HALF_OPEN
    trial.answer.cancel()
    case.report(HIT)
    assert case.state is BreakerState.CLOSED
    assert trial.settled.done()


@in_loop
def test_while_the_breaker_is_open_or_there_is_no_process_nothing_is_sent():
    case = Case()
    case.get()
    case.late()
    closed = case.get()
    assert outcomes(closed) == ["unreachable"]
    assert closed.settled.done()
    assert "too often" in closed.answer.result().detail
    case.client.breaker._until_s = 0.0
    case.client.why_not = "there is none"
    assert "there is none" in case.get().answer.result().detail
    assert len(case.orders) == 1
    assert case.state is BreakerState.OPEN, "nobody was asked, so nobody has failed"


def test_it_opens_after_failures_in_a_row_only():
    breaker = Breaker(failures=3)
    for event in "ff.ff.fff":
        assert breaker.admits(0.0)
        breaker.success() if event == "." else breaker.failure(0.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits(FIRST_OPEN_S - 0.01)


def test_the_pause_grows_while_the_store_is_dead_and_is_short_again_afterwards():
    breaker, now_s, pauses = Breaker(failures=1), 0.0, []
    breaker.failure(now_s)
    for _ in range(8):
        begun_s = now_s
        while not breaker.admits(now_s):
            now_s += 0.25
        pauses.append(now_s - begun_s)
        breaker.failure(now_s)
    assert pauses == [1, 2, 4, 8, 16, LONGEST_OPEN_S, LONGEST_OPEN_S, LONGEST_OPEN_S]
    now_s += LONGEST_OPEN_S
    assert breaker.admits(now_s)
    breaker.success()
    breaker.failure(now_s)
    assert breaker.admits(now_s + FIRST_OPEN_S)


def test_failed_keys_are_forgotten_in_time_by_success_and_by_number():
    failed = FailedKeys(keep_s=2.0, most=3)
    failed.add(["a", "b"], 0.0)
    assert failed.has("a", 1.9)
    assert not failed.has("a", 2.0)
    failed.forget(["b", "never"])
    assert not failed.has("b", 0.0)
    failed.add("abc", 10.0)
    failed.add("a", 11.0)
    failed.add("d", 11.0)
    assert [failed.has(name, 11.5) for name in "abcd"] == [True, False, True, True]

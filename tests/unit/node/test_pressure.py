"""Estimates of when pages will be free, against releases whose times are known."""

from __future__ import annotations

import pytest

from kvbridge.core.ids import IndexSpace
from kvbridge.node.admission.pressure import IDLE_WINDOWS, WINDOW_S, ReleaseRates, RetryAfter
from kvbridge.pool.accounts.page_states import NO_ROOM, Owner
from tests.helpers.manual_clock import ManualClock

FULL, HOST = IndexSpace.FULL, IndexSpace.HOST
A, B = Owner(1, 1), Owner(2, 1)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def rates(clock: ManualClock) -> ReleaseRates:
    return ReleaseRates(clock)


def release(rates: ReleaseRates, clock: ManualClock, *, pages: int, every_s: float, times: int) -> None:
    for _ in range(times):
        clock.advance(every_s)
        rates.freed({FULL: pages})
        rates.gone(A)


def test_the_end_of_a_copy_between_tiers_is_no_room_s(rates, clock):
    release(rates, clock, pages=1, every_s=2.0, times=100)
    before_s = rates.seconds_until_a_room_ends(of=1, rooms=1)
    for copy in range(100):
        rates.gone(Owner(NO_ROOM, copy))
    assert rates.seconds_until_a_room_ends(of=1, rooms=1) == before_s


@pytest.mark.parametrize(("pages", "every_s", "times"), [(4, 0.5, 200), (1, 0.01, 300), (100, 5.0, 40), (8, 1.0, 3)])
def test_a_steady_rate_is_measured(rates, clock, pages, every_s, times):
    release(rates, clock, pages=pages, every_s=every_s, times=times)
    expected = pages / every_s
    assert rates.pages_per_s()[FULL] == pytest.approx(expected, rel=0.15)
    assert rates.seconds_until({FULL: 40}, {}) == pytest.approx(40 / expected, rel=0.15)


def test_a_rate_follows_the_last_minute(rates, clock):
    release(rates, clock, pages=10, every_s=1.0, times=120)
    release(rates, clock, pages=1, every_s=1.0, times=60)
    assert 1.0 < rates.pages_per_s()[FULL] < 2.5
    clock.advance(WINDOW_S)
    assert rates.pages_per_s()[FULL] < 1.0


def test_the_scarcest_space_decides(rates, clock):
    for _ in range(60):
        clock.advance(1.0)
        rates.freed({FULL: 10, HOST: 1})
    both = rates.seconds_until({FULL: 10, HOST: 5}, {})
    assert both == rates.seconds_until({HOST: 5}, {}) == pytest.approx(5.0, rel=0.1)
    assert rates.seconds_until({}, {}) == 0.0


def test_pages_that_are_being_released_take_the_usual_time(rates, clock):
    release(rates, clock, pages=1, every_s=10.0, times=10)
    for owner in (A, B):
        rates.ending(owner)
        clock.advance(0.2)
        rates.gone(owner)
    assert rates.usual_release_s == pytest.approx(0.2)
    assert rates.seconds_until({FULL: 5}, {FULL: 5}) == pytest.approx(0.2)
    assert rates.seconds_until({FULL: 6}, {FULL: 5}) > 10


def test_a_quarantine_is_no_usual_release(rates, clock):
    rates.ending(A)
    clock.advance(0.1)
    rates.gone(A)
    rates.ending(B)
    rates.quarantined(B)
    clock.advance(3_000)
    rates.gone(B)
    assert rates.usual_release_s == pytest.approx(0.1)


def test_with_nothing_released_it_takes_as_long_again(rates, clock):
    assert rates.seconds_until({FULL: 1}, {}) == 0.0
    clock.advance(4.0)
    assert rates.seconds_until({FULL: 1}, {}) == 4.0
    rates.freed({FULL: 3})
    clock.advance(2.0)
    assert rates.seconds_until({FULL: 1}, {}) == 2.0


def test_after_an_idle_time_the_rate_begins_anew(rates, clock):
    release(rates, clock, pages=10, every_s=0.1, times=100)
    clock.advance(WINDOW_S * IDLE_WINDOWS + 1)
    release(rates, clock, pages=1, every_s=1.0, times=11)
    assert rates.pages_per_s()[FULL] == pytest.approx(1.0, rel=0.15)


def test_the_next_end_of_a_client_s_rooms(rates, clock):
    release(rates, clock, pages=1, every_s=0.5, times=200)
    assert rates.seconds_until_a_room_ends(of=10, rooms=40) == pytest.approx(2.0, rel=0.1)
    assert rates.seconds_until_a_room_ends(of=0, rooms=40) == pytest.approx(20.0, rel=0.1)


@pytest.mark.parametrize("draw", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("seconds", [0.0, 0.3, 5.0, 29.0, 1e9, float("inf")])
def test_what_is_told_is_within_bounds_and_never_early(seconds, draw):
    told = RetryAfter(0.1, 30.0, lambda: draw)(seconds)
    assert 0.1 <= told <= 30.0
    assert told >= min(seconds, 24.0)
    assert told <= max(0.1, min(seconds, 24.0)) * 1.25


def test_callers_are_spread_even_at_the_longest():
    assert RetryAfter(0.1, 30.0, lambda: 0.0)(1e9) < RetryAfter(0.1, 30.0, lambda: 0.9)(1e9)

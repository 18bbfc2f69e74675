"""Estimates of when pages will be free, against releases whose times are known."""

from __future__ import annotations

import pytest

from kvbridge.core.ids import IndexSpace
from kvbridge.node.admission.pressure import ReleaseRates
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


def test_pages_of_rooms_that_are_ending_are_not_waited_for(rates, clock):
    assert rates.seconds_until({FULL: 6}, {}) == 0.0, "nothing is known"
    release(rates, clock, pages=1, every_s=1.0, times=100)
    assert rates.seconds_until({FULL: 6}, {FULL: 4}) == pytest.approx(2.0, rel=0.1)
    assert rates.seconds_until({FULL: 6}, {FULL: 7}) == 0.0


def test_the_scarcest_space_decides(rates, clock):
    for _ in range(60):
        clock.advance(1.0)
        rates.freed({FULL: 10, HOST: 1})
    both = rates.seconds_until({FULL: 10, HOST: 5}, {})
    assert both == rates.seconds_until({HOST: 5}, {}) == pytest.approx(5.0, rel=0.1)
    assert rates.seconds_until({}, {}) == 0.0


def test_the_next_end_of_a_client_s_rooms(rates, clock):
    release(rates, clock, pages=1, every_s=0.5, times=200)
    assert rates.seconds_until_a_room_ends(of=10, rooms=40) == pytest.approx(2.0, rel=0.1)
    assert rates.seconds_until_a_room_ends(of=0, rooms=40) == pytest.approx(20.0, rel=0.1)

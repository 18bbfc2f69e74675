"""The order in which waiting requests are admitted, without time and without pages, and when pages will be free."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import IndexSpace
from kvbridge.node.admission.pressure import ReleaseRates
from kvbridge.node.admission.queue import AdmissionQueue, Waiting
from kvbridge.pool.accounts.pages import NO_ROOM, Owner
from tests.helpers.manual_clock import ManualClock

FULL, HOST = IndexSpace.FULL, IndexSpace.HOST


def join(line: AdmissionQueue[Waiting], client: str, full: int, host: int = 0) -> Waiting:
    entry = Waiting(client, {FULL: full, HOST: host}, 0.0)
    line.join(entry, {})
    return entry


def test_a_head_that_was_passed_often_enough_keeps_its_pages():
    line: AdmissionQueue[Waiting] = AdmissionQueue(max_waiting=9, max_overtakes=1)
    large, small = join(line, "large", 8, 5), join(line, "small", 1)
    assert line.next({FULL: 4, HOST: 9}, {}) is small
    line.granted(small)
    assert line.is_firm(large)
    small = join(line, "small", 1)
    assert line.next({FULL: 7, HOST: 9}, {}) is None
    assert line.next({FULL: 8, HOST: 4}, {}) is None, "what it lacks is host pages, and its full pages stay its own"
    assert line.next({FULL: 9, HOST: 4}, {}) is small
    line.leave(large)
    line.leave(large)
    assert line.next({FULL: 1}, {}) is small


def test_what_lacks_counts_everybody_who_waits():
    line: AdmissionQueue[Waiting] = AdmissionQueue(max_waiting=2, max_overtakes=9)
    assert line.lacking({FULL: 2}, {FULL: 2}) == {}
    join(line, "a", 3)
    join(line, "a", 4)
    assert line.lacking({FULL: 2, HOST: 1}, {FULL: 5, HOST: 1}) == {FULL: 4}
    assert line.lacking({FULL: 0}, {FULL: 0}) == {}, "who needs none of the pages that are waited for does not wait"
    with pytest.raises(CapacityError, match=r"admission\.max_waiting") as caught:
        join(line, "c", 1)
    assert (caught.value.lacking, len(line), line.waiting_of("c")) == ({FULL: 8}, 2, 0)


def test_the_scarcest_space_decides_and_pages_of_rooms_that_are_ending_are_not_waited_for():
    clock = ManualClock(1000.0)
    rates = ReleaseRates(clock)
    assert rates.seconds_until({FULL: 6}, {}) == 0.0, "nothing is known"
    for number in range(100):
        clock.advance(1.0)
        rates.freed({FULL: 10, HOST: 1})
        rates.gone(Owner(number + 1, 1))
    both = rates.seconds_until({FULL: 10, HOST: 6}, {})
    assert both == rates.seconds_until({HOST: 6}, {}) == pytest.approx(6.0, rel=0.1)
    assert rates.seconds_until({HOST: 6}, {HOST: 4}) == pytest.approx(2.0, rel=0.1)
    assert rates.seconds_until({HOST: 6}, {HOST: 7}) == rates.seconds_until({}, {}) == 0.0
    before_s = rates.seconds_until_a_room_ends(of=10, rooms=40)
    assert before_s == pytest.approx(4.0, rel=0.1)
    rates.gone(Owner(NO_ROOM, 1))
    assert rates.seconds_until_a_room_ends(of=10, rooms=40) == before_s, "the end of a copy between tiers is no room's"

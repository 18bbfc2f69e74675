"""The order in which waiting requests are admitted, without time and without pages."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import IndexSpace
from kvbridge.node.admission_queue import AdmissionQueue, Waiting

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

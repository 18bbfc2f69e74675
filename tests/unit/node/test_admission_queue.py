"""The order in which waiting requests are admitted, without time and without pages."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import IndexSpace
from kvbridge.node.admission.queue import AdmissionQueue, Waiting

FULL, HOST = IndexSpace.FULL, IndexSpace.HOST
NOBODY: dict[str, int] = {}


def queue(max_waiting: int = 100, max_overtakes: int = 100) -> AdmissionQueue[Waiting]:
    return AdmissionQueue(max_waiting=max_waiting, max_overtakes=max_overtakes)


def join(line: AdmissionQueue[Waiting], client: str = "a", full: int = 1, **more: int) -> Waiting:
    entry = Waiting(client, {FULL: full} | {IndexSpace(space): count for space, count in more.items()}, 0.0)
    line.join(entry, {})
    return entry


def order(line: AdmissionQueue[Waiting], free: int, in_use: dict[str, int] | None = None) -> list[Waiting]:
    """Admit as long as somebody fits; rooms stay in use."""
    rooms, left, admitted = dict(in_use or {}), {FULL: free, HOST: free}, []
    while (entry := line.next(left, rooms)) is not None:
        line.granted(entry)
        rooms[entry.client] = rooms.get(entry.client, 0) + 1
        left = {space: count - entry.demand.get(space, 0) for space, count in left.items()}
        admitted.append(entry)
    return admitted


def test_a_head_that_was_passed_often_enough_keeps_its_pages():
    line = queue(max_overtakes=2)
    large = join(line, "large", 8)
    small = [join(line, f"small{number}", 1) for number in range(5)]
    assert order(line, 4) == small[:2]
    assert line.is_firm(large)
    assert line.next({FULL: 7}, NOBODY) is None
    assert line.next({FULL: 8}, NOBODY) is large
    assert line.next({FULL: 9}, {"large": 99}) is large


def test_a_claim_is_on_pages_that_are_free_already_too():
    line = queue(max_overtakes=0)
    join(line, "large", 2, host=5)
    join(line, "small", 1)
    assert line.next({FULL: 2, HOST: 0}, NOBODY) is None, "the large one lacks host pages, its full pages stay its own"
    assert line.next({FULL: 3, HOST: 0}, NOBODY) is not None


def test_who_leaves_holds_nothing_back():
    line = queue(max_overtakes=0)
    large, behind = join(line, "a", 8), join(line, "a", 8)
    small = join(line, "b", 1)
    line.leave(behind)
    line.leave(behind)
    line.leave(large)
    assert line.next({FULL: 1}, NOBODY) is small
    assert (line.waiting_of("a"), line.waiting_of("b"), len(line)) == (0, 1, 1)


def test_what_lacks_counts_everybody_who_waits():
    line = queue()
    assert line.lacking({FULL: 2}, {FULL: 2}) == {}
    join(line, "a", 3)
    join(line, "a", 4)
    assert line.lacking({FULL: 2, HOST: 1}, {FULL: 5, HOST: 1}) == {FULL: 4}
    assert line.lacking({FULL: 0}, {FULL: 0}) == {}, "who needs none of the pages that are waited for does not wait"


def test_the_queue_is_bounded():
    line = queue(max_waiting=2)
    join(line, "a", 3)
    join(line, "b", 3)
    with pytest.raises(CapacityError, match=r"admission\.max_waiting") as caught:
        join(line, "c", 1)
    assert caught.value.lacking == {FULL: 7}
    assert (len(line), line.waiting_of("c")) == (2, 0)


def test_what_operators_see():
    line = queue(max_overtakes=1)
    assert line.oldest_since_s() is None
    for since_s, client in ((3.0, "a"), (4.0, "a"), (5.0, "b")):
        line.join(Waiting(client, {FULL: 2}, since_s), {})
    assert line.oldest_since_s() == 3.0
    assert line.by_client() == {"a": (2, 3.0), "b": (1, 5.0)}

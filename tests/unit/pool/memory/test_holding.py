from __future__ import annotations

import threading

import pytest

from kvbridge.pool.memory.holding import HeldThings

WAIT_S = 10.0


def test_the_first_holder_opens_and_the_last_closes():
    things: HeldThings[str, int] = HeldThings()
    opened, closed = [], []

    def open_it() -> int:
        opened.append(1)
        return 7

    assert [things.hold("a", open_it), things.hold("a", open_it), things.hold("b", lambda: 8)] == [7, 7, 8]
    assert (len(opened), things.holders()) == (1, {"a": 2, "b": 1})
    things.let_go("a", closed.append)
    assert closed == []
    things.let_go("a", closed.append)
    assert (closed, things.holders()) == ([7], {"b": 1})
    assert things.hold("a", open_it) == 7
    assert len(opened) == 2


def test_what_cannot_be_opened_or_closed_leaves_no_holder():
    things: HeldThings[str, int] = HeldThings()
    with pytest.raises(ZeroDivisionError):
        things.hold("a", lambda: 1 // 0)
    with pytest.raises(ValueError, match="near b"):
        things.hold("b", lambda: 1, check=lambda others: (_ for _ in ()).throw(ValueError(f"near b {others}")))
    assert things.holders() == {}
    things.hold("a", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        things.let_go("a", lambda value: value // 0)
    assert things.holders() == {}
    assert things.hold("a", lambda: 2) == 2


def test_who_comes_while_it_is_being_opened_waits_and_others_do_not():
    things: HeldThings[str, int] = HeldThings()
    opening, may_go_on = threading.Event(), threading.Event()
    results = []

    def slowly() -> int:
        opening.set()
        assert may_go_on.wait(WAIT_S)
        return 1

    def never() -> int:
        raise AssertionError("it is open already")

    first = threading.Thread(target=lambda: results.append(things.hold("a", slowly)))
    first.start()
    assert opening.wait(WAIT_S)
    second = threading.Thread(target=lambda: results.append(things.hold("a", never)))
    second.start()
    assert things.hold("b", lambda: 2) == 2
    assert results == []
    may_go_on.set()
    for thread in (first, second):
        thread.join(WAIT_S)
    assert (results, things.holders()) == ([1, 1], {"a": 2, "b": 1})


def test_who_comes_while_it_is_being_closed_opens_it_anew():
    things: HeldThings[str, int] = HeldThings()
    things.hold("a", lambda: 1)
    closing, may_go_on = threading.Event(), threading.Event()
    results: list[int] = []

    def slowly(_: int) -> None:
        closing.set()
        assert may_go_on.wait(WAIT_S)

    last = threading.Thread(target=lambda: things.let_go("a", slowly))
    last.start()
    assert closing.wait(WAIT_S)
    late = threading.Thread(target=lambda: results.append(things.hold("a", lambda: 2)))
    late.start()
    may_go_on.set()
    for thread in (last, late):
        thread.join(WAIT_S)
    assert (results, things.holders()) == ([2], {"a": 1})

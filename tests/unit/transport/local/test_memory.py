"""Registering in the background: ready or failed with words, and undone before the memory goes."""

from __future__ import annotations

import threading

from kvbridge.core.closing import Closing
from kvbridge.transport.local.memory import DeviceAccess

LIMIT_S = 10.0


class Registered(Closing):
    def __init__(self, told: list[str]) -> None:
        self.told = told

    def close(self) -> None:
        self.told.append("undone")


def test_ready_when_registered_and_undone_before_what_follows() -> None:
    order: list[str] = []
    ended = threading.Event()

    def register(report):
        report(3, 3)
        order.append("registered")
        return Registered(order)

    access = DeviceAccess(3, register, label="pool")
    access.wait(LIMIT_S)
    assert access.ready
    assert repr(access) == "<DeviceAccess to pool: 3 of 3 bytes, ready>"
    access.close(then=lambda: (order.append("unmapped"), ended.set()))
    assert ended.wait(LIMIT_S)
    assert order == ["registered", "undone", "unmapped"]


def test_without_a_thread_memory_is_refused_in_words_and_given_back_all_the_same(monkeypatch) -> None:
    """A process may have no more threads for a while."""
    undone: list[str] = []
    access = DeviceAccess(3, lambda _: Registered(undone), label="pool")
    assert access.wait(LIMIT_S)

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    refused = DeviceAccess(3, lambda _: Registered(undone), label="another pool")
    assert not refused.ready
    assert refused.error.startswith("another pool: can't start new thread; ")
    refused.close(then=lambda: undone.append("after the refused one"))
    access.close(then=lambda: undone.append("unmapped"))
    assert undone == ["after the refused one", "undone", "unmapped"]


def test_closing_meanwhile_ends_it_with_the_present_piece() -> None:
    entered, go_on, ended = threading.Event(), threading.Event(), threading.Event()
    pieces: list[int] = []

    def register(report):
        for done in (1, 2, 3):
            pieces.append(done)
            entered.set()
            assert go_on.wait(LIMIT_S)
            report(done, 3)
        return Registered([])

    access = DeviceAccess(3, register, label="pool")
    assert entered.wait(LIMIT_S)
    access.close(then=ended.set)
    assert not ended.is_set()
    go_on.set()
    assert ended.wait(LIMIT_S)
    assert pieces == [1]
    assert not access.ready

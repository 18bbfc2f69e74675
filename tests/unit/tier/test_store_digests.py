"""The thread beside a request to a store: what it could not compare is told, and never passes for compared."""

from __future__ import annotations

import threading

import pytest

from kvbridge.tier.stores.pages import _Slot


@pytest.fixture
def slot():
    made = _Slot()
    yield made
    made.begin(None)


def fail() -> None:
    raise ValueError("a digest that could not be made")


def test_a_digest_that_fails_is_the_requests_failure_and_the_thread_goes_on(slot):
    failed = threading.Event()

    def fail_beside() -> None:
        failed.set()
        fail()

    slot.begin(fail_beside)
    assert failed.wait(10), "the thread has it, not the request"
    with pytest.raises(ValueError, match="could not be made"):
        slot.finish()
    done: list[int] = []
    for number in range(50):
        slot.begin(lambda number=number: done.append(number))
    slot.finish()
    assert sorted(done) == list(range(50))

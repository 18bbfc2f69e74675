"""When a store is asked: what opens and closes the breaker, and the short memory of single keys."""

from __future__ import annotations

from kvbridge.tier.stores.breaker import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Breaker,
    BreakerState,
    FailedKeys,
)


def test_it_opens_after_failures_in_a_row_only():
    breaker = Breaker(failures=3)
    for event in "ff.ff.fff":
        assert breaker.admits(0.0)
        breaker.success() if event == "." else breaker.failure(0.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.admits(FIRST_PAUSE_S - 0.01)


def test_the_pause_grows_while_the_store_is_dead_and_is_short_again_afterwards():
    breaker, now_s, pauses = Breaker(failures=1), 0.0, []
    breaker.failure(now_s)
    for _ in range(8):
        begun_s = now_s
        while not breaker.admits(now_s):
            now_s += 0.25
        pauses.append(now_s - begun_s)
        breaker.failure(now_s)
    assert pauses == [1, 2, 4, 8, 16, LONGEST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    now_s += LONGEST_PAUSE_S
    assert breaker.admits(now_s)
    breaker.success()
    breaker.failure(now_s)
    assert breaker.admits(now_s + FIRST_PAUSE_S)


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

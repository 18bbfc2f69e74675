"""Signals while `kvbridge up` runs: which are raised, and which are counted."""

import os
import signal

import pytest

from kvbridge.cli.signals import Interrupts


def test_the_first_signal_is_raised_and_the_others_are_counted() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.more == 3


def test_a_step_that_is_held_is_done_first() -> None:
    done = []

    def step() -> None:
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGHUP)
            done.append("whole")

    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            step()
        assert done == ["whole"]
        assert interrupts.more == 0
        with interrupts.held():
            os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.more == 1


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

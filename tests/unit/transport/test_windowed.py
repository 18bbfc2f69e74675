"""The window and the ending of transfers, against a library that is told what to answer."""

import numpy as np

from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.transport import windowed
from kvbridge.transport.base import TransferState
from tests.helpers.manual_clock import ManualClock


class FakeLibrary(windowed.Submitter[int]):
    """Batches stay pending until `answers` says otherwise; asking after a terminal batch again is an error."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.answers: dict[int, windowed.Check] = {}
        self.refuse_from: int | None = None
        self.partly: dict[int, int] = {}
        """Where a batch begins, to where it ends although more was given."""
        self.asked: list[int] = []
        self._ended: set[int] = set()

    def start(self, first: int, stop: int) -> int:
        if self.refuse_from is not None and first >= self.refuse_from:
            raise TransportError("queue full")
        taken = self.partly.get(first, stop)
        self.started.append((first, taken))
        handle = len(self.started) - 1
        if taken < stop:
            raise windowed.PartlyStartedError("took two", handle, taken)
        return handle

    def check(self, handle: int) -> windowed.Check:
        assert handle not in self._ended, "asked after a batch that was terminal"
        self.asked.append(handle)
        answer = self.answers.get(handle, windowed.PENDING)
        if answer.progress in {windowed.Progress.DONE, windowed.Progress.FAILED}:
            self._ended.add(handle)
        return answer

    def finish(self, *handles: int) -> None:
        self.answers.update(dict.fromkeys(handles, windowed.DONE))


def operations(*lengths: int) -> Operations:
    length = np.array(lengths, dtype=np.uint64)
    address = np.arange(len(lengths), dtype=np.uint64) * np.uint64(1 << 20) + np.uint64(1 << 20)
    return Operations(address, address, length)


class Bench:
    """One window with a clock; `transfer` adds a transfer over a fake library of its own."""

    def __init__(self, **limits: float) -> None:
        settings = {"operations": 4, "bytes": 1_000, "quiet_timeout_s": 5.0} | limits
        self.window = windowed.Window(windowed.WindowLimits(**settings))
        self.clock = ManualClock()

    def transfer(self, *lengths: int, deadline_s: float = 10.0) -> tuple[windowed.WindowedTransfer[int], FakeLibrary]:
        library = FakeLibrary()
        made = windowed.WindowedTransfer(
            operations(*lengths), library, self.window, peer="peer x:1", deadline_s=deadline_s, clock=self.clock
        )
        return made, library


def test_stalled_batch_does_not_hide_those_behind_it() -> None:
    bench = Bench(quiet_timeout_s=5.0)
    transfer, library = bench.transfer(*[10] * 4)
    transfer.poll()
    library.answers[0] = windowed.Check(windowed.Progress.STALLED, "answered -2")
    library.finish(1, 2, 3)
    assert transfer.poll().state is TransferState.ACTIVE
    assert bench.window.operations == 1
    library.answers[0] = windowed.Check(windowed.Progress.FAILED, "answered -1")
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert status.in_transit
    assert "answered -2 (0 of 4 operations done)" in status.error


def test_batch_that_was_taken_in_part_fails_at_once_and_is_waited_for() -> None:
    bench = Bench(operations=100, batch_operations=4)
    transfer, library = bench.transfer(*range(10, 22))
    library.partly = {4: 6}
    assert transfer.poll().state is TransferState.ACTIVE
    assert library.started == [(0, 4), (4, 6)]
    assert (bench.window.operations, bench.window.bytes) == (6, sum(range(10, 16)))
    library.finish(0)
    assert transfer.poll().state is TransferState.ACTIVE
    library.finish(1)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "took two" in status.error
    assert not status.in_transit
    assert (bench.window.operations, bench.window.bytes) == (0, 0)


def test_nothing_to_do_is_done() -> None:
    transfer, library = Bench().transfer()
    assert transfer.poll().state is TransferState.DONE
    assert library.started == []


def test_failure_that_does_not_become_quiet_in_time() -> None:
    bench = Bench(quiet_timeout_s=5.0)
    transfer, library = bench.transfer(*[10] * 4)
    transfer.poll()
    library.answers[0] = windowed.Check(windowed.Progress.FAILED, "answered -1")
    transfer.poll()
    bench.clock.advance(4.9)
    assert transfer.poll().state is TransferState.ACTIVE
    bench.clock.advance(0.1)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_NOT_QUIET
    assert "3 operations were still in flight" in status.error
    library.finish(1, 2, 3)
    assert transfer.poll() == status
    assert bench.window.operations == 3  # what may still be moving goes on counting


def test_deadline_stops_submission_and_waits() -> None:
    bench = Bench()
    transfer, library = bench.transfer(*[10] * 10, deadline_s=2.0)
    transfer.poll()
    bench.clock.advance(2.0)
    library.finish(0)
    assert transfer.poll().state is TransferState.ACTIVE
    assert len(library.started) == 4
    library.finish(1, 2, 3)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "deadline of 2 s passed" in status.error


def test_abort_and_failure_keep_the_first_cause_and_the_first_quiet_deadline() -> None:
    bench = Bench(quiet_timeout_s=5.0)
    transfer, _ = bench.transfer(10, deadline_s=1.0)
    transfer.poll()
    transfer.abort("first")
    bench.clock.advance(4.0)
    transfer.abort("second")
    bench.clock.advance(1.0)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_NOT_QUIET
    assert "first" in status.error
    assert "second" not in status.error


def test_refused_start_fails_and_waits_for_what_was_accepted() -> None:
    transfer, library = Bench().transfer(10, 10, 10)
    library.refuse_from = 2
    assert transfer.poll().state is TransferState.ACTIVE
    library.finish(0, 1)
    status = transfer.poll()
    assert status.state is TransferState.FAILED_QUIET
    assert "queue full" in status.error


def test_an_early_transfer_cannot_starve_a_later_one() -> None:
    bench = Bench(operations=4)
    early, early_library = bench.transfer(*[10] * 100)
    early.poll()
    late, late_library = bench.transfer(10)
    late.poll()
    assert late_library.started == []
    early_library.finish(0)
    early.poll()
    late.poll()
    assert len(late_library.started) == 1


def test_agent_gone_makes_active_quiet_and_leaves_terminal_alone() -> None:
    bench = Bench(quiet_timeout_s=1.0)
    active, _ = bench.transfer(10)
    active.poll()
    loud, _ = bench.transfer(10)
    loud.poll()
    loud.abort("x")
    bench.clock.advance(1.0)
    status = loud.poll()
    for transfer in (active, loud):
        transfer.cut_off("the transport was closed")
    assert active.poll().state is TransferState.FAILED_QUIET
    assert loud.poll() == status
    assert status.state is TransferState.FAILED_NOT_QUIET


def test_poll_stops_starting_when_its_budget_is_spent() -> None:
    bench = Bench(operations=100)
    transfer, library = bench.transfer(*[10] * 10)
    start = library.start

    def slow(first: int, stop: int) -> int:
        bench.clock.advance(0.0004)
        return start(first, stop)

    library.start = slow
    transfer.poll()
    assert len(library.started) == 3

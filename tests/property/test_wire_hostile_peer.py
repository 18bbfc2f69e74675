"""One end of a link against a peer that acknowledges, numbers and floors as it likes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbridge.core.errors import CapacityError, ProtocolError
from kvbridge.core.wire.codec import Acks
from kvbridge.core.wire.delivery import DeliverySettings, Inbox, Outbox
from tests.helpers.examples import fewer
from tests.helpers.manual_clock import ManualClock

SETTINGS = DeliverySettings(window=8, max_held=20, early_bytes=1_000, give_up_s=30)
NUMBERS = st.integers(0, 24) | st.integers(0, 2**62)


class HostilePeer(RuleBasedStateMachine):
    """Whatever it says: nothing but a ProtocolError, everything in order and once, and never more than the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1.0)
        self.outbox: Outbox[int] = Outbox(SETTINGS)
        self.inbox: Inbox[int] = Inbox(SETTINGS)
        self.posted = self.sent = 0
        self.handed_on: list[int] = []

    @rule()
    def post(self) -> None:
        try:
            self.outbox.post(self.posted + 1, now_s=self.clock())
        except CapacityError:
            assert len(self.outbox) == SETTINGS.max_held
        else:
            self.posted += 1

    @rule(seconds=st.sampled_from((0.01, 0.1, 1.0, 31.0)))
    def work(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.outbox.take_expired(self.clock())
        self.outbox.take_due(self.clock())
        for sent in self.outbox.take_new(self.clock()):
            assert sent.sequence == sent.message > self.sent
            self.sent = sent.sequence

    @rule(upto=NUMBERS, beyond=st.lists(NUMBERS, max_size=4))
    def acknowledge(self, upto: int, beyond: list[int]) -> None:
        held = len(self.outbox)
        try:
            self.outbox.acknowledge(Acks(upto, tuple(beyond)), now_s=self.clock())
        except ProtocolError:
            assert len(self.outbox) == held, "what is refused changes nothing"

    @rule(sequence=NUMBERS.filter(bool), floor=NUMBERS, size_bytes=st.sampled_from((0, 100, 400, 999, 5_000)))
    def arrive(self, sequence: int, floor: int, size_bytes: int) -> None:
        _, ready = self.inbox.accept(sequence, sequence, floor=floor, size_bytes=size_bytes)
        self.handed_on += ready
        if self.inbox.owed % 3 == 0:
            self.inbox.acks()

    @invariant()
    def nothing_is_out_of_bounds(self) -> None:
        self.outbox.check_integrity()
        self.inbox.check_integrity()
        assert self.handed_on == sorted(set(self.handed_on))
        assert len(self.outbox) <= SETTINGS.max_held
        assert len(self.inbox) < SETTINGS.window
        assert self.inbox._early_bytes <= SETTINGS.early_bytes


TestHostilePeer = HostilePeer.TestCase
TestHostilePeer.settings = fewer(2, stateful_step_count=40)


def test_what_is_due_is_taken_whatever_is_held():
    """The limit on what came early delays it; it holds nothing up."""
    inbox: Inbox[int] = Inbox(SETTINGS)
    assert inbox.accept(2, 2, floor=1, size_bytes=900).verdict == "new"
    assert inbox.accept(3, 3, floor=1, size_bytes=900).verdict == "beyond_window"
    assert inbox.accept(1, 1, floor=1, size_bytes=5_000).ready == [1, 2]
    assert inbox.accept(3, 3, floor=1, size_bytes=900).ready == [3]
    inbox.check_integrity()


@pytest.mark.parametrize("floor", [5, 2**62])
def test_what_is_given_up_is_not_counted_any_more(floor: int):
    inbox: Inbox[int] = Inbox(SETTINGS)
    inbox.accept(3, 3, floor=1, size_bytes=900)
    inbox.accept(floor, 0, floor=floor, size_bytes=0)
    inbox.check_integrity()
    assert inbox._early_bytes == 0

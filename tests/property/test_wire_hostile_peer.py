"""One end of a link against a peer that acknowledges and numbers as it likes."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbridge.core.errors import CapacityError, ProtocolError
from kvbridge.core.wire.delivery import Arrival, DeliverySettings, Inbox, Outbox
from tests.helpers.examples import fewer
from tests.helpers.manual_clock import ManualClock

SETTINGS = DeliverySettings(window=8, max_held=20, give_up_s=30)
NUMBERS = st.integers(0, 24) | st.integers(0, 2**62)


class HostilePeer(RuleBasedStateMachine):
    """Whatever it says: nothing but a ProtocolError, everything in order and once, and never more than the limits."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock(1.0)
        self.outbox: Outbox[int] = Outbox(SETTINGS)
        self.inbox = Inbox()
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
        self.outbox.take_due(self.clock())
        for sent in self.outbox.take_new(self.clock()):
            assert sent.sequence == sent.message > self.sent
            self.sent = sent.sequence

    @rule(upto=NUMBERS)
    def acknowledge(self, upto: int) -> None:
        held = len(self.outbox)
        try:
            self.outbox.acknowledge(upto, now_s=self.clock())
        except ProtocolError:
            assert len(self.outbox) == held, "what is refused changes nothing"

    @rule(sequence=NUMBERS.filter(bool))
    def arrive(self, sequence: int) -> None:
        if self.inbox.accept(sequence) is Arrival.NEW:
            self.handed_on.append(sequence)
        if self.inbox.owed % 3 == 0:
            assert self.inbox.acknowledged() == len(self.handed_on)

    @invariant()
    def nothing_is_out_of_bounds(self) -> None:
        self.outbox.check_integrity()
        assert self.handed_on == list(range(1, len(self.handed_on) + 1))
        assert len(self.outbox) <= SETTINGS.max_held


TestHostilePeer = HostilePeer.TestCase
TestHostilePeer.settings = fewer(2, stateful_step_count=40)

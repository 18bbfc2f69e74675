"""Two ends of a link over a channel that loses, doubles, delays and reorders, under a clock turned by hand."""

import heapq
import math
import random

from hypothesis import given, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbridge.core.errors import CapacityError, ProtocolError
from kvbridge.core.wire.delivery import Arrival, DeliverySettings, Inbox, Outbox
from tests.helpers.examples import fewer
from tests.helpers.manual_clock import ManualClock

STEP_S = 0.01


class Channel:
    """Delivers what is put in, some of it never, some twice, in the order of random delays."""

    def __init__(self, seed, loss, double, most_delay_s):
        self.random = random.Random(seed)
        self.loss, self.double, self.most_delay_s = loss, double, most_delay_s
        self.queue = []
        self.count = 0

    def put(self, item, now_s):
        copies = 0 if self.random.random() < self.loss else 2 if self.random.random() < self.double else 1
        for _ in range(copies):
            self.count += 1
            heapq.heappush(self.queue, (now_s + self.random.random() * self.most_delay_s, self.count, item))

    def take(self, now_s):
        while self.queue and self.queue[0][0] <= now_s:
            yield heapq.heappop(self.queue)[2]


def check(outbox):
    settings = outbox._settings
    assert 0 <= outbox._on_their_way <= min(len(outbox), settings.window)
    assert len(outbox) <= settings.max_held
    assert (outbox._resend_at_s < math.inf) == bool(outbox._on_their_way), "a resend without a message, or none for one"


class Simulation:
    def __init__(self, *, seed, loss, double, most_delay_s, delivery):
        self.clock = ManualClock(1.0)
        self.there = Channel(seed, loss, double, most_delay_s)
        self.back = Channel(seed + 1, loss, double, most_delay_s)
        self.outbox, self.inbox = Outbox(delivery), Inbox()
        self.delivered, self.undelivered, self.frames, self.is_over = [], [], 0, False

    def step(self):
        now_s = self.clock()
        if now_s >= self.outbox.gives_up_at_s:
            self.undelivered += [message for message, _ in self.outbox.abandon(now_s)]
            self.is_over = True
        for sent in self.outbox.take_due(now_s) + self.outbox.take_new(now_s):
            self.frames += 1
            self.there.put(sent, now_s)
        for sequence, message in self.there.take(now_s):
            if self.inbox.accept(sequence) is Arrival.NEW:
                self.delivered.append(message)
        if self.inbox.owed:
            self.back.put(self.inbox.acknowledged(), now_s)
        for upto in self.back.take(now_s):
            self.outbox.acknowledge(upto, now_s=now_s)
        check(self.outbox)
        self.clock.advance(STEP_S)

    def run_until_quiet(self, limit_s):
        stop_s = self.clock() + limit_s
        while len(self.outbox) or self.there.queue:
            assert self.clock() < stop_s, f"not quiet after {limit_s} s: {self.outbox!r} {self.inbox!r}"
            self.step()


@given(
    seed=st.integers(0, 2**32),
    loss=st.floats(0, 0.6),
    double=st.floats(0, 0.5),
    most_delay_s=st.floats(0, 0.5),
    count=st.integers(1, 80),
    window=st.integers(1, 16),
    give_up_s=st.sampled_from((0.3, 1e6)),
)
def test_a_patient_sender_loses_nothing_and_an_impatient_one_reports_what_it_lost(count, window, give_up_s, **channel):
    simulation = Simulation(**channel, delivery=DeliverySettings(give_up_s=give_up_s, window=window))
    posted = 0
    while posted < count and not simulation.is_over:  # a link that is over is closed
        simulation.outbox.post(posted, now_s=simulation.clock())
        posted += 1
        simulation.step()
    simulation.run_until_quiet(10_000)
    delivered, undelivered = simulation.delivered, simulation.undelivered
    assert delivered == list(range(len(delivered))), "twice, out of order, or with a gap"
    assert undelivered == list(range(posted))[posted - len(undelivered) :], "reported out of order"
    assert len(delivered) + len(undelivered) >= posted, "silently lost"
    assert give_up_s < 1e6 or (len(delivered), undelivered) == (count, [])


@fewer(4)
@given(seed=st.integers(0, 2**32), loss=st.floats(0, 0.4))
def test_nothing_grows_and_resends_are_bounded(seed, loss):
    delivery = DeliverySettings(give_up_s=2.0, window=64, max_held=512)
    simulation = Simulation(seed=seed, loss=loss, double=0.2, most_delay_s=0.03, delivery=delivery)
    for number in range(400):
        simulation.outbox.post(number, now_s=simulation.clock())
        simulation.step()
        simulation.step()
    simulation.run_until_quiet(1_000)
    assert len(simulation.outbox) == 0
    assert simulation.frames < 400 * 64 / 2, "the whole window is not sent again for each message"


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
        for sequence, message in self.outbox.take_new(self.clock()):
            assert sequence == message > self.sent
            self.sent = sequence

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
        check(self.outbox)
        assert self.handed_on == list(range(1, len(self.handed_on) + 1))


TestHostilePeer = HostilePeer.TestCase
TestHostilePeer.settings = fewer(2, stateful_step_count=40)

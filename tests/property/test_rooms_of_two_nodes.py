"""Random lives of rooms between a prefill and a decode node: pages are never used twice, and everything comes to an end."""

import numpy as np
import pytest
from hypothesis import HealthCheck, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbridge.core.errors import (
    CapacityError,
    ConflictError,
    InvalidInputError,
    RoomFailedError,
    StaleError,
    UnknownRoomError,
)
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.digests import DigestKind
from kvbridge.pool.accounts.book import Owner, PageState
from kvbridge.tier.keys import Keys
from tests.helpers.examples import fewer
from tests.helpers.room_simulation import BEGUN, STAGES, World
from tests.helpers.rooms import PAGE
from tests.helpers.simulated_memory import PAGES, RANKS, keys_of

ROOMS = st.integers(1, 2)
GENERATIONS = st.integers(1, 3)
TOKENS = st.integers(1, 3 * PAGE)
PREFILL_ENGINES = st.sampled_from(["e0", "e1"])
DECODE_ENGINES = st.sampled_from(["a", "b"])

DELIVERY_S = 30
"""No message is on its way for longer (`timeouts.control_delivery_s`): it arrives, or a link is over."""

REFUSALS = (ConflictError, StaleError, CapacityError, UnknownRoomError, InvalidInputError, RoomFailedError)
"""The answers that a caller may get; anything else, and anything at all on a message from a peer or a worker, is a defect."""


class RoomsMachine(RuleBasedStateMachine):
    adopted = False
    digest = DigestKind.NONE
    shares = False

    @initialize(disasters=st.integers(0, 6))
    def begin_world(self, disasters):
        self.world = World(adopted=self.adopted, digest=self.digest, shares=self.shares)
        self.disasters = disasters
        """How often somebody may still die or be taken for dead; each ends most of what is under way."""

    def tried(self, call, *arguments, **fields):
        try:
            call(*arguments, **fields)
        except REFUSALS as refused:
            if "still belongs to" in str(refused):
                raise AssertionError("the engine was told too early that its pages are free") from refused

    @rule(room=ROOMS, generation=GENERATIONS, tokens=TOKENS, where=st.sampled_from([(True,), (False,), (True, False)]))
    def admit(self, room, generation, tokens, where):
        for on_prefill in where:
            self.tried(self.world.admit, Owner(room, generation), tokens, on_prefill=on_prefill)

    @rule(room=ROOMS, on_prefill=st.booleans())
    def cancel(self, room, on_prefill):
        service = self.world.prefill.service if on_prefill else self.world.decode
        coroutine = service.cancel(room, "by its client")
        with pytest.raises((StopIteration, UnknownRoomError)):
            coroutine.send(None)

    @rule(room=ROOMS, tokens=TOKENS, stage=st.sampled_from(STAGES))
    def a_room_comes_to(self, room, tokens, stage):
        self.bring(room, tokens, stage)

    def bring(self, room, tokens, stage):
        """A next attempt at a room that nobody disturbs until it has come to a stage."""
        self.world.bring(self.next_attempt(room), tokens, STAGES[: STAGES.index(stage) + 1], self.tried)

    def next_attempt(self, room):
        services = (self.world.prefill.service, self.world.decode)
        return Owner(room, 1 + max(service.book.newest_generation(room) for service in services))

    @rule(room=ROOMS, engine=PREFILL_ENGINES)
    def begin(self, room, engine):
        self.tried(self.world.begin, engine, room)

    @rule(room=ROOMS, engine=PREFILL_ENGINES, share=st.sampled_from([0.3, 1.0]), layers=st.sampled_from([None, (0, 2)]))
    def publish(self, room, engine, share, layers):
        found = self.world.prefill.service.book.attempts(room)
        upto = int(found[-1].prompt_tokens * share) if found else 1
        self.tried(self.world.publish, engine, room, upto, layers)

    @rule(room=ROOMS, engine=PREFILL_ENGINES, well=st.booleans(), again=st.booleans())
    def prefill_engine_ends(self, room, engine, well, again):
        self.tried(self.world.prefill_engine_ends, engine, room, well=well, again=again)

    @precondition(lambda self: self.world.adopted)
    @rule(room=ROOMS)
    def provide(self, room):
        self.tried(self.world.provide, room)

    @rule(room=ROOMS, engine=DECODE_ENGINES)
    def claim(self, room, engine):
        self.tried(self.world.claim, engine, room)

    @rule(room=ROOMS, engine=DECODE_ENGINES, tokens=TOKENS)
    def extend(self, room, engine, tokens):
        self.tried(self.world.decode_verbs.extend, engine, room, tokens)

    @rule(room=ROOMS, engine=DECODE_ENGINES, well=st.booleans())
    def decode_engine_ends(self, room, engine, well):
        self.tried(self.world.decode_engine_ends, engine, room, well=well)

    @rule(to_prefill=st.booleans(), count=st.integers(1, 4))
    def deliver(self, to_prefill, count):
        world = self.world
        for _ in range(count):
            if world.towards_prefill if to_prefill else world.towards_decode:
                world.deliver_to_prefill() if to_prefill else world.deliver_to_decode()
                world.check()

    @precondition(lambda self: self.disasters)
    @rule(what=st.sampled_from([World.decode_loses_prefill, World.prefill_forgets_decode, World.prefill_dies]))
    def a_node_is_lost(self, what):
        self.disasters -= 1
        what(self.world)

    @precondition(lambda self: self.disasters)
    @rule(engine=PREFILL_ENGINES | DECODE_ENGINES)
    def an_engine_dies(self, engine):
        self.disasters -= 1
        world = self.world
        dies = world.decode_engine_dies if engine in {"a", "b"} else world.prefill_engine_dies
        dies(engine)

    @precondition(lambda self: self.disasters)
    @rule(rank=st.sampled_from([*RANKS, None]))
    def a_worker_dies(self, rank):
        """`None`: the one of decode."""
        self.disasters -= 1
        if rank is None:
            self.world.decode_rank_dies()
        else:
            self.world.prefill.kill_worker(rank)

    @rule(rank=st.sampled_from(RANKS), count=st.integers(1, 6))
    def worker_reads(self, rank, count):
        worker = self.world.prefill.workers[rank]
        for _ in range(min(count, len(worker.inbox))):
            worker.read()

    @rule(
        rank=st.sampled_from(RANKS), which=st.integers(0, 3), how=st.sampled_from(["well", "stopped", "lost", "active"])
    )
    def order_ends(self, rank, which, how):
        worker = self.world.prefill.workers[rank]
        if worker.orders:
            self.world.order_ends(worker, worker.orders[which % len(worker.orders)], how=how)

    @rule(rank=st.sampled_from(RANKS), which=st.integers(0, 3), in_transit=st.booleans())
    def path_lost(self, rank, which, in_transit):
        worker = self.world.prefill.workers[rank]
        if worker.orders:
            self.world.path_lost(worker, worker.orders[which % len(worker.orders)], in_transit=in_transit)

    @rule(rank=st.sampled_from(RANKS))
    def transport_closed(self, rank):
        self.world.transport_closed(self.world.prefill.workers[rank])

    @precondition(lambda self: self.world.inspections)
    @rule()
    def inspection_ends(self):
        self.world.inspection_ends()

    @precondition(lambda self: self.world.towards_rank)
    @rule()
    def decode_rank_acts(self):
        self.world.decode_rank_acts()

    @rule(rank=st.sampled_from(RANKS), count=st.integers(1, 6))
    def worker_is_heard(self, rank, count):
        for _ in range(min(count, len(self.world.prefill.workers[rank].outbox))):
            self.world.prefill.hear(rank)
            self.world.check()

    @precondition(lambda self: self.world.ranks.orders)
    @rule(which=st.integers(0, 3), ending=st.sampled_from([{}, {}, {"changed": True}, {"error": "no kernel for it"}]))
    def decode_rank_verifies(self, which, ending):
        orders = self.world.ranks.orders
        self.world.verify(orders[which % len(orders)], **ending)

    @rule()
    def things_run_well_for_a_while(self):
        self.world.settle()

    @rule(seconds=st.sampled_from([5, 5, 5, 55]))
    def time_passes(self, seconds):
        self._wait(seconds)

    @precondition(lambda self: self.disasters)
    @rule(seconds=st.sampled_from([55, 130, 650]))
    def nothing_happens_for_long(self, seconds):
        self.disasters -= 1
        self._wait(seconds)

    def _wait(self, seconds):
        if seconds > DELIVERY_S:
            self.world.deliver_all()
        self.world.clock.advance(seconds)
        self.world.tick()

    @invariant()
    def no_page_is_used_twice(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.everybody_lets_go()
        # Whatever is not free now is waiting for a proof, and says so.
        for book, rooms in ((world.prefill.book, world.prefill.service.book), (world.book, world.decode.book)):
            for owner in book._holdings:
                assert book.state(owner) in {PageState.LEASED, PageState.QUARANTINED}, f"{owner} is {book.state(owner)}"
                assert rooms.find(*owner) is not None, f"{owner} is booked and forgotten"
        for _ in range(4):
            world.settle()
            world.everybody_lets_go()
        assert [room for room in world.prefill.service.book if not room.over] == []
        assert [room for room in world.decode.book if not room.over] == []
        assert world.free() == (PAGES, PAGES)
        assert world.book.quarantine_reasons() == {}
        if world.adopted:
            assert sorted(world.pool.unused) == list(range(PAGES))
            assert sorted(world.prefill.pool.unused) == list(range(PAGES))


class AdoptedRoomsMachine(RoomsMachine):
    """Rooms of pages that engines bring, which several of them read: what each page holds is followed as in the next machine."""

    adopted = True

    @rule(room=ROOMS, generation=GENERATIONS, begun=st.booleans())
    def hold(self, room, generation, begun):
        self.tried(self.world.hold, Owner(room, generation), begun=begun)

    @rule(room=ROOMS, generation=GENERATIONS, named=st.booleans())
    def fetch(self, room, generation, named):
        self.tried(self.world.fetch, Owner(room, generation), named=named)

    @rule(room=ROOMS, tokens=TOKENS, named=st.booleans())
    def a_request_crosses(self, room, tokens, named):
        """Prefill holds what it has computed, decode hears of it and comes when it has pages."""
        world, owner = self.world, self.next_attempt(room)
        world.prompts.setdefault(owner, tokens)
        self.tried(world.hold, owner, begun=True)
        self.tried(world.fetch, owner, named=named)
        world.settle()
        for _ in range(2):
            self.tried(world.publish, "e0", room, tokens)
        self.tried(world.provide, room)
        self.tried(world.prefill_engine_ends, "e0", room, well=True)
        world.settle(orders=False)

    @rule(room=ROOMS)
    def a_decode_request_ends(self, room):
        self.world.decode_request_ends(room)


class VerifiedRoomsMachine(RoomsMachine):
    digest = DigestKind.CRC32C

    @rule(room=ROOMS, tokens=TOKENS, ending=st.sampled_from([{}, {"changed": True}]))
    def a_room_arrives_and_is_looked_at(self, room, tokens, ending):
        self.bring(room, tokens, "arrived")
        for order in list(self.world.ranks.orders):
            self.world.verify(order, **ending)


class SharingRoomsMachine(RoomsMachine):
    """Rooms whose prompts begin alike: the last byte of what they share is followed from its writing to its eviction."""

    shares = True

    @rule(room=ROOMS, tokens=st.integers(2 * PAGE, 3 * PAGE), other=GENERATIONS, pages=st.integers(2, 3))
    def a_room_crosses_under_forged_keys(self, room, tokens, other, pages):
        """A router wants the first pages of another prompt to hold what this one computes, and names its own keys behind them."""
        world, owner = self.world, self.next_attempt(room)
        forged = keys_of(Owner(room, other), tokens)[:pages].data + keys_of(owner, tokens)[pages:].data
        self.tried(world.admit, owner, tokens, on_prefill=True)
        self.tried(world.admit, owner, tokens, on_prefill=False, keys=Keys(forged))
        world.settle()
        world.bring(owner, tokens, ("begun", "published", "finished"), self.tried)
        world.settle()

    @precondition(lambda self: self.disasters)
    @rule(on_prefill=st.booleans())
    def a_cache_is_dropped(self, on_prefill):
        self.disasters -= 1
        (self.world.prefill.prefixes if on_prefill else self.world.prefixes).drop()


LIMITS = fewer(2, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

TestRooms = RoomsMachine.TestCase
TestRooms.settings = LIMITS
TestAdoptedRooms = AdoptedRoomsMachine.TestCase
TestAdoptedRooms.settings = LIMITS
TestVerifiedRooms = VerifiedRoomsMachine.TestCase
TestVerifiedRooms.settings = LIMITS
TestSharingRooms = SharingRoomsMachine.TestCase
TestSharingRooms.settings = LIMITS


def test_rooms_one_after_another_find_what_the_ones_before_have_left():
    """Else the random lives above may show nothing."""
    machine = SharingRoomsMachine()
    machine.begin_world(disasters=0)
    world = machine.world
    for room, tokens in ((1, 3 * PAGE), (2, 2 * PAGE + 5), (1, 3 * PAGE), (2, 3 * PAGE), (1, 3 * PAGE), (1, 3 * PAGE)):
        machine.bring(room, tokens, "claimed")
        for engine in ("a", "b"):
            machine.tried(world.decode_engine_ends, engine, room, well=True)
        world.settle()
    assert world.reused["prefill"] >= 4
    assert world.reused["decode"] >= 4
    assert world.free() == (PAGES, PAGES)


def test_rooms_of_engines_own_pages_share_what_is_alike_on_both_sides():
    """Else the random lives of such rooms may show nothing."""
    machine = AdoptedRoomsMachine()
    machine.begin_world(disasters=0)
    world = machine.world
    for room, generation in ((1, 1), (2, 3)):  # which make the same prompt
        world.bring(Owner(room, generation), 2 * PAGE + 5, STAGES[:4])  # nothing is finished: all are under way at once
        world.settle()
    assert world.prefill.pool.reused == 2
    assert pages_shared(world.prefill.book) == 2
    for room in (1, 2):
        for engine in ("e0", "e1"):
            machine.tried(world.prefill_engine_ends, engine, room, well=True)
        world.settle()
    assert [event.kind for event in world.engines.events].count("committed") == 2
    assert world.free() == (PAGES, PAGES)
    for room in (1, 2):
        world.decode_request_ends(room)
    machine.bring(2, 2 * PAGE, "committed")
    assert world.pool.reused


def pages_shared(book):
    shared = [holding.shared.get(IndexSpace.FULL, ()) for holding in book._holdings.values()]
    return len(np.unique(np.concatenate([ids for ids in shared if len(ids)])))


def test_a_room_that_was_given_up_is_not_written_by_the_endpoints_of_a_later_handshake():
    """Decode has lost prefill, which knows nothing of that, and has used the room's pages again when both begin anew."""
    world = World(adopted=False)
    world.bring(Owner(1, 1), 2 * PAGE, BEGUN)
    world.publish("e0", 1, PAGE)
    world.settle()
    assert world.book.state(Owner(1, 1)) is PageState.LEASED
    world.decode_loses_prefill()
    while world.towards_rank:
        world.decode_rank_acts()
    assert world.book.state(Owner(1, 1)) is PageState.FREE
    world.admit(Owner(2, 1), PAGE, on_prefill=False)
    while world.towards_prefill:
        world.deliver_to_prefill()
    for engine in ("e0", "e1"):
        with pytest.raises(ConflictError):
            world.publish(engine, 1, 2 * PAGE)
    world.settle()
    assert world.book.state(Owner(2, 1)) is PageState.LEASED


@pytest.mark.parametrize("named", [False, True])
def test_a_room_that_decode_gives_up_before_the_nodes_have_met_is_given_up_on_prefill(named):
    world = World(adopted=True)
    owner = Owner(1, 1)
    world.prompts[owner] = 2 * PAGE
    world.hold(owner, begun=True)
    world.fetch(owner, named=named)
    assert not world.decode.book.get(1).over, "the handshake has hardly begun"
    world.decode.stop(world.decode.book.get(1), "the request was aborted")
    assert world.decode.book.get(1).over
    world.settle()
    assert world.prefill.service.book.get(1).over
    world.everybody_lets_go()
    assert world.free() == (PAGES, PAGES)

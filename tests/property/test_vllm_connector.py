"""Random lives of requests in two vLLM instances: each load and each hold is reported once, no block is used twice, nothing hangs.

vLLM is a model with vLLM's assertions, the decisions of the connector and the nodes are the real ones.
"""

import pytest
from hypothesis import HealthCheck, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvbridge.pool.accounts.book import Owner
from tests.helpers.examples import fewer
from tests.helpers.rooms import PAGE
from tests.helpers.simulated_memory import RANKS
from tests.helpers.simulated_vllm import Status
from tests.helpers.vllm_simulation import BLOCKS, Pair

SIDES = st.sampled_from(["prefill", "decode"])
CONVERSATIONS = ([1, 2, 3], [1, 2, 4], [5, 6, 7])
"""One token of each block; two begin alike."""
MOST_REQUESTS = 20


def prompt(conversation, length):
    return [token for token in CONVERSATIONS[conversation] for _ in range(PAGE)][:length]


BOTH = ("prefill", "decode")
PROMPTS = st.builds(prompt, st.integers(0, 2), st.sampled_from([1, PAGE, PAGE + 7, 2 * PAGE, 3 * PAGE - 1, 3 * PAGE]))


class ConnectorMachine(RuleBasedStateMachine):
    @initialize(recompute=st.booleans(), caches=st.booleans(), late=st.booleans(), disasters=st.integers(0, 4))
    def begin(self, recompute, caches, late, disasters):
        self.pair = Pair(recompute=recompute, caches=caches)
        self.pair.prefill.engine.reads_late = late
        self.disasters = disasters

    def side(self, name):
        return getattr(self.pair, name)

    @precondition(lambda self: self.pair.jobs < MOST_REQUESTS)
    @rule(tokens=PROMPTS)
    def prompt_arrives(self, tokens):
        self.pair.prompt_arrives(tokens)

    @precondition(lambda self: self.pair.jobs < MOST_REQUESTS)
    @rule(
        tokens=PROMPTS,
        to=st.sampled_from([BOTH, BOTH, BOTH[::-1], BOTH[:1], BOTH[1:]]),
        again=st.sampled_from([0] * 5 + [1]),
    )
    def pair_arrives(self, tokens, to, again):
        """Sometimes one of the two never comes, or both come with the room of others."""
        self.pair.pair_arrives(tokens, to=to, room=min(again, self.pair.rooms))

    @precondition(lambda self: self.pair.jobs < MOST_REQUESTS)
    @rule(
        conversation=st.integers(0, 2),
        sent=st.booleans(),
        then=st.lists(
            st.sampled_from(["preempted", "preempted", "decode aborts", "prefill aborts", "step", "settle"]), max_size=5
        ),
    )
    def a_pair_is_under_way(self, conversation, sent, then):
        """Prefill has computed some of it, and that is being sent, or has been."""
        pair = self.pair
        theirs, ours = f"p{pair.jobs + 1}", f"d{pair.jobs + 2}"
        pair.pair_arrives(prompt(conversation, 3 * PAGE))
        for side in pair.sides:
            side.link.deaf = False
        for _ in range(6):
            pair.decode.engine.step()
            pair.settle(orders=sent)
            pair.prefill.engine.step()
            pair.settle(orders=sent)
            if theirs not in pair.prefill.rooms.computing or pair.prefill.rooms._of[theirs].blocks:
                break
        for what in then:
            if what == "preempted" and theirs in pair.prefill.engine.running:
                pair.prefill.engine.preempt(theirs)
            elif what == "decode aborts" and ours in pair.decode.engine.requests:
                pair.decode.engine.abort(ours)
            elif what == "prefill aborts" and theirs in pair.prefill.engine.requests:
                pair.prefill.engine.abort(theirs)
            elif what == "settle":
                pair.settle()
            else:
                pair.prefill.engine.step()

    @precondition(lambda self: self.pair.prefill.engine.running)
    @rule(all_of_them=st.booleans())
    def prefill_preempts(self, all_of_them):
        """As when its prefix cache is reset, or another request needs the blocks."""
        engine = self.pair.prefill.engine
        for name in list(engine.running)[:: -1 if all_of_them else -len(engine.running)]:
            engine.preempt(name)

    @precondition(lambda self: self.pair.prefill.engine.answers)
    @rule(
        which=st.integers(0, 3),
        twice=st.sampled_from([False, False, True]),
        other=st.sampled_from([False] * 5 + [True]),
    )
    def answer_arrives(self, which, twice, other):
        """Sometimes two requests come with one answer, or with another prompt of the same length."""
        self.take_answer(which, twice=twice, other=other)

    @precondition(lambda self: self.pair.prefill.engine.answers)
    @rule(which=st.integers(0, 3))
    def an_answer_is_refused(self, which):
        """By decode's API, so that nobody comes for what prefill holds."""
        answers = self.pair.prefill.engine.answers
        self.pair.answer_is_refused(answers.pop(which % len(answers))[1])

    def take_answer(self, which, *, twice, other):
        answers = self.pair.prefill.engine.answers
        answered, params = answers.pop(which % len(answers))
        tokens = answered.tokens
        for _ in range(1 + twice):
            self.pair.answer_arrives(answered, params, [token + 10 for token in tokens] if other else tokens)

    @precondition(lambda self: self.pair.jobs < MOST_REQUESTS)
    @rule(tokens=PROMPTS, transfer=st.sampled_from(["not begun", "under way", "done", "reported"]))
    def a_request_crosses(self, tokens, transfer):
        """One that is computed at once, and waited for by decode; what others have under way goes on meanwhile."""
        pair = self.pair
        pair.prompt_arrives(tokens)
        for _ in range(len(tokens) // PAGE + 2):
            if not pair.prefill.engine.answers:  # decode may be through with it before prefill's next step
                pair.prefill.engine.step()
        while pair.prefill.engine.answers:
            self.take_answer(-1, twice=False, other=False)
        pair.decode.engine.step()
        if transfer != "not begun":
            pair.settle(orders=transfer != "under way")
        if transfer == "reported":
            for side in pair.sides:
                side.engine.step()

    @precondition(lambda self: self.disasters and not self.pair.prefill.link.dead)
    @rule(tokens=PROMPTS, index=st.integers(0, 1))
    def prefill_node_dies_in_a_transfer(self, tokens, index):
        """One of its ranks says at once that it has closed its transports; the other does not."""
        self.disasters -= 1
        self.a_request_crosses(tokens, "under way")
        self.pair.prefill.engine.step()
        self.pair.prefill_node_dies()
        self.pair.prefill.rank_closes(index)
        for _ in range(2):
            self.pair.prefill.engine.step()

    @rule(name=SIDES, which=st.integers(0, 5))
    def abort(self, name, which):
        engine = self.side(name).engine
        if engine.requests:
            engine.abort(sorted(engine.requests)[which % len(engine.requests)])

    @rule(name=SIDES, count=st.integers(1, 4))
    def engine_steps(self, name, count):
        for _ in range(count):
            self.side(name).engine.step()

    @rule(name=SIDES, count=st.integers(1, 4))
    def node_reads(self, name, count):
        side = self.side(name)
        for _ in range(min(count, len(side.link.posted))):
            side.node_reads()

    @rule(name=SIDES, deaf=st.booleans())
    def node_reads_or_not(self, name, deaf):
        self.side(name).link.deaf = deaf

    @rule()
    def all_runs_well_for_a_while(self):
        for _ in range(3):
            for side in self.pair.sides:
                side.engine.step()
            self.pair.settle()

    @rule(count=st.integers(1, 4))
    def messages_arrive(self, count):
        world = self.pair.world
        for _ in range(count):
            if world.inspections:
                world.inspection_ends()
            if world.towards_prefill:
                world.deliver_to_prefill()
            if world.towards_decode:
                world.deliver_to_decode()
        world.check()

    @rule(rank=st.sampled_from(RANKS), count=st.integers(1, 4))
    def worker_acts(self, rank, count):
        worker = self.pair.world.prefill.workers[rank]
        for _ in range(count):
            if worker.inbox:
                worker.read()
            if worker.outbox:
                self.pair.world.prefill.hear(rank)

    @rule(
        rank=st.sampled_from(RANKS), which=st.integers(0, 3), how=st.sampled_from(["well", "stopped", "lost", "active"])
    )
    def order_ends(self, rank, which, how):
        worker = self.pair.world.prefill.workers[rank]
        if worker.orders:
            self.pair.world.order_ends(worker, worker.orders[which % len(worker.orders)], how=how)

    @rule(rank=st.sampled_from(RANKS))
    def transport_closed(self, rank):
        self.pair.world.transport_closed(self.pair.world.prefill.workers[rank])

    @precondition(lambda self: self.pair.world.towards_rank)
    @rule()
    def decode_rank_acts(self):
        self.pair.world.decode_rank_acts()

    @rule(seconds=st.sampled_from([1, 5, 55]))
    def time_passes(self, seconds):
        if seconds > 5:
            self.pair.world.deliver_all()
        self.pair.world.clock.advance(seconds)
        self.pair.world.tick()

    @precondition(lambda self: self.disasters)
    @rule(rank=st.sampled_from(RANKS))
    def worker_dies(self, rank):
        self.disasters -= 1
        self.pair.world.prefill.kill_worker(rank)

    @precondition(lambda self: self.disasters)
    @rule()
    def decode_loses_prefill(self):
        self.disasters -= 1
        self.pair.world.decode_loses_prefill()

    @precondition(lambda self: self.disasters and not self.pair.prefill.link.dead)
    @rule()
    def prefill_node_dies(self):
        self.disasters -= 1
        self.pair.prefill_node_dies()

    @precondition(lambda self: self.disasters and not any(side.link.dead for side in self.pair.sides))
    @rule()
    def both_nodes_die(self):
        self.disasters -= 1
        self.pair.both_nodes_die()

    @rule()
    def late_bytes_arrive(self):
        self.pair.late_bytes_arrive()

    @rule(name=SIDES, index=st.integers(0, 1))
    def rank_closes(self, name, index):
        side = self.side(name)
        side.rank_closes(index % len(side.engine.closed))

    @rule(name=SIDES)
    def node_comes_back(self, name):
        self.side(name).node_comes_back()

    def teardown(self):
        if not hasattr(self, "pair"):
            return
        self.pair.come_to_rest()
        for side in self.pair.sides:
            assert sorted(side.engine.unused()) == list(range(1, 1 + BLOCKS))
            side.node_comes_back()
            for _ in range(2):  # ranks say what they have closed, and then it is said to all of them
                side.engine.step()
            assert side.rooms.idle
            assert not side.rooms._of
            assert side.engine.reports.idle
            assert not any(side.engine.pins.pinned.values())
        assert not self.pair.prefill.rooms._rooms
        assert not self.pair.prefill.rooms.has_pins


TestConnector = ConnectorMachine.TestCase
TestConnector.settings = fewer(
    2, stateful_step_count=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@pytest.mark.parametrize("recompute", [False, True])
def test_requests_that_nobody_disturbs_are_loaded_behind_what_decode_has(recompute):
    """Else the random lives above may show nothing."""
    pair = Pair(recompute=recompute)
    for conversation, length in ((0, 2 * PAGE + 3), (1, 3 * PAGE), (0, 2 * PAGE + 3), (2, 1)):
        pair.prompt_arrives(prompt(conversation, length))
        while not pair.prefill.engine.answers:
            pair.prefill.engine.step()
        answered, params = pair.prefill.engine.answers.pop()
        pair.answer_arrives(answered, params, prompt(conversation, length))
        pair.come_to_rest()
    seen = pair.decode.engine.seen
    assert (seen["good loads"], seen["failed loads"]) == (4, 0)
    assert seen["loads behind hits"] == 2
    assert pair.prefill.engine.seen["prefix hits"] == 2


def held(pair, params=None):
    """Prefill has computed a prompt and holds its blocks; returns what decode is told."""
    pair.prompt_arrives(prompt(0, 3 * PAGE))
    while not pair.prefill.engine.answers:
        pair.prefill.engine.step()
    pair.settle()
    assert len(pair.prefill.engine.unused()) == BLOCKS - 3
    return pair.prefill.engine.answers.pop()


@pytest.mark.parametrize(("away", "api_refuses"), [(False, True), (True, False), (True, True)])
def test_what_nobody_comes_for_prefill_does_not_hold_once_decode_s_node_is_there(away, api_refuses):
    """And no time passes."""
    pair = Pair(recompute=True)
    answered, params = held(pair)
    if away:
        pair.decode.node_dies()
        pair.decode.rooms.look()
    if api_refuses:
        pair.answer_is_refused(params)
    else:
        pair.answer_arrives(answered, params, prompt(0, 3 * PAGE))
        pair.decode.engine.step()
    if away:
        pair.settle()
        pair.prefill.engine.step()
        assert len(pair.prefill.engine.unused()) == BLOCKS - 3
    pair.decode.node_comes_back()
    pair.decode.engine.step()
    pair.settle()
    pair.prefill.engine.step()
    assert len(pair.prefill.engine.unused()) == BLOCKS
    pair.come_to_rest()


def arrived(pair, room):
    """How many blocks of a room are in decode's memory."""
    blocks = pair.decode.used[Owner(room, 1)]
    return sum(all(pair.world.memory.get((rank, block)) is not None for rank in RANKS) for block in blocks)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("blocks", range(2, BLOCKS))
def test_earlier_blocks_arrive_while_later_ones_are_computed(blocks, late):
    """The rest, once prefill has finished, does not grow with the prompt."""
    pair = Pair(recompute=False)
    pair.prefill.engine.reads_late = late
    room = pair.pair_arrives([token for token in range(blocks) for _ in range(PAGE)])
    pair.decode.engine.step()
    pair.settle()
    here = []
    while not pair.prefill.engine.answers:
        pair.prefill.engine.step()
        pair.settle()
        here.append(arrived(pair, room))
    behind = 2 if late else 1
    assert here == [*(max(0, step - behind) for step in range(1, blocks)), blocks]
    pair.decode.engine.step()
    assert pair.decode.engine.seen["good loads"] == 1
    pair.come_to_rest()


@pytest.mark.parametrize("caches", [False, True])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_in_a_pool_that_is_too_small_every_pair_is_served(caches, first):
    """Three prompts that fill it each, so that what is published of them has to be withdrawn again and again."""
    pair = Pair(recompute=False, caches=caches)
    order = ("prefill", "decode") if first == "prefill" else ("decode", "prefill")
    for prefix in range(3):
        pair.pair_arrives([10 * prefix + token for token in range(BLOCKS - 1) for _ in range(PAGE)], to=order)
    pair.come_to_rest()
    assert pair.prefill.engine.seen["preempted with pins"]
    assert (pair.decode.engine.seen["good loads"], pair.decode.engine.seen["failed loads"]) == (3, 0)


@pytest.mark.parametrize("times", [1, 3])
def test_decode_waits_through_preemptions_of_prefill(times):
    pair = Pair(recompute=False, caches=False)
    pair.pair_arrives([token for token in range(BLOCKS - 1) for _ in range(PAGE)])
    pair.decode.engine.step()
    pair.settle()
    for _ in range(times):
        for _ in range(3):
            pair.prefill.engine.step()
            pair.settle()
            pair.decode.engine.step()
        pair.prefill.engine.preempt("p1")
    assert pair.prefill.engine.seen["preempted with pins"] == times
    assert pair.decode.engine.requests["d2"].status is Status.LOADING
    pair.come_to_rest()
    assert pair.decode.engine.seen["good loads"] == 1


def test_an_offer_behind_a_refused_intent_writes_to_no_page_that_is_free():
    """Prefill's node refuses the intent before it reads that its engine holds the room. Decode offers before it hears that."""
    pair = Pair(recompute=True)
    for conversation, deaf in ((0, pair.prefill), (2, pair.decode), (1, None)):
        pair.prompt_arrives(prompt(conversation, 3 * PAGE))
        while not pair.prefill.engine.answers:
            pair.prefill.engine.step()
        answered, params = pair.prefill.engine.answers.pop()
        pair.answer_arrives(answered, params, answered.tokens)
        pair.decode.engine.step()
        if deaf is not pair.decode:
            pair.settle()
            for side in pair.sides:
                side.engine.step()
        if deaf is not None:
            deaf.link.deaf = True
    pair.come_to_rest()

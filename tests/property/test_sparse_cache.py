"""Whatever engines do with a hot buffer, selected rows are the very rows, and the tables agree after every verb."""

from hypothesis import HealthCheck, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.helpers.examples import fewer
from tests.helpers.sparse_simulation import SparseSimulation, check_tables, settings as sparse_settings

SLOTS = 3


class EngineAtWork(RuleBasedStateMachine):
    """Requests come, step in any batch, grow and go, in any order."""

    @initialize(
        hot_pages=st.integers(2, 4),
        ring_pages=st.integers(2, 3),
        preload=st.sampled_from([None, 0, 64]),
        page_first=st.booleans(),
        seed=st.integers(0, 1 << 16),
    )
    def open(self, hot_pages, ring_pages, preload, page_first, seed):
        options = sparse_settings(
            hot_rows=64 * hot_pages,
            top_k=64,
            ring_pages=ring_pages,
            preload_rows=preload,
            max_requests=SLOTS,
            max_tokens=4096,
        )
        self.world = SparseSimulation(options, host_pages=60, page_first=page_first, seed=seed)

    @rule(
        slot=st.integers(0, SLOTS - 1),
        tokens=st.integers(0, 2600),
        more=st.integers(4, 1200),
        named=st.none() | st.just(0),
    )
    def admit(self, slot, tokens, more, named):
        if slot not in self.world.requests:
            self.world.admit(slot, tokens, more_tokens=more, named_pages=named)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data(), count=st.integers(1, 70))
    def step(self, data, count):
        able = [slot for slot in self.world.requests if self.world.can_step(slot)]
        batch = data.draw(st.lists(st.sampled_from(able), unique=True) if able else st.just([]))
        padding = data.draw(st.integers(0, SLOTS - len(batch)))
        for number in range(count):
            if all(self.world.can_step(slot) for slot in batch):
                self.world.step(batch, padding=padding, verify=number % 8 == 0 or number == count - 1)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def extend(self, data):
        slot = data.draw(st.sampled_from(sorted(self.world.requests)))
        if len(self.world.requests[slot].reserved):
            self.world.extend(slot)

    @precondition(lambda self: self.world.requests)
    @rule(data=st.data())
    def release(self, data):
        self.world.release(data.draw(st.sampled_from(sorted(self.world.requests))))

    def teardown(self):
        if hasattr(self, "world"):
            check_tables(self.world.cache)
            for slot in list(self.world.requests):
                self.world.verify_host(slot)


TestEngineAtWork = EngineAtWork.TestCase
TestEngineAtWork.settings = fewer(
    4, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)

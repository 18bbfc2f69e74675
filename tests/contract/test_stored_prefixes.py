"""Prefixes that go to a real store by way of host pages and come back: whole, in time, or not at all, whatever the store does."""

import asyncio
import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbridge.config.tier import HostTier, StoreLimits, TierConfig
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.tiers import copied_components
from kvbridge.core.ids import IndexSpace, Rank
from kvbridge.core.prefixes import Evicted
from kvbridge.node.prefix_fetch import ORDER_PAGES
from kvbridge.node.stored_prefixes import StoredPrefixes
from kvbridge.pool.accounts.book import NO_ROOM, Owner, PageBook, PageState
from kvbridge.pool.memory.layout import RankPart, copy_placement
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import Keys
from kvbridge.tier.prefix_cache import PrefixCache
from kvbridge.tier.stores import client as store_client
from kvbridge.tier.stores.client import BreakerState, Operation
from kvbridge.tier.stores.objects import ObjectForm, Outcome, Verb, linked
from tests.contract.stores_harness import KINDS, READY_S, Looped, settings_of
from tests.helpers.cluster import eventually
from tests.helpers.local_servers import stop
from tests.helpers.prefix_recount import check_cache
from tests.helpers.stored_pages import new_keys

FULL, SWA, FULL_COPY, SWA_COPY = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.FULL_COPY, IndexSpace.SWA_COPY
TOTAL = {FULL: 48, SWA: 4, FULL_COPY: 96, SWA_COPY: 8}


class Node(Looped):
    """The cache of a prefill node, real twins in shared memory, and a store in a process of its own. Tests write the twins."""

    def __init__(self, store: Any, folder: Path, *, prefetch_s: float = READY_S, **limits: float) -> None:
        super().__init__()
        self.geometry = preset("tiny-v4")
        part = RankPart.of(self.geometry, Rank(pp=0, tp=0), pp_size=1, tp_size=1)
        components = copied_components(self.geometry, frozenset(), checkpoints=True)
        counts = {space: TOTAL[space] for space in (FULL_COPY, SWA_COPY)}
        self.pool = MemoryPool.in_files(
            copy_placement(self.geometry, [part], components, page_counts=counts),
            folder,
            f"twins-{os.urandom(4).hex()}",
        )
        self.book = PageBook(TOTAL)
        index = PrefixIndex((FULL,), TOTAL[FULL] + TOTAL[FULL_COPY], has_copies=True)
        self.cache = PrefixCache(self.book, index, restores=True)
        self.forms = {
            space: ObjectForm(region for region in self.pool.regions if region.space is space)
            for space in (FULL_COPY, SWA_COPY)
        }
        self.rooms, self.copies = count(1), count(1)
        self.random = np.random.default_rng()
        settings = TierConfig(
            enabled=True,
            model_name="tiny",
            model_revision="1",
            host=HostTier(pages=TOTAL[FULL_COPY]),
            store=store,
            prefetch_s=prefetch_s,
            store_limits=StoreLimits(**{"start_s": READY_S, "settle_s": 1.0, "remember_s": 0.0} | limits),
        )
        assert self.cache.copies is not None
        self.stored = StoredPrefixes(self.cache, self.cache.copies, self.book, settings, self.geometry)
        self.run(self._open())

    async def _open(self) -> None:
        self.stored.open(self.pool.shared_regions(), (), log_level="warning")

    @property
    def process(self):
        return self.stored.client

    def until_ready(self) -> None:
        self.until("the store process is ready", lambda: not self.process.why_not)

    def close(self) -> None:
        self.run(self.stored.close(6.0))
        self.close_loop()
        check_cache(self.cache)
        assert not self.book.quarantine_reasons()
        self.pool.close()

    def read(self, space: IndexSpace, page: int) -> bytes:
        form = self.forms[space]
        addresses = form.addresses(np.array([page], dtype=np.int32).reshape(1, -1))[0].tolist()
        return b"".join(map(ctypes.string_at, addresses, form.lengths))

    def write(self, space: IndexSpace, page: int, data: bytes) -> None:
        form, at = self.forms[space], 0
        for address, length in zip(
            form.addresses(np.array([page], dtype=np.int32).reshape(1, -1))[0].tolist(), form.lengths, strict=True
        ):
            ctypes.memmove(address, data[at : at + length], length)
            at += length

    def computed(self, keys: Keys, *, checkpoint: bool = True) -> list[bytes]:
        """Have a prompt computed, kept and backed up; return what its twins hold, the checkpoint's last."""
        owner = Owner(next(self.rooms), 1)
        got = self.cache.admit(owner, keys, lambda shared: {FULL: len(keys) - shared[FULL], SWA: int(checkpoint)})
        start = got.prefix_pages
        assert not got.copies
        self.cache.keep(owner, keys, start, {FULL: got.own[FULL]})
        if checkpoint:
            self.cache.keep_checkpoint(owner, len(keys), got.own[SWA])
        self.cache.let_go(owner)
        self.book.free(owner)
        backup = self.cache.copies.start_backup(Owner(NO_ROOM, next(self.copies)), keys, at_most=len(keys))
        for device, twins in backup.moves.values():
            for page in twins.tolist():
                space = SWA_COPY if device is backup.moves.get(SWA, (None,))[0] else FULL_COPY
                self.write(space, page, self.random.bytes(self.forms[space].payload_bytes))

        async def end() -> None:
            self.cache.copies.end_backup(backup, done=True)

        self.run(end())
        return self.held(keys)

    def left_in_store(self, keys: Keys) -> list[bytes]:
        """The same, until nothing of it is here but what the store has."""
        held = self.computed(keys)
        self.until_written()
        self.forget()
        return held

    def held(self, keys: Keys) -> list[bytes]:
        """Return the bytes of a prompt on the host: its pages, then the checkpoints."""
        looking = self.cache.copies.pin(keys)
        found = [self.read(FULL_COPY, page) for page in looking.pages[FULL_COPY].tolist()]
        found += [self.read(SWA_COPY, page) for ids in looking.checkpoints.values() for page in ids.tolist()]
        self.cache.copies.unpin(looking)
        return found

    def until_written(self) -> None:
        client = self.stored.client
        stored = self.stored
        self.until("all is written", lambda: not (stored.waiting or stored.to_forget or client.unsettled) and self.idle)

    @property
    def idle(self) -> bool:
        return not self.cache.copies._pinned

    def forget(self) -> None:
        """Drop everything here, and overwrite it."""
        self.cache.drop()
        check_cache(self.cache)
        for space in (FULL_COPY, SWA_COPY):
            assert self.book.available_pages()[space] == TOTAL[space]
            for page in range(TOTAL[space]):
                self.write(space, page, bytes(self.forms[space].payload_bytes))

    def fetch(self, keys: Keys) -> float:
        """Have a request look for its prompt; return how long it waited."""
        begun_s = time.monotonic()
        self.run(self.stored.prefetch(keys))
        check_cache(self.cache)
        return time.monotonic() - begun_s

    def counted(self, verb: Verb) -> dict[str, int]:
        return {outcome.value: n for (asked, outcome), n in self.stored.client.counts.items() if asked is verb}

    def all_free(self) -> None:
        self.until("no page is kept from others", lambda: not self.book.quarantine_reasons())
        counts = self.book.counts()
        for space in (FULL_COPY, SWA_COPY):
            assert counts[space][PageState.LEASED] == counts[space][PageState.HELD] == 0


async def seen(look: Callable[[], object]) -> None:
    """Look at each step of the loop until something is so, that may not be so for long."""
    ends_s = time.monotonic() + READY_S
    while not look():
        assert time.monotonic() < ends_s
        await asyncio.sleep(0)


@contextmanager
def node_of(kind: str, **limits: float) -> Iterator[Node]:
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path,
        settings_of(kind, Path(path)) as (settings, _),
    ):
        node = Node(settings, Path(path), **limits)
        try:
            node.until_ready()
            yield node
        finally:
            node.close()


@pytest.fixture(scope="module", params=KINDS)
def shared(request: pytest.FixtureRequest) -> Iterator[Node]:
    with node_of(request.param) as node:
        yield node


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    yield shared
    shared.until_written()
    shared.forget()
    shared.all_free()


def test_a_prompt_comes_back_from_the_store_when_this_node_has_nothing_of_it(node: Node):
    keys = new_keys(2 * ORDER_PAGES + 3)
    held = node.left_in_store(keys)
    before = node.counted(Verb.PUT)
    node.fetch(keys)
    assert node.held(keys) == held
    assert node.cache.restorable(keys) == len(keys)
    node.until_written()
    assert node.counted(Verb.PUT) == before, "what comes from there is not written again"


def test_what_goes_on_from_what_is_here_comes_alone(node: Node):
    keys = new_keys(12)
    first = node.computed(keys[:5])
    held = node.computed(keys)
    node.until_written()
    node.cache.drop(Evicted.INTEGRITY, node.cache.index.match(keys)[5 : 5 + 1])
    assert node.held(keys) == first
    hits = node.counted(Verb.GET).get("hit", 0)
    node.fetch(keys)
    assert node.held(keys)[:12] == held[:12]
    assert node.counted(Verb.GET)["hit"] - hits == 7 + 1, "seven pages and the checkpoint at their end"


def test_a_prompt_that_leaves_what_is_stored_gets_it_as_far_as_a_checkpoint(node: Node):
    keys = new_keys(9)
    node.computed(keys[:4])
    held = node.left_in_store(keys)
    other = Keys(keys[:6].data + new_keys(3).data)
    node.fetch(other)
    assert node.cache.restorable(other) == 4, "behind it an engine could not go on"
    assert node.held(other)[:4] == held[:4]


def test_requests_for_one_prompt_fetch_it_once(node: Node):
    keys = new_keys(6)
    held = node.left_in_store(keys)
    hits = node.counted(Verb.GET).get("hit", 0)

    async def together() -> None:
        await asyncio.gather(*(node.stored.prefetch(keys) for _ in range(8)))

    node.run(together())
    assert node.held(keys) == held
    assert node.counted(Verb.GET)["hit"] - hits == 6 + 1


def test_a_request_that_is_given_up_leaves_its_fetch_to_itself(node: Node):
    keys = new_keys(6)
    held = node.left_in_store(keys)

    async def give_up() -> None:
        request = asyncio.create_task(node.stored.prefetch(keys))
        await asyncio.sleep(0)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    node.run(give_up())
    node.until("the fetch has ended", lambda: not node.stored._fetching)
    assert node.held(keys) == held


def test_keys_that_are_no_chain_find_nothing_beyond_their_own(node: Node):
    """Whoever sends them may know keys of other prompts, and must not have pages enter in places that are not theirs."""
    keys, others = new_keys(5), new_keys(5)
    held = node.computed(keys[:2])
    node.computed(keys)
    node.computed(others)
    node.until_written()
    node.forget()
    node.fetch(Keys(keys[:2].data + others[2:].data))
    assert node.held(keys) == held
    node.fetch(Keys(others[:1].data + others[:1].data + others[1:].data))
    assert node.held(others) == []
    node.fetch(others)
    assert node.cache.restorable(others) == 5


def test_what_is_dropped_is_not_in_the_store_any_more(node: Node):
    keys, others = new_keys(6), new_keys(3)
    node.computed(keys)
    node.computed(others)
    node.until_written()
    node.forget()
    dropped = node.run(node.stored.drop())
    assert (dropped.outcome, dropped.reason) == ("dropped", "")
    assert dropped.objects >= 6 + 3 + 2, "pages, and a checkpoint each"
    for prompt in (keys, others):
        node.fetch(prompt)
        assert node.held(prompt) == []
    held = node.left_in_store(keys)
    node.fetch(keys)
    assert node.held(keys) == held, "what came afterwards is stored again"


def test_pages_that_are_forgotten_are_not_in_the_store_any_more(node: Node):
    """Engines say different tokens of them; what comes before them, and another prompt, stays."""
    keys, others = new_keys(9), new_keys(3)
    first = node.computed(keys[:4])
    node.computed(keys)
    held = node.computed(others)
    node.until_written()
    node.forget()
    node.stored.forget([*pairwise(keys)][3:])
    node.fetch(keys)
    assert node.held(keys) == first, "nobody fetches them while they wait to be dropped"
    node.until_written()
    for prompt, wanted in ((keys, first), (others, held)):
        node.fetch(prompt)
        assert node.held(prompt) == wanted
    node.forget()
    held = node.left_in_store(keys)
    node.fetch(keys)
    assert node.held(keys)[4:9] == held[4:9], "what came afterwards is stored again"


def test_what_is_being_fetched_when_it_is_forgotten_does_not_stay(node: Node):
    keys = new_keys(40)
    node.left_in_store(keys)

    async def fetch_and_forget() -> None:
        fetching = asyncio.create_task(node.stored.prefetch(keys))
        await seen(lambda: any(operation.verb is Verb.GET for operation in node.stored.client.unsettled))
        node.stored.forget([(b"", keys[0]), *pairwise(keys)])
        await fetching

    node.run(fetch_and_forget())
    assert node.held(keys) == []


def test_a_store_that_does_not_answer_is_said_to_keep_what_it_has_and_drops_it_when_it_does_again():
    with node_of("files") as node:
        keys, others = new_keys(3), new_keys(3)
        for prompt in (keys, others):
            node.computed(prompt)
        node.until_written()
        node.forget()
        os.kill(node.process.pid, signal.SIGKILL)
        node.until("it is gone", lambda: node.process.why_not)
        dropped = node.run(node.stored.drop())
        assert (dropped.outcome, dropped.objects) == ("failed", 0)
        assert dropped.reason
        node.stored.forget([(b"", keys[0]), *pairwise(keys)])
        node.until_ready()
        node.until_written()
        node.fetch(keys)
        assert node.held(keys) == []
        node.fetch(others)
        assert node.held(others)
        assert node.run(node.stored.drop()).outcome == "dropped"


def test_what_is_being_written_and_fetched_when_all_is_dropped_does_not_stay(node: Node):
    keys, others = new_keys(40), new_keys(20)
    node.left_in_store(keys)

    async def fetch_and_drop() -> Any:
        fetching = asyncio.create_task(node.stored.prefetch(keys))
        await seen(lambda: node.stored._fetching)
        dropped = await node.stored.drop()
        await fetching
        return dropped

    assert node.run(fetch_and_drop()).outcome == "dropped"
    assert node.held(keys) == []
    node.computed(others)

    async def drop_while_it_is_written() -> Any:
        await seen(node.stored.writing.locked)
        node.cache.drop()
        return await node.stored.drop()

    assert node.run(drop_while_it_is_written()).outcome == "dropped"
    node.until_written()
    node.fetch(others)
    assert node.held(others) == []


def test_what_a_request_fetches_while_all_is_dropped_does_not_stay(node: Node):
    """It begins after the drop and may find pages that are not gone yet."""
    keys = new_keys(40)
    node.left_in_store(keys)

    async def drop_and_fetch() -> Any:
        dropping = asyncio.create_task(node.stored.drop())
        await seen(lambda: node.stored.dropping)
        await node.stored.prefetch(keys)
        return await dropping

    assert node.run(drop_and_fetch()).outcome == "dropped"
    assert node.held(keys) == []
    assert not node.stored.dropping


@pytest.fixture(scope="module")
def files() -> Iterator[Node]:
    with node_of("files") as node:
        yield node


def test_a_lie_in_the_middle_ends_the_prefix_before_it(files: Node):
    keys = new_keys(7)
    files.computed(keys[:2])
    held = files.left_in_store(keys)
    [page_form, _] = files.stored.client._forms
    name = f"{page_form.name.hex()}-{linked(keys)[4].hex()}"
    path = files.stored.settings.store.directory / name[-2:] / name
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 4]))
    files.fetch(keys)
    assert files.held(keys)[:4] == held[:4]
    assert len(files.held(keys)) < 7
    assert files.counted(Verb.GET)[Outcome.WRONG_DIGEST] == 1
    files.forget()
    files.all_free()


def test_a_store_that_hangs_costs_a_request_its_deadline_and_later_ones_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_client, "FIRST_OPEN_S", 2.0)  # twenty requests, on a machine that is busy
    with node_of("files", prefetch_s=0.3, failures=2, settle_s=READY_S) as node:
        keys = new_keys(5)
        node.left_in_store(keys)
        pid = node.process.pid
        stop(pid)
        for _ in range(2):
            assert node.fetch(keys) >= 0.29
        assert node.stored.client.breaker.state is BreakerState.OPEN
        asked = node.stored.client._number
        for _ in range(20):
            node.fetch(keys)
        assert node.stored.client._number <= asked + 1, "one tries whether it works again"
        os.kill(pid, signal.SIGCONT)
        eventually("it works again", lambda: node.fetch(keys) and node.cache.restorable(keys) == 5, READY_S)
        node.all_free()


def intercept(node, monkeypatch, wanted, act):
    """Begin the orders of a kind by `act`, which gets the form and what begins the order; return the process's pid."""
    begin, pid = node.stored.client.begin, node.process.pid

    def begun(verb: Verb, form: int, *given: Any, **named: Any) -> Operation:
        go_on = partial(begin, verb, form, *given, **named)
        return act(form, go_on) if verb is wanted else go_on()

    monkeypatch.setattr(node.stored.client, "begin", begun)
    return pid


def test_pages_of_a_get_that_has_not_ended_are_nobodys_until_the_process_has(monkeypatch: pytest.MonkeyPatch):
    with node_of("files", prefetch_s=0.5, settle_s=0.5) as node:
        keys = new_keys(5)
        held = node.left_in_store(keys)

        def hang(_: int, go_on: Callable[[], Operation]) -> Operation:
            stop(pid)
            return go_on()

        pid = intercept(node, monkeypatch, Verb.GET, hang)
        node.fetch(keys)
        monkeypatch.undo()
        assert node.held(keys) == []
        assert node.stored.prefetches["late"] == 1
        counts = node.book.counts()
        assert counts[FULL_COPY][PageState.QUARANTINED] + counts[SWA_COPY][PageState.QUARANTINED] == 6
        assert any("tier.prefetch_s" in why for why in node.book.quarantine_reasons())
        node.all_free()
        assert not Path(f"/proc/{pid}").exists(), "only its end proves that it writes no more"
        node.until_ready()
        eventually("it is fetched in time", lambda: node.fetch(keys) and node.held(keys) == held, READY_S)


def test_a_store_that_becomes_slow_gives_what_has_come_by_the_deadline(monkeypatch: pytest.MonkeyPatch):
    with node_of("files", prefetch_s=2.0, settle_s=READY_S) as node:
        keys = new_keys(TOTAL[FULL])
        held = node.left_in_store(keys)
        asked = []

        def slower(form: int, go_on: Callable[[], Operation]) -> Operation:
            if len(asked) == 2:  # one of those has been answered, else this one would not be asked for
                stop(pid)
            operation = go_on()
            asked.append((form, operation))
            return operation

        pid = intercept(node, monkeypatch, Verb.GET, slower)
        node.fetch(keys)
        os.kill(pid, signal.SIGCONT)
        outcomes = [outcome for form, operation in asked if form == 0 for outcome in operation.answer.result().outcomes]
        came = list(takewhile(lambda outcome: outcome is Outcome.HIT, outcomes))
        assert len(came) < len(keys)
        assert node.held(keys)[: len(came)] == held[: len(came)]
        assert node.cache.known(keys) == len(came)
        node.all_free()


def test_a_process_that_is_killed_in_the_middle_loses_nothing_but_time(files: Node, monkeypatch: pytest.MonkeyPatch):
    keys = new_keys(5)

    def killed(_: int, go_on: Callable[[], Operation]) -> Operation:
        monkeypatch.undo()
        stop(pid)
        operation = go_on()
        os.kill(pid, signal.SIGKILL)
        return operation

    pid = intercept(files, monkeypatch, Verb.PUT, killed)
    held = files.computed(keys)
    files.until("it was killed", lambda: not Path(f"/proc/{pid}").exists())
    files.until_ready()
    files.until_written()
    assert files.held(keys) == held, "the host has it still"
    keys = new_keys(5)
    held = files.left_in_store(keys)
    pid = intercept(files, monkeypatch, Verb.GET, killed)
    files.fetch(keys)
    assert files.held(keys) == []
    files.all_free()
    files.until_ready()
    files.fetch(keys)
    assert files.held(keys) == held
    files.forget()


def test_a_full_store_takes_what_it_can_and_the_host_keeps_the_rest(files: Node):
    settings = files.stored.settings.store
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path:
        half_a_page = files.forms[FULL_COPY].object_bytes // 2
        small = settings.model_copy(update={"directory": Path(path) / "store", "max_bytes": half_a_page})
        node = Node(small, Path(path))
        try:
            node.until_ready()
            keys = new_keys(3)
            held = node.computed(keys, checkpoint=False)
            node.until_written()
            assert node.counted(Verb.PUT) == {"full": 3}
            assert node.held(keys) == held
            assert node.stored.client.breaker.state is BreakerState.CLOSED
        finally:
            node.close()

"""Prefixes that stay on a prefill node: what a room starts from, what it leaves behind, and when."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.wire.engine_messages import Pages
from kvbridge.core.wire.messages import Abort, Drained, Offer, to_wire
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.core.wire.worker_messages import OpenRoom, RoomClosed, Send, Sent
from kvbridge.node.room_pages import RoomSettings
from kvbridge.node.sender.room import SenderPorts, SenderRoom
from kvbridge.node.sender.rooms import sender_rooms
from kvbridge.pool.accounts.book import PageBook
from kvbridge.pool.accounts.page_states import PageState
from kvbridge.tier.index import PrefixIndex
from kvbridge.tier.keys import PrefixIdentity, page_keys
from kvbridge.tier.prefix_cache import PrefixCache
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import (
    DECODE,
    R0,
    R1,
    SENDER_LIMITS,
    EngineVerbs,
    FakeEngines,
    FakePeers,
    FakeWorkers,
    RecordedEvents,
    pages_in,
    pick,
)

V4, GQA = preset("tiny-v4"), preset("tiny-gqa")
PAGE = V4.tokens_per_page
IDENTITY = PrefixIdentity(model="tiny", revision="1", fingerprint="0" * 64, tokens_per_page=PAGE)
HISTORY = list(range(1_000, 1_000 + 20 * PAGE))
FULL, SWA = IndexSpace.FULL, IndexSpace.SWA


def hashes(tokens: list[int]) -> bytes:
    return page_keys(IDENTITY, tokens).data


@dataclass
class Bench:
    """A sending service that keeps prefixes, and all that surrounds it."""

    geometry: object = V4
    pages: int = 64
    windows: int = 16
    ranks: tuple = (R0,)
    interval: int = 0
    clock: ManualClock = field(default_factory=ManualClock)

    def __post_init__(self) -> None:
        spaces = {FULL: self.pages}
        if self.geometry is V4:
            spaces |= {SWA: self.windows, IndexSpace.REQUEST: 8}
        self.book = PageBook(spaces)
        self.cache = PrefixCache(self.book, PrefixIndex((FULL,), self.pages), clock=self.clock)
        self.workers, self.peers = FakeWorkers(*self.ranks, geometry=self.geometry), FakePeers()
        self.engines, self.events = FakeEngines("engine"), RecordedEvents()
        self.service = sender_rooms(
            SenderPorts(
                book=self.book,
                workers=self.workers,
                nodes=self.peers,
                engines=self.engines,
                events=self.events,
                prefixes=self.cache,
            ),
            RoomSettings(
                geometry=self.geometry,
                shares_prefixes=True,
                limits=SENDER_LIMITS,
                checkpoint_interval_tokens=self.interval,
            ),
            clock=self.clock,
        )
        self.verbs = EngineVerbs(self.service)

    def admit(self, room: int, tokens: list[int], *, keyed: bool = True) -> SenderRoom:
        found = hashes(tokens) if keyed else b""
        request = AdmissionRequest(room=room, prompt_tokens=len(tokens), page_hashes=found)
        self.service.requests.admit(request)
        return self.service.book.get(room)

    def begin(self, room: int, tokens: list[int], ranks=None, **more) -> Pages:
        found = self.verbs.begin(
            "engine",
            ranks or self.ranks,
            room,
            prompt_tokens=len(tokens),
            tables={},
            page_hashes=hashes(tokens),
            **more,
        )
        assert isinstance(found, Pages)
        return found

    def offer(self, room: int, tokens: list[int], held: int = 0) -> None:
        ids = np.arange(-(-len(tokens) // PAGE) - held // PAGE, dtype=np.int32)
        table = PageTable(FULL, ids, held // PAGE)
        self.service.peers.offer(
            DECODE,
            Offer(
                room=room, generation=1, prompt_tokens=len(tokens), prefix_tokens=held, tables=to_wire({FULL: table})
            ),
        )

    def orders(self, room: int) -> list[Send]:
        return [order for order in pick(self.workers.messages, Send) if order.room == room]

    def sent(self, room: int, **more) -> None:
        """Every order of a room has ended."""
        for rank in self.ranks:
            for order in pick(self.workers.messages, Send, rank):
                if order.room == room:
                    ended = Sent(room=room, generation=1, rank=rank, order=order.order, **more)
                    self.service.workers.sent(ended)

    def closed(self, room: int, *, quiet: bool = True) -> None:
        for rank in self.ranks:
            self.service.workers.room_closed(RoomClosed(room=room, generation=1, rank=rank, quiet=quiet))

    def publish(self, room: int, tokens: list[int], **more) -> None:
        self.verbs.publish("engine", self.ranks, room, upto_token=len(tokens), layers=None, **more)

    def finish(self, room: int, written: tuple[int, ...] = (), **more) -> None:
        self.verbs.finish("engine", self.ranks, room, metadata=b"", checkpoints=written, **more)

    def compute(self, room: int, tokens: list[int], *, skip: bool = False) -> Pages:
        """The engine's part, with every checkpoint that is asked for unless it skips them."""
        begun = self.begin(room, tokens)
        self.publish(room, tokens)
        self.finish(room, () if skip else tuple(one.tokens for one in begun.checkpoints))
        return begun

    def cross(self, room: int, tokens: list[int], *, held: int = 0, skip: bool = False) -> Pages:
        """A whole room."""
        self.admit(room, tokens)
        self.offer(room, tokens, held)
        begun = self.compute(room, tokens, skip=skip)
        self.sent(room)
        self.check()
        return begun

    def check(self) -> None:
        self.cache.check_integrity()

    def quiet(self) -> None:
        """Nothing but the cache has pages."""
        self.check()
        for counts in self.book.counts().values():
            used = {state for state, count in counts.items() if count}
            assert used <= {PageState.FREE, PageState.CACHED}


def ids(pages: Pages, space: IndexSpace = FULL) -> list[int]:
    table = next(table for table in pages.tables if table.space is space)
    return np.frombuffer(table.ids, "<i4").tolist()


# ------------------------------------------------------------------------------------------- turns


def test_the_second_turn_starts_where_the_first_left_a_checkpoint() -> None:
    bench = Bench()
    first = bench.cross(1, HISTORY[:1000])
    assert first.computed_tokens == 0
    assert first.restore is None
    assert [one.tokens for one in first.checkpoints] == [768]
    second = bench.cross(2, HISTORY[:1500])
    assert second.computed_tokens == 768
    assert ids(second)[:3] == ids(first)[:3]
    assert not set(ids(second)[3:]) & set(ids(first)[:3])
    assert second.restore is not None
    assert second.restore.tokens == 768
    assert second.restore.table == first.checkpoints[0].table
    assert second.restore.table.first_page == 2
    assert [one.tokens for one in second.checkpoints] == [1280]
    assert bench.service.book.report(2).computed_tokens == 768
    assert bench.service.book.report(2).prefix_tokens == 0
    bench.quiet()
    assert pages_in(bench.book, PageState.CACHED) == 5 + 2


@pytest.mark.parametrize("behind", [0, 1, 2, 3, 4, 127, 128, 129, 255])
def test_the_same_prompt_again_computes_less_than_a_page(behind: int) -> None:
    bench, tokens = Bench(), HISTORY[: 3 * PAGE + behind]
    computed = [bench.cross(room, tokens).computed_tokens for room in (1, 2, 3)]
    if behind:
        assert computed == [0, 3 * PAGE, 3 * PAGE]
    else:  # the first left one at the prompt's very end, the second where it left what it knew
        assert computed == [0, 0, 2 * PAGE]
    longer = bench.cross(4, HISTORY[: 5 * PAGE])
    assert longer.computed_tokens == 3 * PAGE, "a whole prompt is a prefix, too"
    bench.quiet()


def test_where_a_second_request_leaves_a_prefix_the_third_goes_on() -> None:
    bench = Bench()
    bench.cross(1, HISTORY[:1500])
    second = bench.cross(2, [*HISTORY[:600], *range(900)])
    assert second.computed_tokens == 0, "there is no checkpoint at its end"
    assert [one.tokens for one in second.checkpoints] == [512, 1280]
    third = bench.cross(3, [*HISTORY[:600], *range(5, 300)])
    assert third.computed_tokens == 512
    assert ids(third)[:2] == ids(bench.cross(4, [*HISTORY[:513], 1]))[:2]


def test_a_checkpoint_every_so_many_tokens() -> None:
    bench = Bench(interval=2 * PAGE)
    first = bench.cross(1, HISTORY[: 7 * PAGE + 5])
    assert [one.tokens // PAGE for one in first.checkpoints] == [2, 4, 6, 7]
    assert bench.cross(2, [*HISTORY[: 5 * PAGE], 3]).computed_tokens == 4 * PAGE


def test_a_model_without_windows_goes_on_at_every_pages_end() -> None:
    bench = Bench(geometry=GQA)
    tokens_per_page = GQA.tokens_per_page
    assert tokens_per_page == PAGE
    assert bench.cross(1, HISTORY[:1500]).checkpoints == ()
    second = bench.cross(2, [*HISTORY[:600], 1, 2])
    assert (second.computed_tokens, second.restore, second.checkpoints) == (512, None, ())
    bench.quiet()


def test_without_its_checkpoint_a_prefix_is_computed_again() -> None:
    bench = Bench()
    bench.cross(1, HISTORY[:1000], skip=True)
    second = bench.cross(2, HISTORY[:1500])
    assert second.computed_tokens == 0
    assert [one.tokens for one in second.checkpoints] == [768, 1280], "and is asked for again"
    assert bench.cross(3, HISTORY[:1500]).computed_tokens == 1280
    bench.quiet()


def test_a_checkpoint_that_has_been_evicted_leaves_the_one_before_it() -> None:
    bench = Bench(windows=4)
    bench.cross(1, HISTORY[:600])
    bench.cross(2, HISTORY[:1000])
    assert bench.cross(3, HISTORY[:1001]).computed_tokens == 768
    evicted = bench.cache.evict({SWA: 1})  # that at 512 was used longest ago
    bench.book.uncache(evicted)
    assert bench.cross(4, HISTORY[:1002]).computed_tokens == 768
    bench.book.uncache(bench.cache.evict({SWA: 1}))
    found = bench.cross(5, HISTORY[:1003])
    assert found.computed_tokens == 0
    bench.quiet()


def test_a_checkpoint_that_does_not_fit_is_left_out() -> None:
    bench = Bench(windows=1)
    assert bench.cross(1, HISTORY[:1000]).checkpoints == ()
    assert bench.cross(2, HISTORY[:1500]).computed_tokens == 0
    bench.quiet()


def test_requests_without_keys_share_nothing() -> None:
    bench = Bench()
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1000], keyed=False)
    begun = bench.begin(2, HISTORY[:1000])
    assert (begun.computed_tokens, begun.checkpoints) == (0, ())
    assert not set(ids(begun)) & set(bench.book.cached_pages()[FULL].tolist())


# ------------------------------------------------------------------------------------------- sending


@pytest.mark.parametrize("held", [0, 256, 768, 1280])
def test_rows_that_decode_lacks_are_sent_out_of_shared_pages_before_the_engine_begins(held: int) -> None:
    bench = Bench()
    first = bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    assert not bench.orders(2)
    bench.offer(2, HISTORY[:1500], held)
    section = bench.orders(2)[0].section
    assert (section.start_token, section.stop_token, section.prefix_tokens) == (0, 768, held)
    opening = pick(bench.workers.messages, OpenRoom)[-1]
    source = next(table for table in opening.source if table.space is FULL)
    assert np.frombuffer(source.ids, "<i4")[:3].tolist() == ids(first)[:3]
    begun = bench.compute(2, HISTORY[:1500])
    assert (begun.prefix_tokens, begun.computed_tokens) == (held, 768)
    assert [order.section.start_token for order in bench.orders(2)] == [0, 768]
    bench.sent(2)
    found = bench.service.book.report(2)
    assert (found.prefix_tokens, found.computed_tokens) == (held, 768)
    bench.quiet()


def test_an_engine_cannot_publish_less_than_the_node_holds() -> None:
    bench = Bench()
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    bench.begin(2, HISTORY[:1500])
    with pytest.raises(ConflictError, match="goes backwards"):
        bench.publish(2, HISTORY[:700])


# ------------------------------------------------------------------------------------------- when pages stay


def test_pages_stay_when_they_are_sent_and_written_and_not_before() -> None:
    bench = Bench()
    bench.admit(1, HISTORY[:1000])
    bench.offer(1, HISTORY[:1000])
    bench.compute(1, HISTORY[:1000])
    assert bench.admit(2, HISTORY[:1500]).computed_tokens == 0
    bench.sent(1)
    assert bench.admit(3, HISTORY[:1500]).computed_tokens == 768


def test_what_an_engine_has_not_finished_does_not_stay() -> None:
    bench = Bench()
    bench.admit(1, HISTORY[:1000])
    bench.begin(1, HISTORY[:1000])
    bench.publish(1, HISTORY[:1000])
    bench.verbs.abort("engine", 1, "enough")
    assert pages_in(bench.book, PageState.CACHED) == 0
    bench.quiet()


def test_what_an_engine_has_finished_stays_after_an_abort() -> None:
    bench = Bench()
    bench.admit(1, HISTORY[:1000])
    bench.offer(1, HISTORY[:1000])
    bench.compute(1, HISTORY[:1000])
    bench.service.peers.abort(DECODE, Abort(room=1, generation=1, code="aborted", message="enough"))
    assert pages_in(bench.book, PageState.CACHED) == 0, "an order is under way"
    bench.closed(1)
    assert bench.admit(2, HISTORY[:1500]).computed_tokens == 768


@pytest.mark.parametrize("released", [True, False])
def test_what_a_gpu_has_yet_to_write_stays_when_it_says_so_itself(released: bool) -> None:
    """An engine that dies in between may have written anything: only its own word counts."""
    bench = Bench()
    bench.admit(1, HISTORY[:1000])
    begun = bench.begin(1, HISTORY[:1000], by_gpu=True)
    bench.publish(1, HISTORY[:1000], after={str(R0): StreamPoint(ring="ring", handle=bytes(64), device_uuid="0" * 32)})
    bench.finish(1, tuple(one.tokens for one in begun.checkpoints), by_gpu=True)
    bench.service.peers.abort(DECODE, Abort(room=1, generation=1, code="aborted", message="not ours"))
    bench.service.driver.stop(bench.service.book.get(1), "enough")
    assert pages_in(bench.book, PageState.CACHED) == 0
    if released:
        bench.verbs.release("engine", 1, generation=1)
    else:
        bench.service.engines.gone("engine", "killed")
        bench.service.engines.ended("engine")
    assert pages_in(bench.book, PageState.CACHED) == (4 if released else 0)
    bench.quiet()


def test_what_a_dead_worker_has_had_does_not_stay() -> None:
    bench = Bench()
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1500])
    bench.offer(2, HISTORY[:1500])
    bench.compute(2, HISTORY[:1500])
    bench.service.workers.gone(R0, "killed")
    bench.cache.drop()  # as the daemon does
    assert pages_in(bench.book, PageState.CACHED) == 0
    bench.quiet()


def test_all_ranks_have_to_have_written_a_checkpoint() -> None:
    bench = Bench(ranks=(R0, R1))
    tokens = HISTORY[:1000]
    bench.admit(1, tokens)
    bench.offer(1, tokens)
    for rank, written in ((R0, (768,)), (R1, ())):
        begun = bench.begin(1, tokens, ranks=(rank,))
        assert [one.tokens for one in begun.checkpoints] == [768]
        bench.verbs.publish("engine", (rank,), 1, upto_token=len(tokens), layers=None)
        bench.verbs.finish("engine", (rank,), 1, metadata=b"", checkpoints=written)
    bench.sent(1)
    assert pages_in(bench.book, PageState.CACHED) == 3
    assert bench.admit(2, HISTORY[:1500]).computed_tokens == 0


def test_a_checkpoint_that_nobody_asked_for_is_refused() -> None:
    bench = Bench()
    bench.admit(1, HISTORY[:1000])
    bench.begin(1, HISTORY[:1000])
    bench.publish(1, HISTORY[:1000])
    with pytest.raises(InvalidInputError, match="did not ask for"):
        bench.finish(1, (512,))
    bench.finish(1, (768,))


# ------------------------------------------------------------------------------------------- who reads what


def test_a_prefix_is_pinned_until_nothing_of_the_room_is_in_flight() -> None:
    """A transport that is not quiet may still read the shared pages."""
    bench = Bench(pages=8)
    bench.cross(1, HISTORY[:1000])
    bench.admit(2, HISTORY[:1100])
    bench.offer(2, HISTORY[:1100])
    bench.begin(2, HISTORY[:1100])
    bench.verbs.abort("engine", 2, "enough")
    bench.closed(2, quiet=False)
    assert bench.book.available_pages()[FULL] == 8 - 5, "the prefix and its own pages"
    bench.check()
    bench.closed(2)
    assert pick(bench.peers.messages, Drained)
    assert bench.book.available_pages()[FULL] == 8
    bench.quiet()


def test_two_rooms_share_a_prefix_and_one_of_them_dies() -> None:
    bench = Bench()
    first = bench.cross(1, HISTORY[:1000])
    for room in (2, 3):
        bench.admit(room, HISTORY[: 1200 + room])
        bench.offer(room, HISTORY[: 1200 + room])
    shared = [ids(bench.begin(room, HISTORY[: 1200 + room]))[:3] for room in (2, 3)]
    assert shared == [ids(first)[:3]] * 2
    bench.service.driver.fail(bench.service.book.get(2), "worker_gone", "killed")
    bench.closed(2)
    bench.check()
    bench.verbs.abort("engine", 2, "it has failed")
    bench.check()
    bench.publish(3, HISTORY[:1203])
    bench.finish(3)
    bench.sent(3)
    assert bench.service.book.report(3).state == "completed"
    assert bench.cross(4, HISTORY[:1001]).computed_tokens == 768
    bench.quiet()


def test_two_rooms_that_compute_the_same_at_once_keep_one() -> None:
    bench = Bench()
    for room in (1, 2):
        bench.admit(room, HISTORY[:1000])
        bench.offer(room, HISTORY[:1000])
    for room in (1, 2):
        bench.compute(room, HISTORY[:1000])
        bench.sent(room)
    assert pages_in(bench.book, PageState.CACHED) == 3 + 1
    bench.quiet()

"""Cached pages that are looked at before a room shares them: what rank workers are asked, and what follows from their answers."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.digests import DigestKind, PageDigests
from kvbridge.core.session.receiver import ReceiverState
from kvbridge.core.wire.messages import Digests, Offer
from kvbridge.core.wire.worker_messages import Digested, Verified, Verify
from kvbridge.telemetry.events import CachedPagesDiffer
from tests.helpers.rooms import GEOMETRY, PAGE, PREFILL, R0, RECEIVER_LIMITS, pick
from tests.unit.node.test_shared_prompts import Bench, keys_of

FULL = IndexSpace.FULL
PART = GEOMETRY.components[0]


@pytest.fixture
def bench():
    bench = Bench(verifies_hits=True)
    yield bench
    bench.prefixes.check_integrity()


def asked(bench: Bench) -> list[Verify]:
    return [order for order in pick(bench.ranks.messages, Verify) if order.order]


def values(first: int, pages: int, *, wrong: int | None = None) -> tuple[PageDigests, ...]:
    """What the bytes of these pages lead to, in every layer; `wrong` is a page that has changed in one."""
    each = np.tile(np.arange(first, first + pages, dtype="<u4") + 77, (len(PART.layers), 1))
    if wrong is not None:
        each[0, wrong - first] ^= 1
    return (
        PageDigests(
            component=PART.kind,
            lane_start=0,
            lane_stop=PART.lanes,
            layers=PART.layers,
            first_page=first,
            values=each.tobytes(),
        ),
    )


def answer(bench: Bench, order: Verify, *, wrong: int | None = None, **fields) -> None:
    about = {"room": order.room, "generation": order.generation, "rank": R0, "order": order.order}
    first = order.prefix_tokens // PAGE
    pages = order.prompt_tokens // PAGE - first
    bench.service.workers.digested(Digested(**about, digests=values(first, pages, wrong=wrong)))
    bench.service.workers.verified(Verified(**about, **fields))


def warm(bench: Bench, pages: int = 4) -> None:
    """Pages of a prompt, and what they held when they came."""
    bench.whole(1, pages * PAGE)
    [order] = asked(bench)
    assert (order.prefix_tokens, order.prompt_tokens) == (0, pages * PAGE)
    answer(bench, order)


def test_a_room_is_offered_once_its_pages_have_been_looked_at(bench):
    warm(bench)
    room = bench.admit(2, 5 * PAGE)
    assert (room.state, room.waits_for) == (ReceiverState.RESERVED, "the digests of the cached pages that it shares")
    order = asked(bench)[1]
    assert (order.prefix_tokens, order.prompt_tokens) == (0, 4 * PAGE)
    assert tables_from_wire(order.tables)[FULL].ids.tolist() == room.tables[FULL].ids[:4].tolist()
    answer(bench, order)
    assert (room.state, room.prefix_tokens) == (ReceiverState.OFFERED, 4 * PAGE)
    bench.done(room)
    assert room.state is ReceiverState.COMMITTED


@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_a_page_that_has_changed_goes_with_all_behind_it_and_the_room_goes_on(bench, wrong):
    warm(bench)
    room = bench.admit(2, 5 * PAGE)
    before = room.tables[FULL].ids.tolist()
    answer(bench, asked(bench)[1], wrong=wrong)
    assert (room.state, room.prefix_tokens) == (ReceiverState.OFFERED, wrong * PAGE)
    assert room.tables[FULL].ids.tolist()[:wrong] == before[:wrong]
    offer = pick(bench.nodes.messages, Offer)[-1]
    own = bench.book.pages(room.owner)[FULL].tolist()
    assert offer.prefix_tokens == wrong * PAGE
    assert sorted(tables_from_wire(offer.tables)[FULL].ids.tolist()) == sorted(own)
    assert len(own) == 7 - wrong, "its own pages are for all that it does not share"
    [fact] = [fact for fact in bench.events.facts if isinstance(fact, CachedPagesDiffer)]
    assert (dict(fact.pages), fact.dropped, fact.readers) == ({PART.kind: 1}, 4 - wrong, ())
    assert keys_of(5 * PAGE)[wrong].hex() in fact.first[0]
    assert f"page {before[wrong]} of 'full'" in fact.first[0]
    assert bench.admit(3, 5 * PAGE).prefix_tokens == wrong * PAGE
    bench.done(room)
    assert room.state is ReceiverState.COMMITTED
    assert bench.cached == 5


def test_rooms_that_read_such_a_page_are_named(bench):
    warm(bench)
    reader = bench.admit(2, 5 * PAGE)
    answer(bench, asked(bench)[1])
    bench.admit(3, 5 * PAGE)
    answer(bench, asked(bench)[2], wrong=1)
    [fact] = [fact for fact in bench.events.facts if isinstance(fact, CachedPagesDiffer)]
    assert fact.readers == (reader.room,)


def test_a_pool_without_other_pages_fails_the_room_and_says_why(bench):
    warm(bench)
    sibling, room = bench.admit(2, 4 * PAGE), bench.admit(3, 5 * PAGE)
    bench.book.reserve(room.owner._replace(room=99), {FULL: bench.free})
    answer(bench, asked(bench)[1])
    answer(bench, asked(bench)[2], wrong=1)
    assert (room.state, room.reason_code) == (ReceiverState.FAILED, "capacity")
    assert "cached pages of its prompt have changed in memory" in room.reason
    assert sibling.state is ReceiverState.OFFERED


def test_a_room_that_ends_meanwhile_leaves_the_finding(bench):
    warm(bench)
    room = bench.admit(2, 5 * PAGE)
    bench.service.driver.stop(room, "a test")
    assert room.state is ReceiverState.ABORTED
    assert bench.book.counts()[FULL], "its pages are pinned for as long as they are looked at"
    answer(bench, asked(bench)[1], wrong=1)
    assert bench.admit(3, 5 * PAGE).prefix_tokens == PAGE


def test_ranks_that_do_not_answer_in_time_fail_the_room_and_keep_no_page(bench):
    warm(bench)
    room = bench.admit(2, 5 * PAGE)
    bench.clock.advance(RECEIVER_LIMITS.verify_s + 1)
    bench.tick()
    assert (room.state, room.reason_code) == (ReceiverState.FAILED, "deadline")
    assert "timeouts.verify_s" in room.reason
    answer(bench, asked(bench)[1], wrong=1)  # too late: nobody listens
    assert bench.prefixes.pages() == (0, 4)


def test_a_worker_that_ends_fails_the_room_and_keeps_no_page(bench):
    warm(bench)
    room = bench.admit(2, 5 * PAGE)
    bench.service.workers.gone(R0, "killed")
    assert (room.state, room.reason_code) == (ReceiverState.FAILED, "worker_gone")
    assert bench.prefixes.pages() == (0, 4)


def test_ranks_that_cannot_look_fail_the_room(bench):
    warm(bench)
    room = bench.admit(2, 5 * PAGE)
    order = asked(bench)[1]
    bench.service.workers.verified(
        Verified(room=2, generation=1, rank=R0, order=order.order, error_code="unsupported", error="no such kernel")
    )
    assert (room.state, room.reason_code) == (ReceiverState.FAILED, "unsupported")
    assert bench.prefixes.pages() == (0, 4)


def test_digests_that_both_sides_agreed_upon_are_the_pages(bench):
    bench = Bench(verifies_hits=True, digest=DigestKind.CRC32C)
    room = bench.admit(1, 4 * PAGE)
    sent = Digests(room=1, generation=1, writer=R0, part=0, digests=values(0, 4))
    bench.service.peers.hear(PREFILL, sent)
    bench.done(room, digest_parts=1)
    [arrival] = pick(bench.ranks.messages, Verify)
    answer(bench, arrival)
    assert room.state is ReceiverState.COMMITTED
    assert not asked(bench), "nobody reads the same bytes once more"
    bench.admit(2, 5 * PAGE)
    answer(bench, asked(bench)[0], wrong=2)
    assert bench.service.book.get(2).prefix_tokens == 2 * PAGE
    bench.prefixes.check_integrity()


def test_who_does_not_want_it_asks_nobody(bench):
    bench = Bench()
    bench.whole(1, 4 * PAGE)
    room = bench.admit(2, 5 * PAGE)
    assert (room.state, room.prefix_tokens) == (ReceiverState.OFFERED, 4 * PAGE)
    assert not pick(bench.ranks.messages, Verify)

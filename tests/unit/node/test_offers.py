from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.tables import MOST_PAGES, check_demand, further_tables, joined_tables, tables_from_wire
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.wire.messages import Offer, WireTable, to_wire
from kvbridge.node.sender import offers
from kvbridge.node.sender.offers import EarlyOffers, check_offer
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import GEOMETRY, PAGE


def table(*ids: int, space: IndexSpace = IndexSpace.FULL, first_page: int = 0) -> PageTable:
    return PageTable(space, np.array(ids, dtype=np.int32), first_page)


def offer(room: int = 1, generation: int = 1, **fields) -> Offer:
    fields = {"prompt_tokens": PAGE, "tables": to_wire({IndexSpace.FULL: table(3)})} | fields
    return Offer(room=room, generation=generation, **fields)


def wire(ids: bytes, space: IndexSpace = IndexSpace.FULL) -> WireTable:
    return WireTable(space=space, ids=ids)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt_tokens": PAGE + 1}, "prefill admitted"),
        ({"prefix_tokens": 3}, "must be a multiple"),
        ({"prefix_tokens": 2 * PAGE}, "at most"),
        ({"tables": (wire(b"abc"),)}, "malformed"),
        ({"tables": (wire(b"\0\0\0\0"), wire(b"\0\0\0\0"))}, "twice"),
        ({"tables": (wire(b"\xff\xff\xff\xff"),)}, "negative"),
    ],
)
def test_an_offer_that_cannot_be_right_is_named(fields, complaint):
    check_offer(offer(), GEOMETRY, prompt_tokens=PAGE)
    with pytest.raises(InvalidInputError, match=complaint):
        check_offer(offer(**fields), GEOMETRY, prompt_tokens=PAGE)


def test_the_first_offer_of_an_attempt_counts():
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    assert early.put("a", offer()) is None
    assert early.put("a", offer()) is None
    turned_away = early.put("b", offer())
    assert turned_away is not None
    assert turned_away.peer == "b"
    early.withdraw("b", 1, 1)
    taken = early.take(1, 1)
    assert taken is not None
    assert taken.peer == "a"
    assert early.take(1, 1) is None


def test_offers_wait_for_a_while_and_an_offer_sent_again_does_not_stop_the_others(monkeypatch):
    clock = ManualClock()
    early = EarlyOffers(wait_s=10, clock=clock)
    early.put("a", offer(1))
    clock.advance(5)
    early.put("b", offer(2))
    early.put("a", offer(1))
    clock.advance(5)
    assert [late.offer.room for late in early.expired()] == [1]
    clock.advance(5)
    assert [late.offer.room for late in early.expired()] == [2]
    assert len(early) == 0


def test_a_room_that_decode_was_told_is_held_is_not_waited_for_as_long():
    clock = ManualClock()
    early = EarlyOffers(wait_s=10, clock=clock)
    early.put("a", offer(1))
    early.put("a", offer(2, held=True))
    assert early.expired() == []
    clock.advance(offers.HELD_WAIT_S)
    assert [late.offer.room for late in early.expired()] == [2]
    clock.advance(10)
    assert [late.offer.room for late in early.expired()] == [1]


def test_the_oldest_makes_room(monkeypatch):
    monkeypatch.setattr(offers, "MOST_OFFERS", 2)
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    assert [early.put("a", offer(room)) for room in (1, 2)] == [None, None]
    pushed_out = early.put("a", offer(3))
    assert pushed_out is not None
    assert pushed_out.offer.room == 1
    assert len(early) == 2


def test_nobody_crowds_the_others_out(monkeypatch):
    monkeypatch.setattr(offers, "MOST_BYTES", 20 * offers.OFFER_BYTES)
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    assert early.put("modest", offer(1)) is None
    turned_away = [early.put("greedy", offer(room)) for room in range(2, 100)]
    assert {late.peer for late in turned_away if late} == {"greedy"}
    assert len(early) <= 20
    assert early.take(1, 1) is not None
    assert sum(late is not None for late in turned_away) + len(early) == 98, "each is kept or turned away"


def test_a_lost_peer_takes_its_offers_along():
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    early.put("a", offer(1))
    early.put("b", offer(2))
    early.forget_peer("a")
    assert early.take(1, 1) is None
    early.withdraw("b", 2, 1)
    assert len(early) == 0


def test_tables_are_compared_and_joined_by_what_they_name():
    one = {IndexSpace.FULL: table(1, 2)}
    for same in (
        {},
        {IndexSpace.FULL: table(1)},
        {IndexSpace.FULL: table(1, 2)},
        {IndexSpace.FULL: table(2, first_page=1)},
    ):
        assert not further_tables(one, same)
    for other in (table(2, 1), table(1, 3, 4), table(4, first_page=3), table(1, 3, first_page=1)):
        with pytest.raises(ConflictError, match="which are others or do not follow"):
            further_tables(one, {IndexSpace.FULL: other})
    behind = {IndexSpace.FULL: table(2, first_page=1)}
    with pytest.raises(ConflictError):
        further_tables(behind, one)
    for named in (table(1, 2, 3), table(2, 3, first_page=1), table(3, first_page=2)):
        further = further_tables(one, {IndexSpace.FULL: named})[IndexSpace.FULL]
        assert (further.first_page, further.ids.tolist()) == (2, [3])
    swa = {IndexSpace.SWA: table(1, space=IndexSpace.SWA, first_page=1)}
    assert further_tables(one, swa) == swa
    more = {IndexSpace.FULL: table(3), IndexSpace.SWA: table(9, space=IndexSpace.SWA, first_page=4)}
    together = joined_tables(one, more)
    assert together[IndexSpace.FULL].ids.tolist() == [1, 2, 3]
    assert together[IndexSpace.SWA].first_page == 4
    assert one[IndexSpace.FULL].ids.tolist() == [1, 2]


def test_tables_survive_the_wire_and_a_request_must_fit_into_one():
    tables = {IndexSpace.FULL: table(5, 6)}
    assert tables_from_wire(to_wire(tables))[IndexSpace.FULL].ids.tolist() == [5, 6]
    check_demand({IndexSpace.FULL: MOST_PAGES})
    with pytest.raises(InvalidInputError, match="at most"):
        check_demand({IndexSpace.FULL: MOST_PAGES + 1})

from __future__ import annotations

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import IndexSpace
from kvbridge.core.wire.messages import Offer, WireTable, to_wire
from kvbridge.node.sender import offers
from kvbridge.node.sender.offers import EarlyOffers, check_offer
from tests.helpers.manual_clock import ManualClock
from tests.helpers.rooms import GEOMETRY, PAGE, pages_table


def offer(room: int = 1, **fields) -> Offer:
    fields = {"prompt_tokens": PAGE, "tables": to_wire(pages_table(3))} | fields
    return Offer(room=room, generation=1, **fields)


def wire(*ids: bytes) -> dict[str, object]:
    return {"tables": tuple(WireTable(space=IndexSpace.FULL, ids=each) for each in ids)}


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt_tokens": PAGE + 1}, "prefill admitted"),
        ({"prefix_tokens": 3}, "must be a multiple"),
        ({"prefix_tokens": 2 * PAGE}, "at most"),
        (wire(b"abc"), "malformed"),
        (wire(bytes(4), bytes(4)), "twice"),
        (wire(b"\xff\xff\xff\xff"), "negative"),
    ],
)
def test_an_offer_that_cannot_be_right_is_named(fields, complaint):
    check_offer(offer(), GEOMETRY, prompt_tokens=PAGE)
    with pytest.raises(InvalidInputError, match=complaint):
        check_offer(offer(**fields), GEOMETRY, prompt_tokens=PAGE)


def test_the_first_offer_of_an_attempt_counts_and_a_lost_peer_takes_its_offers_along():
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    assert early.put("a", offer())
    assert early.put("a", offer())
    assert not early.put("b", offer())
    early.withdraw("b", 1, 1)
    assert early.take(1, 1).peer == "a"
    assert early.take(1, 1) is None
    early.put("a", offer())
    early.put("b", offer(2))
    early.forget_peer("a")
    assert (early.take(1, 1), len(early)) == (None, 1)


@pytest.mark.parametrize(
    ("bound", "most", "kept"),
    [
        ("MOST_PEER_BYTES", 20 * offers.OFFER_BYTES + 999, 20),
        ("MOST_BYTES", 20 * offers.OFFER_BYTES + 999, 19),
        ("MOST_OFFERS", 20, 19),
    ],
)
def test_nobody_crowds_the_others_out(monkeypatch, bound, most, kept):
    monkeypatch.setattr(offers, bound, most)
    early = EarlyOffers(wait_s=10, clock=ManualClock())
    assert early.put("modest", offer(1))
    assert sum(early.put("greedy", offer(room)) for room in range(2, 100)) == kept
    assert early.take(1, 1) is not None
    for room in range(2, 2 + kept):
        early.withdraw("greedy", room, 1)
    assert sum(early.put("greedy", offer(room)) for room in range(100, 200)) >= kept, "what has gone counts no more"

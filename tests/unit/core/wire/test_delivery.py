"""Each rule of delivery by itself; the property tests put them together."""

import pytest

from kvbridge.core.errors import CapacityError, ProtocolError
from kvbridge.core.wire.codec import Acks
from kvbridge.core.wire.delivery import DeliverySettings, Inbox, Outbox

SETTINGS = DeliverySettings(resend_first_s=0.05, resend_most_s=1.0, give_up_s=10.0, window=4, max_held=6)


def outbox(*messages, now_s=0.0):
    box = Outbox(SETTINGS)
    for message in messages:
        box.post(message, now_s=now_s)
    return box


def test_the_window_holds_back_and_opens_with_acks():
    box = outbox(*"abcdef")
    assert len(box.take_new(0.0)) == 4
    with pytest.raises(CapacityError, match="6 messages wait"):
        box.post("g", now_s=0.0)
    box.acknowledge(Acks(2), now_s=0.0)
    assert [sent.sequence for sent in box.take_new(0.0)] == [5, 6]
    assert box.floor == 3
    box.acknowledge(Acks(6), now_s=0.0)
    assert len(box) == 0
    assert box.wake_at_s == float("inf")


def test_giving_up_moves_the_floor_and_wakes_what_waits_behind():
    box, inbox = Outbox(SETTINGS), Inbox(SETTINGS)
    box.post("a", now_s=0.0, give_up_s=1.0)
    box.post("b", now_s=0.0)
    lost, arrived = box.take_new(0.0)
    assert inbox.accept(arrived.sequence, "b", floor=box.floor).ready == []
    box.acknowledge(inbox.acks(), now_s=0.0)
    assert lost.sequence == 1
    assert [(item.message, item.age_s) for item in box.take_expired(1.0)] == [("a", 1.0)]
    (again,) = box.take_due(1.0)
    assert again.sequence == 2
    receipt = inbox.accept(again.sequence, "b", floor=box.floor)
    assert (receipt.verdict, receipt.ready) == ("duplicate", ["b"])
    box.acknowledge(inbox.acks(), now_s=0.0)
    assert len(box) == 0


def test_a_slow_peer_is_given_more_time():
    box = Outbox(SETTINGS)
    for number in range(100):
        box.post(number, now_s=float(number))
        box.take_new(float(number))
        box.acknowledge(Acks(number + 1), now_s=number + 0.2)
    box.post("a", now_s=200.0)
    box.take_new(200.0)
    assert box.take_due(200.39) == []
    assert len(box.take_due(200.41)) == 1


def test_acks_of_what_was_never_sent_are_refused_whole():
    box = outbox("a", "b")
    box.take_new(0.0)
    for acks in (Acks(3), Acks(1, (9,))):
        with pytest.raises(ProtocolError, match="only 2 were sent"):
            box.acknowledge(acks, now_s=0.0)
    assert len(box) == 2


def test_beyond_the_window_nothing_is_kept_nor_acknowledged():
    inbox = Inbox(SETTINGS)
    assert inbox.accept(5, "e", floor=1).verdict == "beyond_window"
    assert inbox.accept(4, "d", floor=1).verdict == "new"
    assert inbox.acks() == Acks(0, (4,))
    assert inbox.accept(10**9, "z", floor=10**9) == ("new", ["z"])


def test_resends_back_off_from_50_ms_to_1_s():
    box = outbox("a")
    assert [sent.sequence for sent in box.take_new(0.0)] == [1]
    times = []
    for _ in range(8):
        now_s = box.wake_at_s
        times.append(round(now_s, 3))
        assert box.take_due(now_s - 1e-6) == []
        assert [sent.message for sent in box.take_due(now_s)] == ["a"]
    assert times == [0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.55, 4.55]


def test_what_arrived_out_of_order_is_not_sent_again():
    box = outbox(*"abc")
    box.take_new(0.0)
    box.acknowledge(Acks(0, (2,)), now_s=0.0)
    assert [sent.sequence for sent in box.take_due(0.05)] == [1, 3]
    box.acknowledge(Acks(3), now_s=0.0)
    assert len(box) == 0

"""Each rule of delivery by itself; the property tests put them together."""

import pytest

from kvbridge.core.errors import ProtocolError
from kvbridge.core.wire.delivery import DeliverySettings, Outbox

SETTINGS = DeliverySettings(resend_first_s=0.05, resend_most_s=1.0, give_up_s=10.0, window=4, max_held=6)


def outbox(*messages, now_s=0.0):
    box = Outbox(SETTINGS)
    for message in messages:
        box.post(message, now_s=now_s)
    return box


def test_the_oldest_message_says_when_a_link_is_given_up():
    box = outbox("a")
    box.post("b", now_s=1.0)
    box.take_new(1.0)
    assert box.gives_up_at_s == 10.0
    with pytest.raises(ProtocolError, match="message 3 is acknowledged, but only 2 were sent"):
        box.acknowledge(3, now_s=9.0)
    for _ in range(2):  # an acknowledgement that comes late changes nothing
        box.acknowledge(1, now_s=9.0)
    assert box.gives_up_at_s == 11.0
    box.post("c", now_s=9.5)
    assert box.abandon(11.0) == [("b", 10.0), ("c", 1.5)]
    assert (len(box), box.gives_up_at_s, box.wake_at_s) == (0, float("inf"), float("inf"))
    box.post("d", now_s=12.0)
    assert [sequence for sequence, _ in box.take_new(12.0)] == [4]


def test_resends_back_off_from_50_ms_to_1_s_until_the_peer_acknowledges_something():
    box = outbox(*"ab")
    assert [sequence for sequence, _ in box.take_new(0.0)] == [1, 2]
    times = []
    for _ in range(8):
        now_s = box.wake_at_s
        times.append(round(now_s, 3))
        assert box.take_due(now_s - 1e-6) == []
        assert [message for _, message in box.take_due(now_s)] == ["a", "b"]
    assert times == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.6, 3.6]
    box.acknowledge(1, now_s=4.0)
    assert round(box.wake_at_s, 3) == 4.05
    assert [message for _, message in box.take_due(4.05)] == ["b"]

"""How long a rank worker rests while a GPU copies, and while none does."""

from __future__ import annotations

import pytest

from kvbridge.worker.rank import BUSY_PAUSE_S, SHORTEST_PAUSE_S, Pauses
from tests.helpers.manual_clock import ManualClock


def test_a_gpus_transfer_is_answered_for_within_a_fiftieth_of_its_time() -> None:
    clock = ManualClock()
    pauses = Pauses(clock, with_gpu=True)
    assert pauses.next_s() == SHORTEST_PAUSE_S
    for waited_s, expected_s in ((0.002, 0.00004), (0.004, 0.00008), (1.0, BUSY_PAUSE_S)):
        pauses.moved()
        clock.advance(waited_s)
        assert pauses.next_s() == pytest.approx(expected_s)
    pauses.moved()
    assert pauses.next_s() == SHORTEST_PAUSE_S

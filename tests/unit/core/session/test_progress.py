from __future__ import annotations

import pytest

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.plan.operations import Section
from kvbridge.core.session.prefill import RankProgress


def section(start, stop, layers=None, prefix=0):
    return Section(prompt_tokens=100, prefix_tokens=prefix, start_token=start, stop_token=stop, layers=layers)


def test_what_decode_holds_waits_for_what_follows():
    progress = RankProgress((0, 1), prompt_tokens=100, computed_tokens=40)
    assert progress.next_sections(40) == []
    progress.publish(60)
    assert progress.next_sections(40) == [section(0, 60, prefix=40)]
    whole = RankProgress((0, 1), prompt_tokens=100)
    whole.publish(99)
    assert whole.next_sections(100) == []
    whole.publish(100)
    assert whole.next_sections(100) == [section(0, 100, prefix=100)], (
        "windows and states are sent whatever decode holds"
    )


def test_layers_that_are_equally_far_go_together():
    progress = RankProgress((0, 1, 2), prompt_tokens=100)
    progress.publish(60, (0, 2))
    assert progress.published_tokens == 0
    assert progress.next_sections(0) == [section(0, 60, (0, 2))]
    progress.publish(60, (1,))
    progress.publish(100, (2,))
    assert progress.next_sections(0) == [section(0, 60, (1,)), section(60, 100, (2,))]
    assert progress.published_tokens == 60


@pytest.mark.parametrize(
    ("upto", "layers", "error"),
    [
        (101, None, InvalidInputError),
        (50, (7,), InvalidInputError),
        (10, None, ConflictError),
        (10, (0, 1), ConflictError),
    ],
)
def test_a_wrong_publication_is_refused(upto, layers, error):
    progress = RankProgress((0, 1), prompt_tokens=100)
    progress.publish(20, (1,))
    with pytest.raises(error):
        progress.check(upto, layers)


def test_a_rank_without_layers_has_nothing_to_wait_for():
    progress = RankProgress((), prompt_tokens=100)
    assert progress.complete
    assert progress.next_sections(0) == []

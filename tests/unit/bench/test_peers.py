"""What the comparison with SGLang asks of both sides."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench.peers.__main__ import LENGTHS_TOKENS, PAGES, SHAPES, sglang_pages, steps_of
from tests.bench.peers.figures import STEPS
from tests.bench.peers.kvbridge_pair import PAGE_TOKENS, Crossed


@pytest.mark.parametrize("tokens", LENGTHS_TOKENS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_pages_lie_in_the_runs_that_the_shape_names(shape, tokens) -> None:
    count = tokens // PAGE_TOKENS
    for pages in sglang_pages(tokens, shape.sglang_run, np.random.default_rng(0)):
        assert len(set(pages)) == count
        assert 0 <= min(pages) <= max(pages) < PAGES
        cuts = np.flatnonzero(np.diff(pages) != 1) + 1
        assert {len(run) for run in np.split(np.array(pages), cuts)} == {shape.sglang_run or count}


def test_the_steps_of_a_request_are_all_of_it() -> None:
    told = {"admit_to_offer": 1.0, "offer_to_order": 2.0, "plan": 3.0, "first_byte": 5.0, "move": 7.0}
    told |= {"offer_to_sent": 17.0, "offer_to_commit": 20.0, "admit_to_commit": 21.0, "commit_to_claim": 4.0}
    steps = steps_of(Crossed(30.0, told, 1, 1, 1.0))
    assert sum(steps.values()) == 30.0
    assert steps["request"] == 5.0
    assert set(steps) == set(STEPS)

"""The demo's prompts cover every edge of a cache, and a few of them most."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.testbed.demo.lengths import (
    DEFAULT_PROMPTS,
    DEFAULT_SPARSE_PROMPTS,
    prompt_lengths,
    sparse_prompt_lengths,
)


def test_the_default_set_covers_every_edge():
    lengths = prompt_lengths()
    assert len(lengths) == len(set(lengths)) == DEFAULT_PROMPTS
    assert {length % 4 for length in lengths} == {0, 1, 2, 3}
    assert {0, 1, 2, 3, 127} <= {length % 128 for length in lengths}
    assert {0, 1, 2, 3, 255} <= {length % 256 for length in lengths}
    assert {1, 2, 3} <= set(lengths), "shorter than a block of 4"
    assert any(4 <= length < 127 for length in lengths), "shorter than the window"
    assert {127, 128, 129} <= set(lengths), "at the window's edge"
    assert max(lengths) > 4000


def test_a_few_prompts_are_spread_over_the_edges():
    first = prompt_lengths(8)
    assert {length % 4 for length in first} == {0, 1, 2, 3} or {length % 256 for length in first} >= {0, 1, 3, 255}
    assert min(first) < 4
    assert max(first) > 1000


@pytest.mark.parametrize("count", [1, 3, 24, 60])
def test_more_prompts_begin_with_the_fewer(count):
    assert prompt_lengths(count) == prompt_lengths(100)[:count]


def test_a_short_model_gets_short_prompts():
    lengths = prompt_lengths(40, most_tokens=300)
    assert len(lengths) == 40
    assert all(1 <= length <= 300 for length in lengths)


def test_no_prompt_is_no_demo():
    with pytest.raises(InvalidInputError):
        prompt_lengths(0)


def test_sparse_prompts_are_long_and_end_at_every_edge_of_a_row():
    lengths = sparse_prompt_lengths()
    assert len(lengths) == DEFAULT_SPARSE_PROMPTS
    assert {length % 4 for length in lengths} == {0, 1, 2, 3}
    assert {0, 1, 3} <= {length % 256 for length in lengths}
    assert min(lengths) > 2000


@pytest.mark.parametrize("count", [1, 3, 4, 5, 60])
def test_more_sparse_prompts_begin_with_the_fewer(count):
    lengths = sparse_prompt_lengths(count)
    assert lengths == sparse_prompt_lengths(100)[:count]
    assert len(set(lengths)) == count
    assert all(2000 <= length <= 4099 for length in lengths)


@pytest.mark.parametrize(("count", "most"), [(0, 1 << 20), (1, 4000)])
def test_what_leaves_no_sparse_prompt_is_refused(count, most):
    with pytest.raises(InvalidInputError):
        sparse_prompt_lengths(count, most_tokens=most)

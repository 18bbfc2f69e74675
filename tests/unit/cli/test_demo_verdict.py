"""One wrong logit is found, named, and turns the verdict."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.cli.demo.verdict import Comparison, compare, read_logits, verdict_line
from kvbridge.core.errors import InvalidInputError


@pytest.fixture
def logits():
    return np.random.default_rng(7).normal(size=(17, 256)).astype(np.float32)


def test_equal_logits_are_equal(logits):
    comparison = compare(3, logits, logits.copy())
    assert comparison.equal
    assert comparison.positions == 17


@pytest.mark.parametrize("position", [0, 5, 16])
def test_the_last_bit_of_one_logit_is_enough(logits, position):
    tampered = logits.copy()
    tampered[position:].view(np.int32)[0, 200] ^= 1
    comparison = compare(3, tampered, logits)
    assert not comparison.equal
    assert comparison.first_difference == position
    assert comparison.largest_difference > 0
    assert ("the prompt's own" if position == 0 else f"decode step {position}") in comparison.in_words()


def test_not_a_number_is_never_equal(logits):
    logits[4, 1] = np.nan
    assert compare(1, logits, logits.copy()).first_difference == 4


@pytest.mark.parametrize(
    "other", [np.zeros((16, 256), np.float32), np.zeros((17, 256)), np.zeros((0, 256), np.float32)]
)
def test_what_cannot_be_compared_is_refused(logits, other):
    with pytest.raises(InvalidInputError, match="request 9"):
        compare(9, logits, other)


def test_positions_are_joined_in_order(tmp_path, logits):
    np.save(tmp_path / "a.npy", logits[:1])
    np.save(tmp_path / "b.npy", logits[1:])
    assert np.array_equal(read_logits(tmp_path / "a.npy", tmp_path / "b.npy"), logits)


def test_the_verdict_counts():
    equal = [Comparison(number=number, positions=2) for number in (1, 2)]
    different = Comparison(number=3, positions=2, first_difference=1, largest_difference=0.25)
    line = "EQUAL: 2 of 2 requests gave the very logits of the model alone"
    assert verdict_line(equal, reference="the model alone") == line
    assert verdict_line([*equal, different], reference="the model alone") == (
        "DIFFERENT: 1 of 3 requests gave other logits than the model alone "
        "(request 3: first at decode step 1, by up to 0.25)"
    )
    assert verdict_line([], reference="the model alone").startswith("DIFFERENT")

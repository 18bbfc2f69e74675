"""One wrong logit is found, named, and turns the verdict."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.cli.demo.ties import SelectedRows, tied_step
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


@pytest.mark.parametrize(
    ("apart", "equal"), [(0.0, True), (9e-6, True), (1.2e-5, False), (np.nan, False), (np.inf, False)]
)
def test_a_tolerance_is_kept(logits, apart, equal):
    other = logits.copy()
    other[5, 200] += np.float32(apart)
    comparison = compare(3, other, logits, tolerance=1e-5)
    assert comparison.equal is equal
    assert comparison.first_difference == (None if equal else 5)
    assert np.isnan(apart) or comparison.largest_difference == pytest.approx(apart, rel=0.05, abs=1e-9)


def test_within_a_tolerance_tokens_must_be_the_same(logits):
    logits[7, :] = 0
    logits[7, 40] = logits[7, 41] = 1
    other = logits.copy()
    other[7, 41] += 5e-6
    assert compare(3, logits, logits.copy(), tolerance=1e-5).equal
    assert compare(3, other, logits, tolerance=1e-5).first_difference == 7


def test_the_verdict_names_the_tolerance():
    near = [Comparison(number=1, positions=2, tolerance=1e-5, largest_difference=apart) for apart in (1e-6, 4e-6)]
    assert verdict_line(near, reference="the model alone") == (
        "EQUAL: 2 of 2 requests gave the very tokens of the model alone, and its logits within 1e-05 (at most 4.0e-06 apart)"
    )
    far = Comparison(number=2, positions=2, tolerance=1e-5, first_difference=1, largest_difference=0.1)
    assert verdict_line([near[0], far], reference="the model alone").startswith("DIFFERENT: 1 of 2 requests")


def test_what_follows_a_tie_is_not_compared(logits):
    other = logits.copy()
    other[6:] += 0.5
    assert compare(1, other, logits, tolerance=1e-5).first_difference == 6
    tied = compare(1, other, logits, tolerance=1e-5, tied_step=5)
    assert tied.equal
    assert tied.positions == 6
    assert tied.tied_step == 5
    assert compare(1, other, logits, tolerance=1e-5, tied_step=6).first_difference == 6


@pytest.fixture
def selected():
    rows = np.sort(
        np.random.default_rng(3).permuted(np.tile(np.arange(40, dtype=np.int32), (9, 3, 1)), axis=2)[..., :8]
    )
    scores = np.tile(np.linspace(3, 1, 9, dtype=np.float32), (9, 3, 1))
    return SelectedRows(rows, scores)


def near(selected: SelectedRows, step: int, layer: int, gap: float) -> SelectedRows:
    """The same, but the score of the last selected row is `gap` above the next."""
    scores = selected.scores.copy()
    scores[step, layer, -2] = scores[step, layer, -1] + np.float32(gap)
    return selected._replace(scores=scores)


def other_row(selected: SelectedRows, step: int, layer: int) -> SelectedRows:
    rows = selected.rows.copy()
    rows[step, layer, -1] = 99
    return selected._replace(rows=rows)


def test_equal_selections_have_no_tie(selected):
    assert tied_step(selected, selected) is None
    assert tied_step(near(selected, 3, 1, 0), near(selected, 3, 1, 0)) is None


@pytest.mark.parametrize(
    ("ours", "theirs", "tie"), [(1e-6, 2e-6, 4), (0.0, 0.0, 4), (1e-6, 1e-3, None), (1e-3, 1e-3, None)]
)
def test_only_scores_that_both_saw_near_are_a_tie(selected, ours, theirs, tie):
    assert tied_step(other_row(near(selected, 4, 1, ours), 4, 1), near(selected, 4, 1, theirs)) == tie


def test_a_tie_does_not_excuse_a_wrong_row_before_it(selected):
    """A wrong row in an earlier layer changes the scores of this one, tie or not."""
    tied = near(selected, 4, 1, 0)
    ours = other_row(tied, 4, 1)
    assert tied_step(ours, tied) == 4
    ours = ours._replace(scores=ours.scores.copy())
    ours.scores[4, 1, 2] += np.float32(1e-4)
    assert tied_step(ours, tied) is None


def test_the_first_layer_that_differs_decides(selected):
    alone = near(near(selected, 4, 2, 0), 2, 0, 0)
    assert tied_step(other_row(other_row(alone, 4, 2), 4, 1), alone) is None
    assert tied_step(other_row(other_row(alone, 4, 1), 2, 0), alone) == 2


def test_short_contexts_have_no_tie(selected):
    scores = selected.scores.copy()
    scores[..., 5:] = -np.inf
    alone = selected._replace(scores=scores)
    assert tied_step(other_row(alone, 4, 1), alone) is None


def test_selections_of_other_lengths_are_refused(selected):
    with pytest.raises(InvalidInputError, match="did not see all steps"):
        tied_step(SelectedRows(selected.rows[:-1], selected.scores[:-1]), selected)

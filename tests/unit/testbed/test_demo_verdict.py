"""One wrong logit is found, named, and turns the verdict."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.testbed.demo.trace import Trace
from kvbridge.testbed.demo.verdict import Comparison, compare, read_logits, verdict_line


@pytest.fixture
def logits():
    return np.random.default_rng(7).normal(size=(17, 256)).astype(np.float32)


@pytest.fixture
def trace():
    sums = np.random.default_rng(3).integers(1 << 32, size=(16, 4), dtype=np.uint32)
    return Trace(tuple(f"{kind} of layer {layer}" for layer in (0, 1) for kind in ("swa_kv", "c4_kv")), sums)


def changed(trace: Trace, step: int, component: int) -> Trace:
    sums = trace.sums.copy()
    sums[step:, component] ^= 1
    return trace._replace(sums=sums)


def test_equal_logits_are_equal(logits, trace):
    comparison = compare(3, logits, logits.copy(), traces=(trace, trace))
    assert comparison.equal
    assert comparison.positions == 17


@pytest.mark.parametrize("position", [0, 5, 16])
def test_the_last_bit_of_one_logit_is_enough(logits, trace, position):
    tampered = logits.copy()
    tampered[position:].view(np.int32)[0, 200] ^= 1
    comparison = compare(3, tampered, logits, traces=(trace, trace))
    assert not comparison.equal
    assert comparison.first_difference == position
    assert comparison.largest_difference > 0
    assert comparison.component is None
    assert ("the prompt's own" if position == 0 else f"decode step {position}") in comparison.in_words()


def test_not_a_number_is_never_equal(logits, trace):
    logits[4, 1] = np.nan
    assert compare(1, logits, logits.copy(), traces=(trace, trace)).first_difference == 4


@pytest.mark.parametrize(
    "other", [np.zeros((16, 256), np.float32), np.zeros((17, 256)), np.zeros((0, 256), np.float32)]
)
def test_what_cannot_be_compared_is_refused(logits, trace, other):
    with pytest.raises(InvalidInputError, match="request 9"):
        compare(9, logits, other, traces=(trace, trace))


def test_a_trace_must_be_of_the_same_steps(logits, trace):
    short = trace._replace(sums=trace.sums[:-1])
    with pytest.raises(InvalidInputError, match="request 9: a trace of 15 steps for 17 positions"):
        compare(9, logits, logits, traces=(short, trace))
    with pytest.raises(InvalidInputError, match="did not see all steps"):
        compare(9, logits, logits, traces=(trace, short))


def test_the_first_component_that_differs_is_named(logits, trace):
    """What follows from it, in the same step and later, is not."""
    other = logits.copy()
    other[6:] += 0.5
    wrong = changed(changed(trace, 5, 3), 5, 1)
    comparison = compare(2, other, logits, traces=(wrong, trace))
    assert (comparison.first_difference, comparison.component) == (6, "c4_kv of layer 0")
    assert comparison.positions == 17
    assert comparison.in_words() == "request 2: first at decode step 6 in c4_kv of layer 0, logits by up to 0.5"


def test_what_was_read_wrong_counts_even_where_no_logit_shows_it(logits, trace):
    comparison = compare(2, logits, logits.copy(), traces=(changed(trace, 15, 0), trace))
    assert not comparison.equal
    assert comparison.component == "swa_kv of layer 0"


def test_what_was_read_wrong_later_is_not_the_cause(logits, trace):
    other = logits.copy()
    other[2:] += 0.5
    comparison = compare(2, other, logits, traces=(changed(trace, 5, 0), trace))
    assert (comparison.first_difference, comparison.component) == (2, None)


def test_traces_are_kept_in_files(tmp_path, trace):
    trace.write(tmp_path / "trace.npz")
    read = Trace.read(tmp_path / "trace.npz")
    assert read.components == trace.components
    assert read.first_difference(trace) is None
    joined = Trace.joined([trace._replace(sums=trace.sums[:7]), trace._replace(sums=trace.sums[7:])])
    assert joined.first_difference(trace) is None


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
        "(request 3: first at decode step 1, logits by up to 0.25)"
    )
    assert verdict_line([], reference="the model alone").startswith("DIFFERENT")

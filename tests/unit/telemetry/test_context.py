"""The form of what ties processes together: W3C's traceparent, and which spans are ours to record."""

from collections import Counter

import pytest

from kvbridge.telemetry.context import begin_with, exemplar, parse_traceparent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(("version", "flags"), [("00", "01"), ("00", "00"), ("cc", "01-what-the-future-will-be-like")])
def test_a_traceparent_as_the_recommendation_has_it(version, flags):
    found, sampled = parse_traceparent(f"{version}-{TRACE}-{SPAN}-{flags}"), flags.startswith("01")
    assert (found.trace_id, found.span_id, found.sampled, found.recorded) == (TRACE, SPAN, sampled, False)
    assert found.traceparent == f"00-{TRACE}-{SPAN}-{'01' if sampled else '00'}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"00-{TRACE}-{SPAN[:-1]}٣-01",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 5000,
    ],
)
def test_what_is_no_traceparent_is_ignored(text):
    assert parse_traceparent(text) is None


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_requests_without_a_trace_are_recorded_in_their_share(ratio):
    begun = [begin_with(ratio)(None) for _ in range(2000)]
    assert len({(each.trace_id, each.span_id) for each in begun}) == 2000
    assert all(each.sampled == each.recorded and not each.parent_id for each in begun)
    recorded = Counter(each.recorded for each in begun)[True]
    assert abs(recorded - 2000 * ratio) < 200
    assert all(exemplar(each) == (each.trace_id if each.sampled else "") for each in begun)
    assert all((again := parse_traceparent(each.traceparent)) and again.sampled == each.sampled for each in begun)


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_a_caller_s_word_counts_more_than_the_share(ratio):
    begin = begin_with(ratio)
    unsampled = parse_traceparent(f"00-{TRACE}-{SPAN}-00")
    assert begin(unsampled) is unsampled
    ours = begin(parse_traceparent(f"00-{TRACE}-{SPAN}-01"))
    assert (ours.trace_id, ours.parent_id, ours.sampled, ours.recorded) == (TRACE, SPAN, True, True)
    assert ours.span_id != SPAN


def test_parts_are_known_by_their_names():
    ours = begin_with(1.0)(None)
    one, other = ours.part("commit"), ours.part("offer")
    assert one == ours.part("commit"), "whoever knows the span knows its parts"
    assert len({ours.span_id, one.span_id, other.span_id, one.part("commit").span_id}) == 4
    assert (one.trace_id, one.parent_id, one.recorded) == (ours.trace_id, ours.span_id, True)

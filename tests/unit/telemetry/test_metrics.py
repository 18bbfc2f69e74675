"""The metrics: their table, their names, and what a scrape shows."""

import random
import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from kvbridge.telemetry.context import TRACE, TraceContext
from kvbridge.telemetry.metrics import (
    ADMISSION_TO_CLAIM,
    BOOTSTRAP,
    COUNTER,
    DECODE,
    EVERYBODY,
    HISTOGRAM,
    MAX_LABEL_VALUES,
    METRICS,
    PEER_FAILURES,
    PHASES,
    ROOMS,
)
from kvbridge.telemetry.registry import KEPT_INTERVALS, BusyTime, Metrics
from mkdocs_hooks import metrics_table

VALUES = {
    "component": ["c4_kv", "swa_kv"],
    "direction": ["received"],
    "transport": ["local", "mooncake"],
    "space": ["full", "swa"],
    "phase": list(PHASES[DECODE]),
}


@pytest.fixture
def metrics():
    return Metrics(role=DECODE, values=VALUES)


def rendered(metrics, accept=""):
    pieces, content_type = metrics.render(accept)
    return b"".join(pieces), content_type


def samples(metrics):
    body, content_type = rendered(metrics)
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_declarations_are_whole_and_each_is_in_the_table():
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    table = metrics_table()
    for spec in METRICS:
        assert re.fullmatch(r"(kvbridge|gen_ai)_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind == COUNTER)
        assert (spec.kind == HISTOGRAM) == bool(spec.buckets)
        assert not {"job", "instance"} & set(spec.labels), "they are Prometheus's own"
        assert f"| `{spec.name}` | {spec.kind} |" in table
        assert spec.help in table
        assert set(spec.values) <= set(spec.labels)
        assert all(len(series) == len(spec.labels) for series in spec.series)
        assert set(spec.roles) <= set(EVERYBODY)


def test_what_can_be_known_is_there_before_its_first_event(metrics):
    """A rate over the series then sees the first event."""
    found = samples(metrics)
    assert found["kvbridge_transferred_bytes_total", "local", "received", "swa_kv"] == 0
    assert found["kvbridge_phase_duration_seconds_count", "claim_to_release"] == 0
    assert found["kvbridge_rooms_ended_by_limit_total", "timeouts.room_s"] == 0
    assert found["kvbridge_rooms_ended_total", "deadline", "failed"] == 0
    assert found["process_open_fds",] > 0
    bootstrap = samples(Metrics(role=BOOTSTRAP))
    assert bootstrap["kvbridge_pairings_total", "paired"] == 0
    assert bootstrap["kvbridge_instances", "decode", "ready"] == 0


def test_a_histogram_has_an_example_when_open_metrics_is_asked_for_and_a_trace_is_recorded(metrics):
    metrics.observe(ADMISSION_TO_CLAIM, 0.2)
    bound = TRACE.set(TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=True))
    metrics.observe(ADMISSION_TO_CLAIM, 0.02)
    TRACE.reset(bound)
    bound = TRACE.set(TraceContext("5bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", sampled=False))
    metrics.observe(ADMISSION_TO_CLAIM, 0.4)
    TRACE.reset(bound)
    body, content_type = rendered(metrics, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    told = {
        sample.labels["le"]: sample.exemplar
        for family in open_metrics(body.decode())
        for sample in family.samples
        if sample.name == "kvbridge_admission_to_claim_seconds_bucket"
    }
    assert told["0.025"].labels == {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    assert told["0.025"].value == 0.02
    assert told["0.25"] is None
    assert told["0.5"] is None, "nobody records that trace"
    assert b"trace_id" not in rendered(metrics)[0]


def test_words_from_peers_cannot_fill_the_memory_and_the_others_show_their_largest_value(metrics):
    for number in range(1_000):
        metrics.count(PEER_FAILURES, f"peer-{number}", f"code-{number}")
    metrics.replace(ROOMS, {(f"state-{number}",): float(number) for number in range(100)})
    found = samples(metrics)
    for name in ("kvbridge_peer_failures_total", "kvbridge_rooms"):
        assert sum(key[0] == name for key in found) == MAX_LABEL_VALUES + 1
    assert found["kvbridge_peer_failures_total", "other", "other"] == 1_000 - MAX_LABEL_VALUES
    assert found["kvbridge_rooms", "other"] == 99.0


def test_requests_are_shown_before_the_first_and_counted_by_route(metrics):
    metrics.serves("/v1/requests", ["POST"], 201)
    assert samples(metrics)["kvbridge_http_requests_total", "/v1/requests", "201", "POST"] == 0
    metrics.answered("/v1/requests", "POST", 201, 0.002)
    metrics.answered("other", "BREW", 405, 0.001)
    found = samples(metrics)
    assert found["kvbridge_http_requests_total", "/v1/requests", "201", "POST"] == 1
    assert found["kvbridge_http_requests_total", "405", "other", "other"] == 1
    assert found["kvbridge_http_request_duration_seconds_count", "/v1/requests", "POST"] == 1


def test_intervals_told_afterwards_are_the_union_whatever_their_order():
    draw = random.Random(7)
    for _ in range(200):
        intervals = [(begin, begin + draw.randrange(0, 6)) for begin in (draw.randrange(60) for _ in range(25))]
        busy, covered = BusyTime(), set()
        for begin, end in intervals:
            added = set(range(begin, end)) - covered
            assert busy.add(float(begin), float(end)) == len(added), "a counter never falls"
            covered |= added


def test_what_lies_before_those_that_are_kept_is_not_counted_twice():
    busy = BusyTime()
    added_s = sum(busy.add(2.0 * number, 2.0 * number + 1) for number in range(3 * KEPT_INTERVALS))
    assert added_s == 3 * KEPT_INTERVALS
    assert busy.add(0.0, 1.0) == 0.0

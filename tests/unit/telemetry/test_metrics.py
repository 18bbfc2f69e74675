"""The metrics: their table, their names, and what a scrape shows."""

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount
from kvbridge.telemetry.metrics import (
    MAX_LABEL_VALUES,
    METRICS,
    PEERS,
    PHASE,
    POOL,
    READY,
    REGISTRATION,
    RESENT,
    ROOMS,
    ROOMS_ENDED,
    TABLE_PATH,
    UNDELIVERED,
    WAIT,
    BusyTime,
    Direction,
    MetricKind,
    Metrics,
    metrics_table,
)
from tests.helpers.manual_clock import ManualClock


@pytest.fixture
def clock():
    return ManualClock(100.0)


@pytest.fixture
def metrics(clock):
    return Metrics(role="decode", version="1.2.3", clock=clock)


def samples(metrics):
    body, content_type = metrics.render()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_the_table_is_up_to_date():
    assert TABLE_PATH.read_text() == metrics_table(), "write metrics_table() to METRICS.md"


def test_names_have_base_units_and_labels_are_few():
    labels = {"role", "version", "component", "direction", "transport", "space", "state", "phase", "reason", "code"}
    labels |= {"outcome"}
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    for spec in METRICS:
        assert re.fullmatch(r"kvbridge_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.kind is MetricKind.COUNTER)
        assert set(spec.labels) <= labels
        assert spec.help.endswith(".")


def test_every_declared_metric_is_registered(metrics):
    shown = {family.name for family in metrics.registry.collect()}
    assert {spec.name.removesuffix("_total").removesuffix("_info") for spec in METRICS} <= {
        name.removesuffix("_info") for name in shown
    }


def test_bytes_and_operation_sizes(metrics):
    amounts = {ComponentKind.C4_KV: Amount(lane_rows=1, bytes=400_000, operations=100)}
    metrics.transferred(amounts, Direction.SENT, "mooncake")
    metrics.transferred({ComponentKind.C4_KV: Amount(bytes=1 << 20, operations=1)}, Direction.SENT, "mooncake")
    found = samples(metrics)
    key = ("c4_kv", "mooncake", "sent")
    assert found["kvbridge_transferred_bytes_total", *key] == 400_000 + (1 << 20)
    assert found["kvbridge_operation_bytes_count", *key] == 101
    assert found["kvbridge_operation_bytes_sum", *key] == 400_000 + (1 << 20)
    assert found["kvbridge_operation_bytes_bucket", "1024.0", *key] == 0
    assert found["kvbridge_operation_bytes_bucket", "4096.0", *key] == 100
    assert found["kvbridge_operation_bytes_bucket", "1048576.0", *key] == 101
    assert found["kvbridge_operation_bytes_bucket", "+Inf", *key] == 101


def test_busy_time_is_a_union(metrics, clock):
    for _ in range(2):
        metrics.transfer_began(Direction.SENT, "local")
        clock.advance(1.0)
    metrics.transfer_ended(Direction.SENT, "local")
    clock.advance(0.5)
    assert samples(metrics)["kvbridge_transfer_busy_seconds_total", "local", "sent"] == 2.5
    metrics.transfer_ended(Direction.SENT, "local")
    clock.advance(7.0)
    assert samples(metrics)["kvbridge_transfer_busy_seconds_total", "local", "sent"] == 2.5
    with pytest.raises(ValueError, match="nothing is under way"):
        BusyTime().end(0.0)


def test_states_that_are_left_out_become_zero(metrics):
    metrics.replace(POOL, {"free": 3, "leased": 1}, "swa")
    metrics.replace(POOL, {"free": 4}, "swa")
    metrics.replace(ROOMS, {"committed": 2})
    metrics.replace(ROOMS, {})
    metrics.replace(PEERS, {"connected": 1})
    found = samples(metrics)
    assert found["kvbridge_pool_pages", "free", "swa"] == 4
    assert found["kvbridge_pool_pages", "leased", "swa"] == 0
    assert found["kvbridge_rooms", "committed"] == 0
    assert found["kvbridge_peers", "connected"] == 1


def test_the_rest(metrics):
    metrics.observe(PHASE, 0.02, "move")
    metrics.count(ROOMS_ENDED, "failed", "deadline")
    metrics.count(RESENT, by=3)
    metrics.count(UNDELIVERED)
    metrics.set(REGISTRATION, 0.25)
    metrics.set(READY, True)
    metrics.store_failed("timeout")
    metrics.store_value_refused("node")
    found = samples(metrics)
    assert found["kvbridge_phase_duration_seconds_sum", "move"] == 0.02
    assert found["kvbridge_rooms_ended_total", "deadline", "failed"] == 1
    assert found["kvbridge_store_failures_total", "timeout"] == 1
    assert found["kvbridge_store_values_refused_total", "node"] == 1
    assert found["kvbridge_control_resends_total",] == 3
    assert found["kvbridge_control_undelivered_total",] == 1
    assert found["kvbridge_registration_progress_ratio",] == 0.25
    assert found["kvbridge_ready",] == 1
    assert found["kvbridge_build_info", "1.2.3", "decode"] == 1


def test_words_from_peers_cannot_fill_the_memory(metrics):
    for number in range(1_000):
        metrics.observe(PHASE, 0.1, f"phase-{number}")
    found = samples(metrics)
    shown = [key for key in found if key[0] == "kvbridge_phase_duration_seconds_count"]
    assert len(shown) == MAX_LABEL_VALUES + 1
    assert found["kvbridge_phase_duration_seconds_count", "other"] == 1_000 - MAX_LABEL_VALUES


def test_two_daemons_of_one_process_do_not_share():
    first, second = Metrics(role="prefill", version="1"), Metrics(role="decode", version="1")
    first.count(RESENT)
    assert samples(second)["kvbridge_control_resends_total",] == 0


def test_waits_for_pages(metrics):
    metrics.observe(WAIT, 0.3, "admitted")
    metrics.observe(WAIT, 5.0, "timeout")
    found = samples(metrics)
    assert found["kvbridge_admission_wait_seconds_bucket", "0.5", "admitted"] == 1
    assert found["kvbridge_admission_wait_seconds_bucket", "0.25", "admitted"] == 0
    assert found["kvbridge_admission_wait_seconds_sum", "timeout"] == 5.0

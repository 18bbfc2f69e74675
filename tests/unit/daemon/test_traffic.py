"""Busy time and bytes of the sending side, whatever becomes of an order."""

from __future__ import annotations

from kvbridge.core.clock import ManualClock
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import Rank
from kvbridge.core.plan.operations import Amount, Section
from kvbridge.core.wire.worker_messages import Send, Sent
from kvbridge.daemon.traffic import TrafficMeter
from kvbridge.telemetry.metrics import Metrics

RANK = Rank(pp=0, tp=0)


def send(order: int) -> Send:
    section = Section(prompt_tokens=4, start_token=0, stop_token=4)
    return Send(room=1, generation=1, order=order, section=section)


def sample(metrics: Metrics, name: str) -> float:
    metrics.render()
    return sum(found.value for family in metrics.registry.collect() for found in family.samples if found.name == name)


def test_overlapping_orders_count_the_time_once() -> None:
    clock = ManualClock()
    metrics = Metrics(role="prefill", version="0", clock=clock)
    meter = TrafficMeter(metrics)
    meter.ordered(RANK, send(1), "mooncake")
    clock.advance(1)
    meter.ordered(RANK, send(2), "mooncake")
    clock.advance(1)
    amounts = {ComponentKind.C4_KV: Amount(lane_rows=1, bytes=584, operations=2)}
    meter.sent(Sent(room=1, generation=1, rank=RANK, order=1, amounts=amounts))
    clock.advance(1)
    meter.sent(Sent(room=1, generation=1, rank=RANK, order=2))
    clock.advance(10)
    assert sample(metrics, "kvbridge_transfer_busy_seconds_total") == 3
    assert sample(metrics, "kvbridge_transferred_bytes_total") == 584


def test_a_dead_worker_is_not_busy() -> None:
    clock = ManualClock()
    metrics = Metrics(role="prefill", version="0", clock=clock)
    meter = TrafficMeter(metrics)
    meter.ordered(RANK, send(1), "nixl")
    clock.advance(2)
    meter.lost(RANK)
    clock.advance(5)
    meter.sent(Sent(room=1, generation=1, rank=RANK, order=1))  # too late: it is forgotten
    assert sample(metrics, "kvbridge_transfer_busy_seconds_total") == 2

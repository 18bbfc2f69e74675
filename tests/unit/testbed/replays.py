"""Replays and reports of replays that never ran."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.plan.operations import Amount
from kvbridge.testbed.replay.job import WrongRow
from kvbridge.testbed.replay.ledger import Ledger
from kvbridge.testbed.replay.options import ReplayOptions
from kvbridge.testbed.replay.plan import ReplayPlan
from kvbridge.testbed.replay.report import Ending, PhaseSummary, ReplayReport, Sample, breakdown
from tests.helpers.traces import write_trace


def plan(folder: Path, count: int = 4, **options: Any) -> ReplayPlan:
    """A plan over a trace of so many requests, 50 ms apart."""
    trace = write_trace(folder / "trace.jsonl", count)
    return ReplayPlan.of(ReplayOptions(trace=trace, **{"model": "tiny-v4", **options}))


def ledger(folder: Path, count: int = 4, **options: Any) -> Ledger:
    """Its ledger."""
    return Ledger(plan(folder, count, **options))


def wrong_row() -> WrongRow:
    """A row with one wrong byte."""
    return WrongRow(
        number=1,
        room=77,
        rank="pp0.tp0",
        component=ComponentKind.C4_KV,
        layer=4,
        lane=0,
        row=100,
        page_id=3,
        slot=36,
        first_byte=97,
        expected=0x12,
        found=0x02,
        wrong_bytes=1,
    )


def sample(at_s: float, completed: int, arrived_bytes: int, **changes: Any) -> Sample:
    """How it was at one moment."""
    facts: dict[str, Any] = {
        "whole_bytes": arrived_bytes,
        "in_flight": 0,
        "arrived_tokens": 0,
        "found_tokens": {"prefill": 10, "decode": 20, "endless": 30},
        "used_pages": {},
    }
    return Sample.model_validate(
        facts | changes | {"at_s": at_s, "completed": completed, "arrived_bytes": arrived_bytes}
    )


def report(**changes: Any) -> ReplayReport:
    """A good report of two requests, unless changed."""
    facts: dict[str, Any] = {
        "ending": Ending.COMPLETED,
        "trace": "trace.jsonl",
        "settings": {"model": "tiny-v4", "transport": "local", "speed": 0.0, "prefixes": True},
        "environment": {"cores": 2},
        "requests": 2,
        "completed": 2,
        "failed": 0,
        "refused": 0,
        "refusals": {"capacity": 3},
        "amounts": {ComponentKind.C4_KV: Amount(lane_rows=4, bytes=4096, operations=4)},
        "whole_bytes": 5120,
        "arrived_tokens": 300,
        "found_tokens": {"prefill": 100, "decode": 75, "endless": 120},
        "checked_bytes": 4000,
        "mismatched_bytes": 0,
        "wrong_rows": (),
        "prompt_tokens": 300,
        "pool_bytes": 1 << 20,
        "pool_pages": {"prefill": {"full": 10}, "decode": {"full": 10, "host": 10}},
        "most_in_flight": 2,
        "breakdown": breakdown([{"total": 0.1, "prefill": 0.06, "check": 0.04}, {"total": 0.2, "prefill": 0.2}]),
        "phases": {"total": PhaseSummary.of([0.1, 0.2]), "brewing": PhaseSummary.of([0.5])},
        "occupancy": (
            sample(0.0, 0, 0),
            sample(
                2.0,
                1,
                4096,
                in_flight=2,
                arrived_tokens=300,
                used_pages={"prefill": {"full": 5}, "decode": {"full": 1, "host": 1}},
            ),
        ),
        "unserved": (),
        "pages_left": 0,
        "seconds": {"start": 1.0, "replay": 2.0},
    }
    return ReplayReport.model_validate(facts | changes)

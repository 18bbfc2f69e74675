"""What a metric is, and the words that label values are made of.

Owns: the form of a declaration. Must not know: which metrics there are (`telemetry/metrics.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kvbridge.core.ids import Role


class Direction(StrEnum):
    """Which way bytes went, seen from this daemon."""

    SENT = "sent"
    RECEIVED = "received"


class MetricKind(StrEnum):
    """The Prometheus types in use."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


PREFILL, DECODE, BOOTSTRAP = Role.PREFILL.value, Role.DECODE.value, "bootstrap"
ROUTER = "router"
NODES = (PREFILL, DECODE)
EVERYBODY = (*NODES, BOOTSTRAP, ROUTER)
PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Of whatever is waited for in a request's way."""


@dataclass(frozen=True, slots=True, eq=False)
class MetricSpec:
    """One metric. `name` is the name that is scraped."""

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    help: str
    roles: tuple[str, ...] = NODES
    """The daemons that have it."""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By label: all that it can be, where that is known here."""
    series: tuple[tuple[str, ...], ...] = ()
    """Label values that are shown from the start, where not every combination can come about."""
    buckets: tuple[float, ...] = ()

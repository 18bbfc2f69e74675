"""The form of a metric, the words that label values are made of, and how a metric is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

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


PREFILL, DECODE, BOOTSTRAP, ROUTER = Role.PREFILL.value, Role.DECODE.value, "bootstrap", "router"
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
    roles: tuple[str, ...]
    """The daemons that have it."""
    values: Mapping[str, tuple[str, ...]]
    """By label: all that it can be, where that is known here."""
    series: tuple[tuple[str, ...], ...]
    """Label values that are shown from the start, where not every combination can come about."""
    buckets: tuple[float, ...]


DECLARED: list[MetricSpec] = []
"""Every metric whose module has been imported."""


def _declare(  # noqa: PLR0913 - the parts of a declaration
    kind: MetricKind,
    name: str,
    meaning: str,
    labels: str = "",
    *,
    on: tuple[str, ...] = NODES,
    series: tuple[tuple[str, ...], ...] = (),
    buckets: tuple[float, ...] = (),
    **values: tuple[str, ...],
) -> MetricSpec:
    """Declare a metric of the daemons `on`. `labels` are names; `values` are all that a label can be, where that is known."""
    names = tuple(labels.split()) or tuple(values)
    DECLARED.append(MetricSpec(name, kind, names, meaning, on, values, series, buckets))
    return DECLARED[-1]


counter, gauge = partial(_declare, MetricKind.COUNTER), partial(_declare, MetricKind.GAUGE)
histogram = partial(_declare, MetricKind.HISTOGRAM)

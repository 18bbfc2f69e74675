"""Metrics of the host tier: pages that are copied between the device and their twins in host memory.

Owns: their declarations, as `telemetry/metrics.py` owns those of rooms, pages and bytes. Must not know: how values are kept.
"""

from __future__ import annotations

from kvbridge.core.errors import DeadlineError, TransportError
from kvbridge.telemetry.specs import MetricKind, MetricSpec

_COUNTER, _GAUGE = MetricKind.COUNTER, MetricKind.GAUGE

DONE = "done"
DIRECTIONS = ("backup", "load_back")
_WAYS = {"direction": DIRECTIONS}

TIER_METRICS: tuple[MetricSpec, ...] = (
    TIER_PAGES := MetricSpec(
        "kvbridge_host_tier_pages",
        _GAUGE,
        ("residency",),
        "Cached pages of prompts and answers, by where they are: on the device alone, on device and host, on the host alone. All "
        "of them are what kvbridge_prefix_pages counts by who reads them.",
        values={"residency": ("device", "both", "host")},
    ),
    TIER_COPIES := MetricSpec(
        "kvbridge_host_tier_copies_total",
        _COUNTER,
        ("direction", "outcome"),
        "Orders to copy cached pages that have ended, from the device to host memory (backup) or back (load_back): done, or the "
        "code of the first cause. A backup that failed leaves the pages on the device as they were.",
        values={**_WAYS, "outcome": (DONE, DeadlineError.code, TransportError.code, "worker_gone")},
    ),
    TIER_COPIED := MetricSpec(
        "kvbridge_host_tier_copied_bytes_total",
        _COUNTER,
        ("direction",),
        "Bytes of them, over all ranks of this node.",
        values=_WAYS,
    ),
    TIER_COPY_SECONDS := MetricSpec(
        "kvbridge_host_tier_copy_seconds_total",
        _COUNTER,
        ("direction",),
        "For how long the slowest rank was copying, without its pauses; its rate is the share of the time in which the link to the "
        "device was in use for this, at most tier.host.backup.link_share for backups.",
        values=_WAYS,
    ),
    TIER_IN_FLIGHT := MetricSpec(
        "kvbridge_host_tier_in_flight_pages", _GAUGE, (), "Pages that are being copied to host memory now."
    ),
    TIER_WAITING := MetricSpec(
        "kvbridge_host_tier_waiting_prompts",
        _GAUGE,
        (),
        "Prompts and answers whose pages wait to be copied to host memory.",
    ),
    TIER_REFUSED := MetricSpec(
        "kvbridge_host_tier_refused_total",
        _COUNTER,
        (),
        "Prompts and answers that were not copied to host memory, since there was no page there that nobody reads.",
    ),
)

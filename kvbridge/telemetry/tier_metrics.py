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

_UNUSABLE = ("timed_out", "unreachable")
_STORE_OUTCOMES = {
    "put": ("stored", "full", *_UNUSABLE),
    "get": ("hit", "absent", "short", "other_key", "wrong_digest", "other_version", *_UNUSABLE),
    "has": ("present", "absent", *_UNUSABLE),
    "drop": ("dropped", *_UNUSABLE),
    "clear": ("dropped", *_UNUSABLE),
}
"""By what a store is asked: how that can end."""

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
    TIER_EVICTED := MetricSpec(
        "kvbridge_host_tier_evicted_pages_total",
        _COUNTER,
        ("use",),
        "Cached pages that have left host memory to make room, by whether they had been of use there: copied back to the device at "
        "least once (read_back), or never (unused).",
        values={"use": ("read_back", "unused")},
    ),
    KEPT_PAGES := MetricSpec(
        "kvbridge_kept_pages",
        _GAUGE,
        ("outcome",),
        "Pages that the daemon before had left in host memory (pools.keep_s), by what became of them at this start: still to be "
        "compared (waiting), found again (restored), not what they had been or behind such pages (lost), or in pools that could "
        "not be gone on with (refused).",
        values={"outcome": ("waiting", "restored", "lost", "refused")},
    ),
    STORE_STATE := MetricSpec(
        "kvbridge_prefix_store_state",
        _GAUGE,
        ("state",),
        "1 for the state of the store below host memory: starting, its process is not ready; closed, it is asked; open, it has "
        "failed too often and is not asked for a while; half_open, one request tries whether it works again.",
        values={"state": ("starting", "closed", "open", "half_open")},
    ),
    STORE_BREAKER := MetricSpec(
        "kvbridge_store_breaker_open",
        _GAUGE,
        (),
        "1 while the store below host memory is left alone, since it has failed too often (open; half_open: one request tries it); "
        "0 while it is asked. Requests go on without what it has.",
    ),
    STORE_BREAKER_CHANGES := MetricSpec(
        "kvbridge_store_breaker_changes_total",
        _COUNTER,
        ("state",),
        "How often that has begun, or has gone on since a request has tried it in vain (open), and has ended (closed).",
        values={"state": ("open", "closed")},
    ),
    STORE_STARTS := MetricSpec(
        "kvbridge_store_process_starts_total",
        _COUNTER,
        (),
        "Attempts to start the process that uses the store below host memory: one at the daemon's start, and one after each of its "
        "ends, be it that it hung and was killed, that it could not open the store, or that it died.",
    ),
    STORE_OBJECTS := MetricSpec(
        "kvbridge_prefix_store_objects_total",
        _COUNTER,
        ("verb", "outcome"),
        "Objects (pages with all components and layers) that the store was asked to put, get, drop, or whether it has them, by "
        "how that ended; clear: to drop all of one kind, of this model. A get is a hit only when every byte was compared; absent, "
        "short, other_key, wrong_digest, other_version, timed_out and unreachable are misses.",
        series=tuple((verb, outcome) for verb, outcomes in _STORE_OUTCOMES.items() for outcome in outcomes),
    ),
    STORE_BYTES := MetricSpec(
        "kvbridge_prefix_store_bytes_total",
        _COUNTER,
        ("verb",),
        "Bytes of objects that were put or got whole.",
        values={"verb": ("put", "get")},
    ),
    STORE_PREFETCHES := MetricSpec(
        "kvbridge_prefix_store_prefetches_total",
        _COUNTER,
        ("outcome",),
        "Requests whose prompts were looked for in the store: all that there was came (found); tier.prefetch_s was over before, "
        "whatever had come (late); a part of it came, the rest was missing or bad (part); there was nothing; or a defect, whose "
        "traceback is in the log, ended it (failed).",
        values={"outcome": ("found", "late", "part", "nothing", "failed")},
    ),
    STORE_SECONDS := MetricSpec(
        "kvbridge_prefix_store_prefetch_seconds_total",
        _COUNTER,
        (),
        "For how long they waited, together; each at most tier.prefetch_s.",
    ),
    STORE_WAITING := MetricSpec(
        "kvbridge_prefix_store_waiting_prompts", _GAUGE, (), "Prompts and answers that wait to be written to the store."
    ),
)

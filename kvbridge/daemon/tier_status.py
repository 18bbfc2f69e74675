"""The host tier of a node, its kept pools and its store, as operators and Prometheus see them.

Owns: what is shown of them and under which names. Must not know: how any of it comes about; it only reads.
"""

from __future__ import annotations

from kvbridge.api.status import HostTierStatus, KeptPoolsStatus
from kvbridge.daemon.parts import NodeParts
from kvbridge.telemetry.metrics import (
    STORE_BYTES,
    STORE_OBJECTS,
    STORE_PREFETCHES,
    STORE_STARTS,
    STORE_STATE,
    TIER_PAGES,
)


def host_tier_status(parts: NodeParts) -> HostTierStatus | None:
    """Where pages of prefixes are, and what was copied between device and host; None without a host tier."""
    prefixes, backups = parts.prefixes, parts.backups
    if prefixes is None or backups is None:
        return None
    where, copied, loaded = prefixes.residency(), parts.copies.sums["backup"], parts.copies.sums["load_back"]
    return HostTierStatus(
        device_pages=where.device,
        both_pages=where.both,
        host_pages=where.host,
        waiting_prompts=backups.controller.waiting,
        in_flight_pages=backups.pages_in_flight,
        backed_up_pages=copied.pages,
        backed_up_bytes=copied.bytes,
        failed_orders=copied.failed,
        last_failure=copied.last_failure,
        longest_order_s=round(copied.longest_s, 4),
        refused_prompts=backups.controller.refused,
        loaded_back_pages=loaded.pages,
        failed_loads=loaded.failed,
        last_failed_load=loaded.last_failure,
        evicted_read_back_pages=where.evicted.read_back,
        evicted_unused_pages=where.evicted.unused,
    )


def kept_pools_status(parts: NodeParts) -> KeptPoolsStatus | None:
    """What was found of the pools of the daemon before; None where none are kept."""
    found = parts.memory.restored
    if found is None:
        return None
    return KeptPoolsStatus(
        waiting_pages=found.waiting,
        restored_pages=found.pages,
        restored_bytes=found.bytes,
        lost_pages=found.lost,
        refused_pages=found.refused,
        refused=found.why_not,
        seconds=found.seconds,
    )


def render_tiers(parts: NodeParts) -> None:
    """Set the metrics that are only known now."""
    metrics = parts.metrics
    if (tier := host_tier_status(parts)) is not None:
        pages = {"device": tier.device_pages, "both": tier.both_pages, "host": tier.host_pages}
        metrics.replace(TIER_PAGES, {(residency,): count for residency, count in pages.items()})
    _render_store(parts)


def _render_store(parts: NodeParts) -> None:
    metrics, stored = parts.metrics, parts.stored
    if stored is None or stored.client is None:
        return
    store = stored.status()
    metrics.replace(STORE_STATE, {(store.state,): 1})
    metrics.assign(STORE_STARTS, stored.client.process.starts)
    for verb, outcomes in store.objects.items():
        for outcome, objects in outcomes.items():
            metrics.assign(STORE_OBJECTS, objects, verb, outcome)
    for asked, moved_bytes in stored.client.moved_bytes.items():
        metrics.assign(STORE_BYTES, moved_bytes, asked.value)
    for outcome, requests in store.prefetches.items():
        metrics.assign(STORE_PREFETCHES, requests, outcome)

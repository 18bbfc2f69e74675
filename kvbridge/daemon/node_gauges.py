"""The gauges of a node: what is only known when Prometheus asks, most of it from the document that `/status` shows."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvbridge.api.status import NodeStatus
from kvbridge.core.session.states import RoomState
from kvbridge.daemon.parts import NodeParts
from kvbridge.node.room_book import RoomBook
from kvbridge.telemetry.metrics import (
    AVAILABLE,
    DIRECTORY_REGISTRATION,
    ENGINES,
    EPOCH,
    POOL,
    PREFIX_EVICTED,
    QUARANTINED,
    READY,
    ROOMS,
    STARVED,
    STORE_BYTES,
    STORE_OBJECTS,
    STORE_PREFETCHES,
    STORE_STATE,
    TIER_PAGES,
    WAITING,
    WORKERS,
)


def set_gauges(status: NodeStatus, parts: NodeParts, rooms: RoomBook[Any], starved_s: float) -> None:
    """Set every gauge."""
    metrics = parts.metrics
    metrics.replace(ROOMS, {(state.value,): status.rooms.get(state.value, 0) for state in RoomState})
    metrics.replace(QUARANTINED, {(reason,): count for reason, count in rooms.quarantined().items()})
    metrics.replace(ENGINES, {(state,): count for state, count in parts.engines.states().items()})
    metrics.replace(WORKERS, Counter((state.value,) for state in parts.workers.states().values()))
    metrics.replace(DIRECTORY_REGISTRATION, {(status.bootstrap.state.value,): 1})
    if status.fence is not None:
        metrics.assign(EPOCH, status.fence.epoch)
    metrics.assign(WAITING, status.admission.waiting)
    metrics.assign(STARVED, starved_s)
    metrics.assign(READY, status.ready.ready)
    pages = {(space.value, state.value): count for space, of in status.pools.items() for state, count in of.items()}
    metrics.replace(POOL, pages)
    metrics.replace(AVAILABLE, {(space.value,): count for space, count in status.available_pages.items()})
    if (prefixes := status.prefixes) is not None:
        for reason, count in prefixes.evicted_pages.items():
            metrics.assign(PREFIX_EVICTED, count, reason.value)
    if (tier := status.host_tier) is not None:
        residencies = {"device": tier.device_pages, "both": tier.both_pages, "host": tier.host_pages}
        metrics.replace(TIER_PAGES, {(residency,): count for residency, count in residencies.items()})
    _set_store(status, parts)


def _set_store(status: NodeStatus, parts: NodeParts) -> None:
    metrics, store, stored = parts.metrics, status.store, parts.stored
    if store is None or stored is None or stored.client is None:
        return
    metrics.replace(STORE_STATE, {(store.state,): 1})
    for verb, outcomes in store.objects.items():
        for outcome, objects in outcomes.items():
            metrics.assign(STORE_OBJECTS, objects, verb, outcome)
    for asked, moved_bytes in stored.client.moved_bytes.items():
        metrics.assign(STORE_BYTES, moved_bytes, asked.value)
    for outcome, requests in store.prefetches.items():
        metrics.assign(STORE_PREFETCHES, requests, outcome)

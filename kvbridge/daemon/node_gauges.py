"""The gauges of a node: what is only known when Prometheus asks, most of it from the document that `/status` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvbridge.api.status import NodeStatus
from kvbridge.core.ids import IndexSpace, Role
from kvbridge.core.session.states import RoomState
from kvbridge.daemon.parts import NodeParts
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.room_book import RoomBook
from kvbridge.telemetry.metrics import (
    AVAILABLE,
    CHECKPOINTS,
    CHECKPOINTS_EVICTED,
    DIRECTORY_REGISTRATION,
    ENGINES,
    EPOCH,
    OLDEST_WAIT,
    PEER_SILENCE,
    PEERS,
    POOL,
    POOL_BYTES,
    PREFIX_EVICTED,
    PREFIX_PAGES,
    PREFIX_RETAINED,
    QUARANTINED,
    READY,
    RETENTION_REFUSED,
    ROOMS,
    STARVED,
    WAITING,
    WORKERS,
)
from kvbridge.telemetry.tier_metrics import (
    KEPT_PAGES,
    STORE_BREAKER,
    STORE_BREAKER_CHANGES,
    STORE_BYTES,
    STORE_OBJECTS,
    STORE_PREFETCHES,
    STORE_SECONDS,
    STORE_STARTS,
    STORE_STATE,
    STORE_WAITING,
    TIER_EVICTED,
    TIER_IN_FLIGHT,
    TIER_PAGES,
    TIER_REFUSED,
    TIER_WAITING,
)
from kvbridge.tier.stores.breaker import BreakerState


def set_gauges(
    status: NodeStatus,
    parts: NodeParts,
    rooms: RoomBook[Any],
    admission: AdmissionController,
    *,
    connecting: int,
    silences_s: Mapping[str, float],
) -> None:
    """Set every gauge. `connecting`: known peers that no room can go to or from yet; `silences_s`: by the name of a peer."""
    metrics = parts.metrics
    metrics.replace(ROOMS, {(state.value,): status.rooms.get(state.value, 0) for state in RoomState})
    metrics.replace(QUARANTINED, {(reason,): count for reason, count in rooms.quarantined().items()})
    metrics.replace(PEERS, {("connected",): len(status.peers) - connecting, ("connecting",): connecting})
    metrics.replace(PEER_SILENCE, {(name,): seconds for name, seconds in silences_s.items()})
    metrics.replace(ENGINES, {(state,): count for state, count in parts.engines.states().items()})
    metrics.replace(WORKERS, Counter((state.value,) for state in parts.workers.states().values()))
    metrics.replace(DIRECTORY_REGISTRATION, {(status.bootstrap.state.value,): 1})
    if status.fence is not None:
        metrics.assign(EPOCH, status.fence.epoch)
    metrics.assign(WAITING, status.admission.waiting)
    metrics.assign(OLDEST_WAIT, admission.oldest_wait_s())
    metrics.assign(STARVED, admission.starved_s())
    metrics.assign(READY, status.ready.ready)
    _set_pools(status, parts)
    _set_prefixes(status, parts)
    _set_tiers(status, parts)
    _set_store(status, parts)


def _set_pools(status: NodeStatus, parts: NodeParts) -> None:
    metrics, page_bytes = parts.metrics, parts.layout.page_bytes(parts.geometry)
    pages = {(space.value, state.value): count for space, of in status.pools.items() for state, count in of.items()}
    metrics.replace(POOL, pages)
    metrics.replace(AVAILABLE, {(space.value,): count for space, count in status.available_pages.items()})
    sized = {
        key: count * page_bytes[space] for key, count in pages.items() if (space := IndexSpace(key[0])) in page_bytes
    }
    metrics.replace(POOL_BYTES, sized)


def _set_prefixes(status: NodeStatus, parts: NodeParts) -> None:
    metrics, shown, prefixes = parts.metrics, status.prefixes, parts.prefixes
    if shown is None or prefixes is None:
        return
    metrics.replace(PREFIX_PAGES, {("read",): shown.read_pages, ("unread",): shown.unread_pages})
    for reason, count in shown.evicted_pages.items():
        metrics.assign(PREFIX_EVICTED, count, reason.value)
    metrics.assign(RETENTION_REFUSED, shown.retention_refused)
    metrics.assign(PREFIX_RETAINED, prefixes.claims.retained().total())
    if status.role is Role.PREFILL:
        metrics.assign(CHECKPOINTS, shown.checkpoints)
        metrics.assign(CHECKPOINTS_EVICTED, prefixes.evicted_checkpoints)


def _set_tiers(status: NodeStatus, parts: NodeParts) -> None:
    metrics = parts.metrics
    if (tier := status.host_tier) is not None:
        pages = {"device": tier.device_pages, "both": tier.both_pages, "host": tier.host_pages}
        metrics.replace(TIER_PAGES, {(residency,): count for residency, count in pages.items()})
        metrics.assign(TIER_IN_FLIGHT, tier.in_flight_pages)
        metrics.assign(TIER_WAITING, tier.waiting_prompts)
        metrics.assign(TIER_REFUSED, tier.refused_prompts)
        metrics.assign(TIER_EVICTED, tier.evicted_read_back_pages, "read_back")
        metrics.assign(TIER_EVICTED, tier.evicted_unused_pages, "unused")
    if (kept := status.kept_pools) is not None:
        outcomes = {"waiting": kept.waiting_pages, "restored": kept.restored_pages}
        outcomes |= {"lost": kept.lost_pages, "refused": kept.refused_pages}
        metrics.replace(KEPT_PAGES, {(outcome,): count for outcome, count in outcomes.items()})


def _set_store(status: NodeStatus, parts: NodeParts) -> None:
    metrics, store, stored = parts.metrics, status.store, parts.stored
    if store is None or stored is None or stored.client is None:
        return
    metrics.replace(STORE_STATE, {(store.state,): 1})
    metrics.assign(STORE_BREAKER, stored.client.breaker.state is not BreakerState.CLOSED)
    for state, changes in stored.client.breaker_changes.items():
        metrics.assign(STORE_BREAKER_CHANGES, changes, state.value)
    metrics.assign(STORE_STARTS, stored.client.process.starts)
    for verb, outcomes in store.objects.items():
        for outcome, objects in outcomes.items():
            metrics.assign(STORE_OBJECTS, objects, verb, outcome)
    for asked, moved_bytes in stored.client.moved_bytes.items():
        metrics.assign(STORE_BYTES, moved_bytes, asked.value)
    for outcome, requests in store.prefetches.items():
        metrics.assign(STORE_PREFETCHES, requests, outcome)
    metrics.assign(STORE_SECONDS, stored.sums.seconds)
    metrics.assign(STORE_WAITING, store.waiting_prompts)

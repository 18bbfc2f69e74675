"""A node as its operator sees it: the status page, and the gauges that are set when somebody scrapes.

Owns: what is shown and under which names. Must not know: how any of it comes about; it only reads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvbridge import __version__
from kvbridge.core.geometry.manifest import fingerprint

if TYPE_CHECKING:
    from kvbridge.daemon.node import NodeDaemon


def node_status(node: NodeDaemon) -> dict[str, Any]:
    """Everything an operator wants to see, as JSON-able data."""
    parts, now_s = node.parts, time.monotonic()
    config, identity = parts.config, parts.identity
    return {
        "role": identity.role,
        "instance": identity.instance,
        "node": identity.node,
        "incarnation": identity.incarnation,
        "version": __version__,
        "uptime_s": round(now_s - node.started_s, 1),
        "model": {"name": parts.geometry.name, "fingerprint": fingerprint(parts.geometry)},
        "memory_bytes": parts.layout.total_bytes,
        "ready": node.readiness().model_dump(),
        "bootstrap": {"url": config.bootstrap.url, "problem": node.bootstrap_problem},
        "control": node.control.endpoint if node.control else "",
        "ranks": parts.workers.status(),
        "engines": [
            {"name": engine.name, "pid": engine.pid, "ranks": [str(rank) for rank in engine.ranks], "gone": engine.gone}
            for engine in parts.engines.listing()
        ],
        "peers": node.peers.listing(),
        "rooms": node.rooms.states(),
        "admission": node.admission.status(),
        "pools": {
            space.value: {state.value: pages for state, pages in states.items()}
            for space, states in node.parts.book.counts().items()
        },
        "quarantine": {
            reason: [str(owner) for owner in owners] for reason, owners in parts.book.quarantine_reasons().items()
        },
        "problems": [
            {
                "ago_s": round(now_s - problem.at_s, 1),
                "what": problem.what,
                "whom": problem.whom,
                "reason": problem.reason,
            }
            for problem in parts.recent.problems()
        ],
        "traffic": {
            peer: {
                "sent_bytes": traffic.sent_bytes,
                "received_bytes": traffic.received_bytes,
                "rooms_completed": traffic.rooms_completed,
                "rooms_failed": traffic.rooms_failed,
                "last_ago_s": round(now_s - traffic.last_s, 1),
            }
            for peer, traffic in parts.recent.traffic().items()
        },
        **node.peers.status(),
    }


def node_metrics(node: NodeDaemon) -> tuple[bytes, str]:
    """Set what is only known now, and return the metrics page and its content type."""
    metrics = node.parts.metrics
    metrics.rooms(node.rooms.states())
    metrics.quarantined(node.rooms.quarantined())
    metrics.epoch(node.peers.epoch)
    for space, states in node.parts.book.counts().items():
        metrics.pool(space, {state.value: pages for state, pages in states.items()})
    metrics.peers({"known": len(node.peers.listing())})
    metrics.admission(
        waiting=node.admission.waiting,
        oldest_wait_s=node.admission.oldest_wait_s(),
        starved_s=node.admission.starved_s(),
    )
    metrics.ready(node.readiness().ready)
    return metrics.render()

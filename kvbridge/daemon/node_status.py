"""A node as its operator sees it: the status page, and the gauges that are set when somebody scrapes.

Owns: what is shown and under which names. Must not know: how any of it comes about; it only reads.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvbridge import __version__
from kvbridge.core.geometry.manifest import fingerprint

if TYPE_CHECKING:
    from kvbridge.daemon.node import Node


def node_status(node: Node) -> dict[str, Any]:
    """Everything an operator wants to see, as JSON-able data."""
    config, now_s = node.config, time.monotonic()
    return {
        "role": node.role,
        "instance": config.instance,
        "node": config.node,
        "incarnation": node.incarnation,
        "version": __version__,
        "uptime_s": round(now_s - node.started_s, 1),
        "model": {"name": node.geometry.name, "fingerprint": fingerprint(node.geometry)},
        "memory_bytes": node.layout.total_bytes,
        "ready": node.readiness().model_dump(),
        "bootstrap": {"url": config.bootstrap.url, "problem": node.bootstrap_problem},
        "control": node.control.endpoint if node.control else "",
        "ranks": node.workers.status(),
        "engines": [
            {"name": engine.name, "pid": engine.pid, "ranks": [str(rank) for rank in engine.ranks], "gone": engine.gone}
            for engine in node.door.engines()
        ],
        "peers": node.peer_status(),
        "rooms": node.room_states(),
        "admission": node.desk.status(),
        "pools": {
            space.value: {state.value: pages for state, pages in states.items()}
            for space, states in node.book.counts().items()
        },
        "quarantine": {
            reason: [str(owner) for owner in owners] for reason, owners in node.book.quarantine_reasons().items()
        },
        "problems": [
            {
                "ago_s": round(now_s - problem.at_s, 1),
                "what": problem.what,
                "whom": problem.whom,
                "reason": problem.reason,
            }
            for problem in node.recent.problems()
        ],
        "traffic": {
            peer: {
                "sent_bytes": traffic.sent_bytes,
                "received_bytes": traffic.received_bytes,
                "rooms_completed": traffic.rooms_completed,
                "rooms_failed": traffic.rooms_failed,
                "last_ago_s": round(now_s - traffic.last_s, 1),
            }
            for peer, traffic in node.recent.traffic().items()
        },
    }


def node_metrics(node: Node) -> tuple[bytes, str]:
    """Set what is only known now, and return the metrics page and its content type."""
    metrics = node.metrics
    metrics.rooms(node.room_states())
    metrics.quarantined(node.quarantined_rooms())
    metrics.epoch(node.epoch)
    for space, states in node.book.counts().items():
        metrics.pool(space, {state.value: pages for state, pages in states.items()})
    metrics.peers({"known": len(node.peer_status())})
    metrics.admission(
        waiting=node.desk.waiting, oldest_wait_s=node.desk.oldest_wait_s(), starved_s=node.desk.starved_s()
    )
    metrics.ready(node.readiness().ready)
    return metrics.render()

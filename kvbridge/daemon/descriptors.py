"""How many connections a daemon can afford, by the file descriptors that it may open.

Owns: the share of each endpoint. Must not know: who connects.
"""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger(__name__)

SHARE = 4
"""Each listening endpoint gets this part (1/n) of the descriptors; two are open at most, the rest is for workers, engines, files."""


def affordable(configured: int, key: str, *, each: int = 1) -> int:
    """Return how many connections there may be: as configured by `key`, or what the API's share allows.

    `each`: descriptors that one connection takes.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = configured if descriptors == resource.RLIM_INFINITY else max(1, descriptors // SHARE // each)
    if most < configured:
        remedy = "allow the process more open files (LimitNOFILE, ulimit -n), or configure less"
        log.warning(
            "connections_limited", key=key, configured=configured, limit=most, open_files=descriptors, do=remedy
        )
    return min(configured, most)

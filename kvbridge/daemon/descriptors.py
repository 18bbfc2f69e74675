"""How many files a daemon may open, and how many connections it can afford by that."""

from __future__ import annotations

import resource

import structlog

log = structlog.get_logger(__name__)

SHARE = 4
"""Each listening endpoint gets this part (1/n) of all; at most two listen, the rest is for workers, engines, files."""


def raise_open_files() -> None:
    """Let this process, and those that it starts, open as many files as the system allows it.

    The soft limit of 1024 is there for programs that call select(), which no descriptor above suits. Nothing here does: Python and
    ZeroMQ wait by poll and epoll, and so do the transport libraries.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def affordable(configured: int, key: str, *, each: int = 1) -> int:
    """Return how many connections there may be: as configured by `key`, or what the API's share allows.

    `each`: descriptors that one connection takes.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = configured if descriptors == resource.RLIM_INFINITY else max(1, descriptors // SHARE // each)
    if most < configured:
        remedy = "raise the hard limit of open files (LimitNOFILE, ulimit -Hn), or configure less"
        log.warning(
            "connections_limited", key=key, configured=configured, limit=most, open_files=descriptors, do=remedy
        )
    return min(configured, most)

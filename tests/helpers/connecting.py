"""Connecting to a peer as a test does: with nothing else to do meanwhile."""

from __future__ import annotations

import time

from kvbridge.transport.base import Endpoint, Peer, Transport

LIMIT_S = 30.0
PAUSE_S = 0.0005


def connect(transport: Transport, endpoint: Endpoint) -> Peer:
    """Poll the connection until there is a peer; raises what it raises, and TimeoutError after `LIMIT_S`."""
    connection = transport.connect(endpoint)
    ends_at_s = time.monotonic() + LIMIT_S
    while (peer := connection.poll()) is None:
        if time.monotonic() >= ends_at_s:
            raise TimeoutError(f"{transport!r} is still connecting after {LIMIT_S} s")
        time.sleep(PAUSE_S)
    return peer

"""The limits on the connections of an HTTP server, for tests that ask nobody what was left out of the log."""

from __future__ import annotations

from kvbridge.http.connections import ConnectionLimits
from kvbridge.telemetry.logs import Seldom


def limits(*, request_s: float = 10.0, connections: int = 2_048) -> ConnectionLimits:
    """Return limits that few tests meet, or these."""
    return ConnectionLimits(request_s=request_s, connections=connections, seldom=Seldom(lambda _event: None))

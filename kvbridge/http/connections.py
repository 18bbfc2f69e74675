"""How long a caller may take over its request, and how many callers there may be.

Owns: the two limits on connections that uvicorn does not have. Must not know: what is asked.

Both hold for whoever reaches the port, with or without a token: a connection that says nothing, or sends a byte now and
then, is closed, and beyond the limit new ones are closed at once, so that no caller takes the descriptors that the
control sockets need.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import h11
import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """The configuration keys `http.max_request_s` and `http.max_connections`."""

    request_s: float
    """From the connection, or the first byte after an answer, to the last byte of a request."""
    connections: int


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with the limits of its class; see `bounded`."""

    limits: ConnectionLimits
    refusals: Seldom
    _hurry: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            if self.refusals.admits("connections"):
                log.warning("connection_refused", open=len(self.connections) - 1, limit="http.max_connections")
            transport.abort()
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._arm()
        super().data_received(data)
        if self.conn.their_state not in {h11.IDLE, h11.SEND_BODY}:
            self._disarm()  # the request is here; how long its answer takes is the application's business

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._disarm()
        super().connection_lost(exc)

    def _arm(self) -> None:
        if self._hurry is None:
            self._hurry = self.loop.call_later(self.limits.request_s, self._too_slow)

    def _disarm(self) -> None:
        if self._hurry is not None:
            self._hurry.cancel()
            self._hurry = None

    def _too_slow(self) -> None:
        self._hurry = None
        log.debug("connection_closed", reason="no whole request in time", limit="http.max_request_s")
        self.transport.abort()


def bounded(limits: ConnectionLimits) -> type[H11Protocol]:
    """Return a protocol for uvicorn that keeps the limits."""
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits, "refusals": Seldom()})

"""What rank workers have under way, as metrics: bytes by transport, and the time in which at least one order moved.

Owns: which orders are out, so that busy time ends with each of them whatever becomes of it. Must not know: rooms.
"""

from __future__ import annotations

from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Send, Sent
from kvbridge.telemetry.metrics import Direction, Metrics


class TrafficMeter:
    """Counts the sending side of a node. Called from the loop's thread only."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._out: dict[Rank, dict[int, str]] = {}

    def ordered(self, rank: Rank, message: Send, transport: str) -> None:
        """An order went out to a rank worker, for peers that it reaches over `transport`."""
        self._out.setdefault(rank, {})[message.order] = transport
        self._metrics.transfer_began(Direction.SENT, transport)

    def sent(self, message: Sent) -> None:
        """An order ended."""
        transport = self._out.get(message.rank, {}).pop(message.order, None)
        if transport is None:
            return
        self._metrics.transfer_ended(Direction.SENT, transport)
        self._metrics.transferred(message.amounts, Direction.SENT, transport)

    def lost(self, rank: Rank) -> None:
        """A rank worker is gone, and with it everything it had under way."""
        for transport in self._out.pop(rank, {}).values():
            self._metrics.transfer_ended(Direction.SENT, transport)

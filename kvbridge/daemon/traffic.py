"""What rank workers have under way, as metrics: bytes by transport, and the time in which at least one order moved.

Owns: which orders are out, so that busy time ends with each of them whatever becomes of it. Must not know: rooms.
"""

from __future__ import annotations

from collections.abc import Callable

from kvbridge.core.ids import Rank
from kvbridge.core.wire.worker_messages import NodeToWorker, Send, Sent
from kvbridge.node.workers import WorkerSet
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


class MeteredWorkers:
    """The node's rank workers as rooms see them, with an ear for every order that goes out."""

    def __init__(self, workers: WorkerSet, on_order: Callable[[Rank, Send], None]) -> None:
        self._workers = workers
        self._on_order = on_order

    @property
    def layers(self) -> dict[Rank, tuple[int, ...]]:
        """The global layer ids of every rank of the node."""
        return self._workers.layers

    def missing(self) -> str:
        """Why not every rank can work now, or an empty text."""
        return self._workers.missing()

    def send(self, rank: Rank, message: NodeToWorker) -> None:
        """Queue an order."""
        if isinstance(message, Send):
            self._on_order(rank, message)
        self._workers.send(rank, message)

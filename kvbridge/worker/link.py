"""The way between a rank worker and its node, as the worker sees it."""

from __future__ import annotations

from typing import Protocol

from kvbridge.core.wire.worker_messages import NodeToWorker, WorkerToNode


class NodeLink(Protocol):
    """The worker's end of the connection to its node. Both calls raise PeerError once the node is gone."""

    def send(self, message: WorkerToNode) -> None:
        """Queue a message to the node."""

    def receive(self, timeout_s: float) -> NodeToWorker | None:
        """Return the next message, or None after `timeout_s`."""

"""The way between a rank worker and its node, as the worker sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kvbridge.control.local import LocalClient
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.worker_messages import NodeToWorker, WorkerToNode


class NodeLink(Protocol):
    """The worker's end of the connection to its node. Both calls raise PeerError once the node is gone."""

    def send(self, message: WorkerToNode) -> None:
        """Queue a message to the node."""

    def receive(self, timeout_s: float) -> NodeToWorker | None:
        """Return the next message, or None after `timeout_s`."""


def open_node_link(path: Path, name: str) -> LocalClient[NodeToWorker, WorkerToNode]:
    """Connect to the node that listens for rank workers on `path`; used by the thread that serves the rank."""
    return LocalClient(name, path, NODE_TO_WORKER, WORKER_TO_NODE)

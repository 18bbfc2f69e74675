"""The way between a rank worker and its node, as the worker sees it."""

from __future__ import annotations

from pathlib import Path

from kvbridge.control.local import LocalClient
from kvbridge.core.wire.codec import NODE_TO_WORKER, WORKER_TO_NODE
from kvbridge.core.wire.worker_messages import NodeToWorker, WorkerToNode

NodeLink = LocalClient[NodeToWorker, WorkerToNode]
"""Used by the thread that serves the rank only."""


def open_node_link(path: Path) -> NodeLink:
    """Connect to the node that listens for rank workers on `path`."""
    return LocalClient(path, NODE_TO_WORKER, WORKER_TO_NODE)

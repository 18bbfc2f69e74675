"""Whether this host has a GPU at all, found without loading anything.

Owns: the device nodes that drivers make. Must not know: CUDA, transports.
"""

from __future__ import annotations

from pathlib import Path

ACCELERATOR_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_accelerator() -> bool:
    """Whether a driver has made its device node. Libraries list device memory as reachable whether there is one or not."""
    return any(node.exists() for node in ACCELERATOR_NODES)

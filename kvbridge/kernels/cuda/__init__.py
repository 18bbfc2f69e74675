"""The CUDA side of the kernels: the runtime's calls, programs compiled at run time, and their launches."""

from __future__ import annotations

from pathlib import Path

ACCELERATOR_NODES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))


def has_accelerator() -> bool:
    """Whether a driver has made its device node on this host; found without loading anything.

    Libraries list device memory as reachable whether there is a device or not.
    """
    return any(node.exists() for node in ACCELERATOR_NODES)

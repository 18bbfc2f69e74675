"""What the figures were measured on.

Owns: looking. Nothing here may fail: what cannot be found out is left out.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from kvbridge.kernels.cuda import runtime

LIBRARIES = ("torch", "numpy", "cuda-core", "cuda-bindings", "nixl", "nixl-cu12", "nixl-cu13", "pyzmq")
_DRESSING = re.compile(r"\x1b\[[0-9;]*m")
"""Underlined headings: some tools write for a terminal whoever reads."""
QUERY = ("name", "driver_version", "pcie.link.gen.max", "pcie.link.width.max", "clocks.max.sm", "memory.total")


def environment() -> dict[str, Any]:
    """Return devices, driver, links, processor, versions and, where known, the commit."""
    count = runtime.device_count()
    return {
        "measured": time.strftime("%Y-%m-%d"),
        "devices": [runtime.device_facts(device).name for device in range(count)],
        "nvidia_smi": _smi(),
        "peer_access": [[runtime.can_reach(a, b) for b in range(count)] for a in range(count)],
        "nvlink": _output(["nvidia-smi", "topo", "-m"]).splitlines()[: count + 1],
        "cpu": _cpu(),
        "cpu_count": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "libraries": {name: version for name in LIBRARIES if (version := _version(name))},
        "commit": os.environ.get("KVBRIDGE_COMMIT") or _output(["git", "rev-parse", "--short", "HEAD"]),
    }


def _smi() -> list[dict[str, str]]:
    text = _output(["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader"])
    return [dict(zip(QUERY, (part.strip() for part in line.split(",")), strict=False)) for line in text.splitlines()]


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return _DRESSING.sub("", done.stdout).strip() if done.returncode == 0 else ""

"""The bytes that can still be put into a shared-memory directory before something kills or refuses us.

Pages of a shared-memory file are charged to the control group of whoever touches them first, and going over that
limit is not an error but the kernel's OOM killer. So it is looked at before, not after.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")

_IN_MEMORY = {0x0102_1994: "tmpfs", 0x9584_58F6: "hugetlbfs"}
"""`f_type` of statfs(2)."""
_STATFS_BYTES = 256
"""More than `struct statfs` has; it begins with `f_type`, a long."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One limit: what it is called, what is left of it, and what an operator does about it."""

    name: str
    available_bytes: int
    cure: str


def why_not_memory(directory: Path) -> str:
    """Say why files in `directory` would not be shared memory; empty when they would be."""
    status = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(os.fsencode(directory), status) != 0:
        return f"{directory}: {os.strerror(ctypes.get_errno())}"
    if not directory.is_dir():
        return f"{directory} is not a directory"
    kind = ctypes.c_long.from_buffer(status).value & 0xFFFF_FFFF
    return "" if kind in _IN_MEMORY else f"{directory} is on a file system of type {kind:#x}, not in memory"


def tightest_limit(directory: Path) -> MemoryLimit:
    """The limit that a new file in `directory` would meet first."""
    limits = [_file_system(directory), *machine_limits(PROC / "meminfo"), *control_group_limits()]
    return min(limits, key=lambda limit: limit.available_bytes)


def control_group_limits(proc: Path = PROC, root: Path = CGROUP_ROOT) -> list[MemoryLimit]:
    """The memory limits of this process's control groups and of all their parents, of version 1 and 2."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _walk(root, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            found += _walk(
                root / "memory", path, ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            )
    return found


def _walk(root: Path, path: str, names: tuple[str, str, str]) -> list[MemoryLimit]:
    """Read every group from the process's own up to the root. Inside a container the own one may not be visible."""
    group = root / path.lstrip("/")
    found = []
    while True:
        limit = _read_group(group, names)
        if limit:
            found.append(limit)
        if group == root or root not in group.parents:
            return found
        group = group.parent


def _read_group(group: Path, names: tuple[str, str, str]) -> MemoryLimit | None:
    limit_name, usage_name, cache_name = names
    limit, usage = _read_number(group / limit_name), _read_number(group / usage_name)
    if limit is None or usage is None or limit >= 2**60:  # "no limit" of version 1 is a number close to 2^63
        return None
    return MemoryLimit(
        name=f"memory limit of control group {group}",
        available_bytes=max(0, limit - usage + _read_statistic(group / "memory.stat", cache_name)),
        cure="raise the memory limit of the container or unit (it counts shared memory too)",
    )


def _file_system(directory: Path) -> MemoryLimit:
    status = os.statvfs(directory)
    return MemoryLimit(
        name=f"file system of {directory}",
        available_bytes=status.f_bavail * status.f_frsize,
        cure=f"enlarge {directory} (docker: --shm-size; kubernetes: an emptyDir with medium Memory; "
        f"else: mount -o remount,size=... {directory}) or remove what fills it",
    )


def machine_limits(meminfo: Path = PROC / "meminfo") -> list[MemoryLimit]:
    """Return the limit that is this machine's memory."""
    kibibytes = _read_statistic(meminfo, "MemAvailable:")
    if not kibibytes:
        return []
    return [MemoryLimit("memory of this machine", kibibytes * 1024, "end other processes or use a larger machine")]


def _read_number(path: Path) -> int | None:
    """The number in a file; None when there is no file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_statistic(path: Path, name: str) -> int:
    """The number behind `name` in a file of "name number" lines; 0 when there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(words[1]) for line in lines if len(words := line.split()) > 1 and words[0] == name), 0)

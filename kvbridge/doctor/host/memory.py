"""Memory as /proc, /sys and the file systems show it."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterable
from pathlib import Path

from kvbridge.doctor.facts import Available, HugePages, LeftFile, Limit, Memory, NumaNode, SharedDirectory
from kvbridge.pool.memory.leftovers import Verdict, sweep
from kvbridge.pool.memory.memory_limits import control_group_limits, machine_limits, why_not_memory

ROOT = Path("/")
CAP_IPC_LOCK = 14
CAP_SYS_PTRACE = 19


def read_memory(directories: Iterable[Path], root: Path = ROOT) -> Memory:
    """Look at memory, and at some directories for shared memory. `root`: where proc and sys are found."""
    status = _status(root)
    places = tuple(dict.fromkeys(directories))
    return Memory(
        locked=limit_of(resource.RLIMIT_MEMLOCK),
        may_lock_any=has_capability(CAP_IPC_LOCK, root),
        shared=tuple(_shared(place) for place in places),
        limits=tuple(
            Available(name=each.name, available_bytes=each.available_bytes, cure=each.cure)
            for each in (*machine_limits(root / "proc/meminfo"), *control_group_limits())
        ),
        huge_pages=_huge_pages(root),
        nodes=tuple(_nodes(root)),
        allowed_nodes=expand(status.get("Mems_allowed_list", "")),
        left=tuple(_left(places)),
    )


def limit_of(which: int) -> Limit:
    """Return a resource limit of this process."""
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft=soft, hard=hard)


def has_capability(number: int, root: Path = ROOT) -> bool:
    """Whether this process has a capability in force."""
    return bool(int(_status(root).get("CapEff", "0"), 16) >> number & 1)


def expand(numbers: str) -> tuple[int, ...]:
    """Return the numbers of a kernel list such as 0-2,5."""
    found: list[int] = []
    for part in filter(None, numbers.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def read_text(path: Path) -> str:
    """What a file of /proc or /sys says, empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_number(path: Path) -> int | None:
    """The number in a file of /proc or /sys, None when there is none."""
    try:
        return int(read_text(path))
    except ValueError:
        return None


def _status(root: Path) -> dict[str, str]:
    lines = read_text(root / "proc/self/status").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _shared(directory: Path) -> SharedDirectory:
    problem = why_not_memory(directory)
    if problem:
        return SharedDirectory(path=str(directory), problem=problem)
    found = os.statvfs(directory)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return SharedDirectory(path=str(directory), total_bytes=total, free_bytes=free)


def _huge_pages(root: Path) -> HugePages:
    lines = read_text(root / "proc/meminfo").splitlines()
    facts = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines) if rest.split()}
    modes = read_text(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return HugePages(
        page_bytes=facts.get("Hugepagesize", 0) * 1024,
        total=facts.get("HugePages_Total", 0),
        free=facts.get("HugePages_Free", 0),
        shared_memory=modes.partition("[")[2].partition("]")[0],
    )


def _nodes(root: Path) -> Iterable[NumaNode]:
    for directory in sorted((root / "sys/devices/system/node").glob("node[0-9]*")):
        words = [line.split() for line in read_text(directory / "meminfo").splitlines()]
        facts = {line[2].rstrip(":"): int(line[3]) * 1024 for line in words if len(line) > 3 and line[3].isdecimal()}
        number = int(directory.name.removeprefix("node"))
        free_bytes = sum(facts.get(name, 0) for name in ("MemFree", "Inactive(file)", "SReclaimable"))
        yield NumaNode(number=number, total_bytes=facts.get("MemTotal", 0), free_bytes=free_bytes)


def _is_locked(path: Path) -> bool:
    """Whether somebody owns a file after all: a process of another pid namespace is not seen, its lock is."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _left(directories: Iterable[Path]) -> Iterable[LeftFile]:
    """What nobody alive is seen to own. A sweep that cannot look into a directory says so itself."""
    try:
        found = sweep(directories, dry_run=True)
    except OSError:
        return
    for each in found:
        if each.verdict not in {Verdict.IN_USE, Verdict.KEPT} and each.holder is None and not _is_locked(each.path):
            ours = each.verdict is Verdict.REMOVED
            yield LeftFile(
                path=str(each.path), size_bytes=each.size_bytes, user_id=each.user_id, ours=ours, why=each.why
            )

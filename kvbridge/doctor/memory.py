"""Memory, open files and the runtime directory: the limits and rights of this process, where pools go, what limits them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvbridge.control.runtime_directory import require_private_directory
from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, Needs, breaks, fine, not_here, size, warning
from kvbridge.pool.memory.memory_limits import MemoryLimit, control_group_limits, machine_limits, why_not_memory
from kvbridge.processes import OPEN_FILES_SHARE

ROOT = Path("/")
CAP_IPC_LOCK = 14
LEAST_FILES = 1024
LEAST_LOCKED_BYTES = 64 << 20
"""What RDMA queues and small buffers want locked, when the size of the pools is not known."""


class Limit(FrozenModel):
    """A resource limit of this process; None: unlimited."""

    soft: int | None = None
    hard: int | None = None


class SharedDirectory(FrozenModel):
    """A directory for shared memory."""

    path: str
    problem: str = ""
    """Why files in it would not be shared memory."""
    total_bytes: int = 0
    free_bytes: int = 0


class Memory(FrozenModel):
    """Memory of this host, and the limits of this process."""

    locked: Limit = Limit()
    may_lock_any: bool = False
    """CAP_IPC_LOCK: the limit does not count."""
    shared: tuple[SharedDirectory, ...] = ()
    limits: tuple[MemoryLimit, ...] = ()
    """Of the machine and of the control groups."""


def read_memory(directories: Iterable[Path], root: Path = ROOT) -> Memory:
    """Look at memory, and at some directories for shared memory. `root`: where proc and sys are found."""
    places = tuple(dict.fromkeys(directories))
    status = dict(line.partition(":")[::2] for line in read_text(root / "proc/self/status").splitlines())
    return Memory(
        locked=read_limit(resource.RLIMIT_MEMLOCK),
        may_lock_any=bool(int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1),
        shared=tuple(_shared(place) for place in places),
        limits=(*machine_limits(root / "proc/meminfo"), *control_group_limits()),
    )


def read_limit(which: int) -> Limit:
    """Return a resource limit of this process."""
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(which))
    return Limit(soft=soft, hard=hard)


def read_text(path: Path) -> str:
    """Return what a file of /proc or /sys says, empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _shared(directory: Path) -> SharedDirectory:
    problem = why_not_memory(directory)
    if problem:
        return SharedDirectory(path=str(directory), problem=problem)
    found = os.statvfs(directory)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return SharedDirectory(path=str(directory), total_bytes=total, free_bytes=free)


def check_locked(memory: Memory, needs: Needs, *, rdma: bool) -> Iterator[Finding]:
    """RDMA registration locks every page, and counts it against RLIMIT_MEMLOCK. `rdma`: there is a device."""
    limit, wanted = memory.locked.soft, max(needs.shared_bytes, LEAST_LOCKED_BYTES)
    if limit is None or memory.may_lock_any:
        yield fine(f"memory may be locked without a limit{' (CAP_IPC_LOCK)' if memory.may_lock_any else ''}")
    elif limit >= wanted:
        yield fine(f"{size(limit)} may be locked, {size(wanted)} are needed")
    elif not needs.rdma_required and not (needs.rdma_wanted and rdma):
        yield not_here(
            f"only {size(limit)} may be locked (ulimit -l)",
            "nothing here locks memory: only RDMA would, to register the pools",
        )
    else:
        yield breaks(
            f"only {size(limit)} may be locked (ulimit -l), {size(wanted)} are needed",
            "the network card registers the pools, which locks their pages: beyond the limit registration fails with ENOMEM",
            "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; "
            "kubernetes: securityContext.capabilities.add: [IPC_LOCK])",
        )


def check_shared(memory: Memory, needs: Needs) -> Iterator[Finding]:
    """Pools are files in shared memory: it must be memory, and large enough."""
    for directory in memory.shared:
        path, need = directory.path, needs.shared_bytes if directory.path == needs.directory else 0
        if directory.problem:
            yield breaks(
                f"shared memory: {directory.problem}",
                "pools are files that daemon, rank workers and engines map; on a disk every access would go through it",
                f"mkdir -p {path} && mount -t tmpfs -o size={_mebibytes(max(needs.shared_bytes, 1 << 30))} kvbridge {path}, or "
                "set pools.host.directory: /dev/shm",
                subject=path,
            )
        elif need <= directory.free_bytes:
            yield fine(
                f"{path} has {size(directory.free_bytes)} free of {size(directory.total_bytes)}"
                + (f", the pools take {size(need)}" if need else ""),
                subject=path,
            )
        else:
            lacking = need - directory.free_bytes
            target = _mebibytes(directory.total_bytes + lacking)
            yield breaks(
                f"{path} has {size(directory.free_bytes)} free of {size(directory.total_bytes)}, the pools need {size(need)}",
                f"{size(lacking)} are lacking, so the daemon will not start (Docker gives containers 64 MiB unless told otherwise)",
                f"mount -o remount,size={target} {path} (docker: --shm-size={target}; kubernetes: "
                "an emptyDir with medium: Memory), `kvbridge clean` for what dead daemons left, or smaller pools",
                subject=path,
            )


def _mebibytes(value_bytes: int) -> str:
    """Return a number of bytes as mount(8) and Docker take it, rounded up."""
    return f"{-(-value_bytes // (1 << 20))}m"


def check_limits(memory: Memory, needs: Needs) -> Iterator[Finding]:
    """Shared memory is charged to the control group of whoever touches it first; beyond the limit the kernel kills."""
    need_bytes = needs.shared_bytes
    for limit in memory.limits:
        if need_bytes <= limit.available_bytes:
            yield fine(f"{limit.name}: {size(limit.available_bytes)} left", subject=limit.name)
        else:
            yield breaks(
                f"{limit.name}: {size(limit.available_bytes)} left, the pools need {size(need_bytes)}",
                "pools are touched whole at the start; beyond the limit the kernel kills the daemon (OOM, exit 137), "
                "so it refuses to start",
                limit.cure + ", or configure smaller pools",
                subject=limit.name,
            )


class Directory(FrozenModel):
    """A directory or what lies in its place."""

    path: str
    problem: str = ""
    """Why it could not be used."""
    exists: bool = True


class Process(FrozenModel):
    """What this process may do."""

    open_files: Limit = Limit()
    runtime: Directory | None = None


def read_process(runtime_directory: Path | None) -> Process:
    """Look at limits and rights."""
    runtime = None
    if runtime_directory is not None:
        path = str(runtime_directory)
        try:
            runtime = Directory(path=path, exists=require_private_directory(runtime_directory))
        except ConfigError as error:
            runtime = Directory(path=path, problem=str(error))
    return Process(open_files=read_limit(resource.RLIMIT_NOFILE), runtime=runtime)


def check_open_files(process: Process, needs: Needs) -> Iterator[Finding]:
    """Connections are file descriptors; a daemon raises the soft limit to the hard one and serves what that affords."""
    hard = process.open_files.hard
    wanted = max([needs.idle_connections, *(port.connections for port in needs.ports)], default=0) * OPEN_FILES_SHARE
    raise_it = (
        "raise the hard limit: systemd LimitNOFILE=1048576; docker --ulimit nofile=1048576; /etc/security/limits.conf"
    )
    if hard is None or hard >= max(wanted, LEAST_FILES):
        yield fine(
            f"{'any number of' if hard is None else hard} files may be open" + (f", {wanted} are enough" * bool(wanted))
        )
    elif hard < LEAST_FILES:
        yield breaks(
            f"only {hard} files may be open (ulimit -Hn)",
            "daemon, rank workers and transports take some hundreds before the first peer connects",
            raise_it,
        )
    else:
        yield warning(
            f"{hard} files may be open (ulimit -Hn), the configured connections want {wanted}",
            f"each endpoint gets a quarter ({hard // OPEN_FILES_SHARE}); callers beyond that are hung up on",
            f"{raise_it}; or lower http.max_connections and control.max_connections",
        )


def check_runtime_directory(process: Process, needs: Needs) -> Iterator[Finding]:
    """Whoever can enter the runtime directory is believed, so it must be this user's alone."""
    found = process.runtime
    if found is None:
        yield not_here("no runtime directory", "bootstrap has none" if needs.role else "no configuration was given")
    elif found.problem:
        yield breaks(
            found.problem,
            "engines and rank workers trust whoever serves the sockets in it, so a daemon does not start in one that others can "
            "enter",
            f"chown $(id -u) {found.path} && chmod 700 {found.path}, or set runtime_dir",
        )
    else:
        yield fine(f"{found.path} {'is private' if found.exists else 'will be made'}")

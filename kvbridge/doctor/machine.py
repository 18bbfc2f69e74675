"""Memory and GPUs of this host, and the limits and rights of this process.

`python -m kvbridge.doctor.machine ORDINAL HANDLE` opens device memory of another process, and prints why it cannot.
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvbridge.control.unix_sockets import require_private_directory
from kvbridge.core.errors import CHECKOUT, BridgeError, ConfigError
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, Needs, breaks, fine, not_here, size, warning
from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.runtime import DeviceFacts, has_accelerator
from kvbridge.pool.memory.shared_mapping import MemoryLimit, control_group_limits, machine_limits, why_not_memory
from kvbridge.processes import OPEN_FILES_SHARE, module_command, signal_name

ROOT = Path("/")
CAP_IPC_LOCK = 14
LEAST_FILES = 1024
LEAST_LOCKED_BYTES = 64 << 20
"""Bytes that RDMA queues and small buffers lock, when the size of the pools is not known."""
TRIAL_BYTES = 2 << 20
OPENING_S = 60.0
CUDA_13_DRIVER = 580
"""The first branch of the driver that runs CUDA 13."""
DRIVER_CURE = (
    "containers: docker run --gpus all (kubernetes: nvidia.com/gpu), else install the driver; then: nvidia-smi"
)
FILES_CURE = "raise the hard limit: systemd LimitNOFILE=1048576; docker --ulimit nofile=1048576; limits.conf"


class Directory(FrozenModel):
    """The runtime directory, or a directory for shared memory."""

    path: str
    problem: str = ""
    """Why it cannot be used."""
    exists: bool = True
    total_bytes: int = 0
    free_bytes: int = 0


class Machine(FrozenModel):
    """Facts of this host and of this process."""

    locked_bytes: int | None = None
    """Limit of the memory that this process may lock; None: unlimited."""
    may_lock_any: bool = False
    """CAP_IPC_LOCK: the limit does not count."""
    shared: tuple[Directory, ...] = ()
    limits: tuple[MemoryLimit, ...] = ()
    """Memory limits of the machine and of the control groups."""
    open_files: int | None = None
    """Hard limit of open files; None: unlimited."""
    runtime: Directory | None = None
    accelerator: bool = False
    """Whether a GPU's driver has made its device node."""
    driver: str = ""
    gpu_problem: str = ""
    """Why this process cannot use a GPU."""
    gpus: tuple[DeviceFacts, ...] = ()
    """The GPUs that this process sees, by ordinal."""
    ipc_problem: str | None = None
    """Why another process could not open device memory of this one; None: not tried."""


def read_machine(
    directories: Iterable[Path], runtime_dir: Path | None = None, used: tuple[int, ...] = (), root: Path = ROOT
) -> Machine:
    """Read memory, limits, directories for shared memory, and GPUs. `root`: where proc and sys are found.

    With `used` GPUs, another process also opens memory of the first of them.
    """
    status = dict(line.partition(":")[::2] for line in read_text(root / "proc/self/status").splitlines())
    return Machine(
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK, 0),
        may_lock_any=bool(int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1),
        shared=tuple(_shared(place) for place in dict.fromkeys(directories)),
        limits=(*machine_limits(root / "proc/meminfo"), *control_group_limits()),
        open_files=_limit(resource.RLIMIT_NOFILE, 1),
        runtime=None if runtime_dir is None else _runtime(runtime_dir),
        **_gpus(used, root),
    )


def read_text(path: Path) -> str:
    """Return the content of a file of /proc or /sys, empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _limit(which: int, hard: int) -> int | None:
    value = resource.getrlimit(which)[hard]
    return None if value == resource.RLIM_INFINITY else value


def _shared(directory: Path) -> Directory:
    if problem := why_not_memory(directory):
        return Directory(path=str(directory), problem=problem)
    found = os.statvfs(directory)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    return Directory(path=str(directory), total_bytes=total, free_bytes=free)


def _runtime(path: Path) -> Directory:
    try:
        return Directory(path=str(path), exists=require_private_directory(path))
    except ConfigError as error:
        return Directory(path=str(path), problem=str(error))


def _gpus(used: tuple[int, ...], root: Path) -> dict[str, Any]:
    """Return the facts of a `Machine` about GPUs."""
    if not has_accelerator():
        return {}
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", read_text(root / "proc/driver/nvidia/version"))
    facts: dict[str, Any] = {"accelerator": True, "driver": version.group(1) if version else ""}
    if problem := runtime.reason_without_device():
        return facts | {"gpu_problem": problem}
    gpus = tuple(map(runtime.device_facts, range(runtime.device_count())))
    return facts | {"gpus": gpus, "ipc_problem": _try_sharing(used[0]) if used and used[0] < len(gpus) else None}


def _try_sharing(ordinal: int) -> str:
    """Let another process open memory of this one; return why it could not, empty when it could."""
    try:
        address = runtime.allocate(ordinal, TRIAL_BYTES)
        try:
            command = module_command(__name__, str(ordinal), runtime.export_memory(ordinal, address).hex())
            found = subprocess.run(command, capture_output=True, text=True, timeout=OPENING_S, check=False)
        finally:
            runtime.free(ordinal, address)
    except (BridgeError, subprocess.TimeoutExpired) as error:
        return str(error)
    if found.returncode < 0:
        return f"the process that opened it was ended by {signal_name(-found.returncode)}"
    return found.stdout.strip() or (found.stderr.strip()[-300:] if found.returncode else "")


# ---------------------------------------------------------------------------------------------- memory


def check_locked(machine: Machine, needs: Needs, *, rdma: bool) -> Iterator[Finding]:
    """RDMA registration locks every page, and counts it against RLIMIT_MEMLOCK. `rdma`: there is a device."""
    limit, wanted = machine.locked_bytes, max(needs.shared_bytes, LEAST_LOCKED_BYTES)
    if limit is None or machine.may_lock_any:
        yield fine(f"memory may be locked without a limit{' (CAP_IPC_LOCK)' if machine.may_lock_any else ''}")
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


def check_shared(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Pools are files in shared memory, whose directory must be memory, and large enough."""
    for directory in machine.shared:
        path, need = directory.path, needs.shared_bytes if directory.path == needs.directory else 0
        room = f"{path} has {size(directory.free_bytes)} free of {size(directory.total_bytes)}"
        if directory.problem:
            yield breaks(
                f"shared memory: {directory.problem}",
                "pools are files that daemon, rank workers and engines map; on a disk every access would go through it",
                f"mkdir -p {path} && mount -t tmpfs -o size={_mebibytes(max(needs.shared_bytes, 1 << 30))} kvbridge {path}, or "
                "set pools.host.directory: /dev/shm",
                subject=path,
            )
        elif need <= directory.free_bytes:
            yield fine(room + (f", the pools take {size(need)}" if need else ""), subject=path)
        else:
            lacking = need - directory.free_bytes
            target = _mebibytes(directory.total_bytes + lacking)
            yield breaks(
                f"{room}, the pools need {size(need)}",
                f"{size(lacking)} are lacking, so the daemon will not start (Docker gives containers 64 MiB unless told otherwise)",
                f"mount -o remount,size={target} {path} (docker: --shm-size={target}; kubernetes: "
                "an emptyDir with medium: Memory), `kvbridge clean` for files of dead daemons, or smaller pools",
                subject=path,
            )


def _mebibytes(value_bytes: int) -> str:
    """Return a number of bytes as mount(8) and Docker take it, rounded up."""
    return f"{-(-value_bytes // (1 << 20))}m"


def check_limits(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Shared memory is charged to the control group of its first user; beyond the limit the kernel kills."""
    for limit in machine.limits:
        if needs.shared_bytes <= limit.available_bytes:
            yield fine(f"{limit.name}: {size(limit.available_bytes)} left", subject=limit.name)
        else:
            yield breaks(
                f"{limit.name}: {size(limit.available_bytes)} left, the pools need {size(needs.shared_bytes)}",
                "pools are touched whole at the start; beyond the limit the kernel kills the daemon (OOM, exit 137), "
                "so it refuses to start",
                limit.cure + ", or configure smaller pools",
                subject=limit.name,
            )


# ---------------------------------------------------------------------------------------------- this process


def check_open_files(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Connections are file descriptors. A daemon raises its soft limit to the hard one, and serves as many as that allows."""
    hard = machine.open_files
    wanted = max([needs.idle_connections, *(port.connections for port in needs.ports)], default=0) * OPEN_FILES_SHARE
    if hard is None or hard >= max(wanted, LEAST_FILES):
        enough = f", {wanted} are enough" if wanted else ""
        yield fine(f"{'any number of' if hard is None else hard} files may be open{enough}")
    elif hard < LEAST_FILES:
        yield breaks(
            f"only {hard} files may be open (ulimit -Hn)",
            "daemon, rank workers and transports take some hundreds before the first peer connects",
            FILES_CURE,
        )
    else:
        yield warning(
            f"{hard} files may be open (ulimit -Hn), the configured connections need {wanted}",
            f"each endpoint gets a quarter ({hard // OPEN_FILES_SHARE}); connections beyond that are closed",
            f"{FILES_CURE}; or lower http.max_connections and control.max_connections",
        )


def check_runtime_directory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """The runtime directory must be this user's alone: everybody who can enter it is trusted."""
    found = machine.runtime
    if found is None:
        yield not_here("no runtime directory", "bootstrap has none" if needs.role else "no configuration was given")
    elif found.problem:
        yield breaks(
            found.problem,
            "engines and rank workers trust the sockets in it, so a daemon does not start in a directory that others can enter",
            f"chown $(id -u) {found.path} && chmod 700 {found.path}, or set runtime_dir",
        )
    else:
        yield fine(f"{found.path} {'is private' if found.exists else 'will be made'}")


# ---------------------------------------------------------------------------------------------- GPUs


def check_gpus(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Every GPU that ranks are placed on has to be there."""
    count = len(machine.gpus)
    missing = [ordinal for ordinal in needs.gpus if ordinal >= count]
    if needs.gpus and not count:
        yield breaks(
            f"ranks are placed on cuda:{', cuda:'.join(map(str, needs.gpus))}, but this process can use no GPU",
            machine.gpu_problem or "no driver has made /dev/nvidiactl",
            DRIVER_CURE + "; or set parallelism.device: cpu",
        )
    elif missing:
        yield breaks(
            f"ranks are placed on cuda:{', cuda:'.join(map(str, missing))}, but this process sees {count} GPUs",
            "those rank workers end at once, and the node never becomes ready",
            "unset CUDA_VISIBLE_DEVICES, or correct parallelism.ranks",
        )
    elif count:
        yield fine(f"{count} GPUs: {', '.join(sorted({gpu.name for gpu in machine.gpus}))}")
    elif machine.accelerator:
        yield warning(
            f"a GPU's driver is here, but this process cannot use it: {machine.gpu_problem}",
            "transports would neither see device memory nor copy with the GPU; the configuration places no rank on a GPU",
            f"{DRIVER_CURE}; {CHECKOUT.format('cuda')}",
        )
    else:
        why = "the configuration places no rank on one" if needs.role else "ranks can run on the CPU"
        yield not_here("no GPU", why)


def check_gpu_memory(machine: Machine, needs: Needs) -> Iterator[Finding]:
    """Device pools are allocated at the start."""
    for ordinal, gpu in enumerate(machine.gpus):
        need, subject = needs.device_bytes.get(ordinal, 0), f"cuda:{ordinal}"
        if need > gpu.free_bytes:
            yield breaks(
                f"{subject} has {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}, its pools need {size(need)}",
                "the rank worker cannot allocate them, and the node never becomes ready",
                "end the processes that hold it (nvidia-smi), lower the engine's share of memory, or lower pools.device.*",
                subject=subject,
            )
        else:
            yield fine(f"{subject}: {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}", subject=subject)


def check_driver(machine: Machine, packages: Mapping[str, str]) -> Iterator[Finding]:
    """Builds for CUDA 13 need a driver of at least that age."""
    if not machine.driver:
        yield not_here("no NVIDIA driver", "no GPU is used")
        return
    branch = int(machine.driver.partition(".")[0] or 0)
    for_13 = sorted(packages.keys() & {"nixl-cu13", "mooncake-transfer-engine-cuda13"})
    if branch < CUDA_13_DRIVER and for_13 and "nixl-cu12" not in packages:
        yield breaks(
            f"driver {machine.driver} is older than CUDA 13, which {', '.join(for_13)} is built for",
            "loading it fails, or its device memory cannot be used",
            f"pip install nixl-cu12 in its place, or upgrade the driver to {CUDA_13_DRIVER} or later",
        )
    else:
        yield fine(f"driver {machine.driver}")


def check_sharing(machine: Machine) -> Iterator[Finding]:
    """Engines open the device pools by CUDA IPC."""
    problem = machine.ipc_problem
    if problem is None:
        yield not_here("CUDA IPC was not tried", "there is no GPU" if not machine.gpus else "no rank is placed on one")
    elif problem:
        yield breaks(
            f"another process cannot open device memory (CUDA IPC): {problem}",
            "engines attach to device pools by it, and so do peers on this host",
            "give engine and daemon one IPC namespace (docker: --ipc=host or --ipc=container:...; kubernetes: hostIPC or one pod), "
            "unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for adopted memory",
        )
    else:
        yield fine("another process opened device memory of this one (CUDA IPC)")


def main() -> None:
    """Open the memory that the command line names, and close it."""
    ordinal = int(sys.argv[1])
    try:
        runtime.close_memory(ordinal, runtime.open_memory(ordinal, bytes.fromhex(sys.argv[2])))
    except BridgeError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()

"""GPUs: there, large enough, with a driver that is new enough, and open to other processes.

`python -m kvbridge.doctor.devices ORDINAL HANDLE` is that other process: it opens an allocation and prints why it cannot.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import FrozenModel
from kvbridge.doctor.findings import Finding, Needs, breaks, fine, not_here, size, warning
from kvbridge.doctor.memory import ROOT, read_text
from kvbridge.kernels.cuda import has_accelerator, runtime
from kvbridge.processes import module_command, signal_name

TRIAL_BYTES = 2 << 20
OPENING_S = 60.0
CUDA_13_DRIVER = 580
"""The first branch of the driver that runs CUDA 13."""
DRIVER_CURE = (
    "in a container: docker run --gpus all (kubernetes: nvidia.com/gpu), else install the driver; then: nvidia-smi"
)


class Gpu(FrozenModel):
    """One GPU that this process sees."""

    ordinal: int
    name: str = ""
    total_bytes: int = 0
    free_bytes: int = 0


class Devices(FrozenModel):
    """GPUs and their driver."""

    accelerator: bool = False
    """Whether a driver has made its device node."""
    driver: str = ""
    problem: str = ""
    """Why this process cannot use a GPU."""
    gpus: tuple[Gpu, ...] = ()
    ipc_problem: str | None = None
    """Why another process could not open device memory of this one; None: not tried."""


def read_devices(used: tuple[int, ...], root: Path = ROOT) -> Devices:
    """Look at every GPU; with `used`, another process also opens memory of the first of those."""
    if not has_accelerator():
        return Devices()
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", read_text(root / "proc/driver/nvidia/version"))
    driver = version.group(1) if version else ""
    problem = runtime.reason_without_device()
    if problem:
        return Devices(accelerator=True, driver=driver, problem=problem)
    facts = [runtime.device_facts(ordinal) for ordinal in range(runtime.device_count())]
    return Devices(
        accelerator=True,
        driver=driver,
        gpus=tuple(
            Gpu(ordinal=ordinal, name=each.name, total_bytes=each.total_bytes, free_bytes=each.free_bytes)
            for ordinal, each in enumerate(facts)
        ),
        ipc_problem=_try_sharing(used[0]) if used and used[0] < len(facts) else None,
    )


def _try_sharing(ordinal: int) -> str:
    """Let another process open memory of ours; return why it could not, empty when it could."""
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


def check_present(devices: Devices, needs: Needs) -> Iterator[Finding]:
    """Every GPU that ranks are placed on has to be there."""
    count = len(devices.gpus)
    missing = [ordinal for ordinal in needs.gpus if ordinal >= count]
    if needs.gpus and not count:
        yield breaks(
            f"ranks are placed on cuda:{', cuda:'.join(map(str, needs.gpus))}, but this process can use no GPU",
            devices.problem or "no driver has made /dev/nvidiactl",
            DRIVER_CURE + "; or set parallelism.device: cpu",
        )
    elif missing:
        yield breaks(
            f"ranks are placed on cuda:{', cuda:'.join(map(str, missing))}, but this process sees {count} GPUs",
            "those rank workers end at once, and the node never becomes ready",
            "unset CUDA_VISIBLE_DEVICES, or correct parallelism.ranks",
        )
    elif count:
        yield fine(f"{count} GPUs: {', '.join(sorted({gpu.name for gpu in devices.gpus}))}")
    elif devices.accelerator:
        yield warning(
            f"a GPU's driver is here, but this process cannot use it: {devices.problem}",
            "transports would neither see device memory nor copy with the GPU; the configuration places no rank on a GPU",
            f"{DRIVER_CURE}; pip install 'kvbridge[cuda]'",
        )
    else:
        yield not_here(
            "no GPU", "the configuration places no rank on one" if needs.role else "ranks can run on the CPU"
        )


def check_memory(devices: Devices, needs: Needs) -> Iterator[Finding]:
    """Device pools are allocated at the start."""
    for gpu in devices.gpus:
        need, subject = needs.device_bytes.get(gpu.ordinal, 0), f"cuda:{gpu.ordinal}"
        if need > gpu.free_bytes:
            yield breaks(
                f"{subject} has {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}, its pools need {size(need)}",
                "the rank worker cannot allocate them, and the node never becomes ready",
                "end what holds it (nvidia-smi), lower the engine's share of memory, or lower pools.device.*",
                subject=subject,
            )
        else:
            yield fine(f"{subject}: {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}", subject=subject)


def check_driver(devices: Devices, packages: Mapping[str, str]) -> Iterator[Finding]:
    """Builds for CUDA 13 need a driver of its time."""
    if not devices.driver:
        yield not_here("no NVIDIA driver", "no GPU is used")
        return
    branch = int(devices.driver.partition(".")[0] or 0)
    for_13 = sorted(packages.keys() & {"nixl-cu13", "mooncake-transfer-engine-cuda13"})
    if branch < CUDA_13_DRIVER and for_13 and "nixl-cu12" not in packages:
        yield breaks(
            f"driver {devices.driver} is older than CUDA 13, which {', '.join(for_13)} is built for",
            "loading it fails, or its device memory cannot be used",
            f"pip install nixl-cu12 in its place, or upgrade the driver to {CUDA_13_DRIVER} or later",
        )
    else:
        yield fine(f"driver {devices.driver}")


def check_sharing(devices: Devices) -> Iterator[Finding]:
    """Engines open the device pools by CUDA IPC."""
    problem = devices.ipc_problem
    if problem is None:
        yield not_here("CUDA IPC was not tried", "there is no GPU" if not devices.gpus else "no rank is placed on one")
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
    """Open what the command line names, and leave it."""
    ordinal = int(sys.argv[1])
    try:
        runtime.close_memory(ordinal, runtime.open_memory(ordinal, bytes.fromhex(sys.argv[2])))
    except BridgeError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()

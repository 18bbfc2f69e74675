"""GPUs: there, large enough, within reach of one another and of other processes."""

from __future__ import annotations

from collections.abc import Iterator

from kvbridge.doctor.facts import Host
from kvbridge.doctor.findings import Finding, breaks, fine, not_here, size, warning
from kvbridge.doctor.needs import Needs

CUDA_13_DRIVER = 580
"""The first branch of the driver that runs CUDA 13."""
DRIVER_CURE = (
    "in a container: docker run --gpus all (kubernetes: nvidia.com/gpu), else install the driver; then: nvidia-smi"
)


def present(host: Host, needs: Needs) -> Iterator[Finding]:
    """Every GPU that ranks are placed on has to be there."""
    devices, count = host.devices, len(host.devices.gpus)
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


def memory(host: Host, needs: Needs) -> Iterator[Finding]:
    """Device pools are allocated at the start."""
    if not host.devices.gpus:
        yield not_here("no device memory", "no pool is placed there")
        return
    for gpu in host.devices.gpus:
        need, subject = 0 if host.reach.running else needs.device_bytes.get(gpu.ordinal, 0), f"cuda:{gpu.ordinal}"
        if need > gpu.free_bytes:
            yield breaks(
                f"{subject} has {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}, its pools need {size(need)}",
                "the rank worker cannot allocate them, and the node never becomes ready",
                "end what holds it (nvidia-smi), lower the engine's share of memory, or lower pools.device.*",
                subject=subject,
            )
        else:
            yield fine(f"{subject}: {size(gpu.free_bytes)} free of {size(gpu.total_bytes)}", subject=subject)


def driver(host: Host, needs: Needs) -> Iterator[Finding]:
    """Builds for CUDA 13 need a driver of its time."""
    del needs
    if not host.devices.driver:
        yield not_here("no NVIDIA driver", "no GPU is used")
        return
    branch = int(host.devices.driver.partition(".")[0] or 0)
    for_13 = sorted(name for name in host.software.packages if name in {"nixl-cu13", "mooncake-transfer-engine-cuda13"})
    if branch < CUDA_13_DRIVER and for_13 and "nixl-cu12" not in host.software.packages:
        yield breaks(
            f"driver {host.devices.driver} is older than CUDA 13, which {', '.join(for_13)} is built for",
            "loading it fails, or its device memory cannot be used",
            f"pip install nixl-cu12 in its place, or upgrade the driver to {CUDA_13_DRIVER} or later",
        )
    else:
        yield fine(f"driver {host.devices.driver}")


def peer_access(host: Host, needs: Needs) -> Iterator[Finding]:
    """On one host, device memory moves between GPUs that reach each other."""
    gpus = host.devices.gpus
    if len(gpus) < 2:
        yield not_here("fewer than two GPUs", "there is nobody to reach")
        return
    seen = {gpu.ordinal for gpu in gpus}
    apart = [(gpu.ordinal, other) for gpu in gpus for other in sorted(seen - {gpu.ordinal, *gpu.reaches})]
    if apart and "local" in needs.transports:
        yield warning(
            f"no direct access: {', '.join(f'cuda:{one} to cuda:{other}' for one, other in apart)}",
            "the local transport refuses such a pair of ranks, so their bytes go over the next transport, at network speed",
            "nvidia-smi topo -p2p r; pair ranks on GPUs that reach each other, or disable ACS in the PCIe switches",
        )
    else:
        yield fine(f"{len(gpus)} GPUs, {len(apart)} pairs of which do not reach each other directly")


def sharing(host: Host, needs: Needs) -> Iterator[Finding]:
    """Engines open the device pools by CUDA IPC."""
    del needs
    problem = host.devices.ipc_problem
    if problem is None:
        yield not_here(
            "CUDA IPC was not tried", "there is no GPU" if not host.devices.gpus else "no rank is placed on one"
        )
    elif problem:
        yield breaks(
            f"another process cannot open device memory (CUDA IPC): {problem}",
            "engines attach to device pools by it, and so do peers on this host",
            "give engine and daemon one IPC namespace (docker: --ipc=host or --ipc=container:...; kubernetes: hostIPC or one pod), "
            "unset PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True for adopted memory",
        )
    else:
        yield fine("another process opened device memory of this one (CUDA IPC)")

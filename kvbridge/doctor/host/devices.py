"""GPUs as the driver shows them; and, as a program of its own, the other process that opens device memory.

`python -m kvbridge.doctor.host.devices ORDINAL HANDLE` opens an allocation by its handle and prints why it cannot.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvbridge.core.children import module_command, signal_name
from kvbridge.core.errors import BridgeError
from kvbridge.doctor.facts import Devices, Gpu
from kvbridge.doctor.host.memory import ROOT, read_number, read_text
from kvbridge.kernels.cuda import has_accelerator, runtime

TRIAL_BYTES = 2 << 20
OPENING_S = 60.0
PCI_ADDRESS_CHARACTERS = 32


def read_devices(used: tuple[int, ...], root: Path = ROOT) -> Devices:
    """Look at every GPU; with `used`, another process also opens memory of the first of those."""
    if not has_accelerator():
        return Devices()
    version = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", read_text(root / "proc/driver/nvidia/version"))
    driver = version.group(1) if version else ""
    problem = runtime.reason_without_device()
    if problem:
        return Devices(accelerator=True, driver=driver, problem=problem)
    count = runtime.device_count()
    return Devices(
        accelerator=True,
        driver=driver,
        gpus=tuple(_gpu(ordinal, count, root) for ordinal in range(count)),
        ipc_problem=_try_sharing(used[0]) if used and used[0] < count else None,
    )


def _gpu(ordinal: int, count: int, root: Path) -> Gpu:
    facts = runtime.device_facts(ordinal)
    address = runtime.call("cudaDeviceGetPCIBusId", PCI_ADDRESS_CHARACTERS, ordinal)
    place = (address.decode() if isinstance(address, bytes) else str(address)).partition("\0")[0].strip().lower()
    node = read_number(root / "sys/bus/pci/devices" / place / "numa_node")
    return Gpu(
        ordinal=ordinal,
        name=facts.name,
        total_bytes=facts.total_bytes,
        free_bytes=facts.free_bytes,
        node=node if node is not None and node >= 0 else None,
        reaches=tuple(other for other in range(count) if other != ordinal and runtime.can_reach(ordinal, other)),
    )


def _try_sharing(ordinal: int) -> str:
    """Let another process open memory of ours; why it could not, empty when it could."""
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


def main() -> None:
    """Open what the command line names, and leave it."""
    ordinal = int(sys.argv[1])
    try:
        runtime.close_memory(ordinal, runtime.open_memory(ordinal, bytes.fromhex(sys.argv[2])))
    except BridgeError as error:
        sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main()

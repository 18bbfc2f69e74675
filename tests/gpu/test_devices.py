"""Devices by their UUID: as the runtime knows them, and found without taking memory of any."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.gpu_memory import device_by_uuid, device_uuid

pytestmark = pytest.mark.gpu

CHILD = """
import sys
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.gpu_memory import device_by_uuid

def contexts():
    driver = runtime.library("cuda.bindings.driver")
    found = []
    for device in range(runtime.device_count()):
        code, flags, active = driver.cuDevicePrimaryCtxGetState(device)
        assert int(code) == 0, code
        found += [device] if active else []
    return found

device = device_by_uuid(sys.argv[1])
before = contexts()
runtime.use(device)
print(device, before, contexts())
"""


def test_the_driver_names_devices_as_the_runtime_does(device: int) -> None:
    """Of a GPU in parts (MIG) too: a process that took the GPU's name for that of a part would share memory with another part."""
    for each in range(runtime.device_count()):
        assert device_uuid(each) == bytes(runtime.call("cudaGetDeviceProperties", each).uuid.bytes).hex()
        assert device_by_uuid(device_uuid(each)) == each


def test_to_find_a_device_makes_a_context_on_none(device: int) -> None:
    """A context takes half a gigabyte of its device. What then uses the device makes one there, and on no other device."""
    last = runtime.device_count() - 1
    found = subprocess.run(
        [sys.executable, "-c", CHILD, device_uuid(last)], check=True, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split("\n")[0] == f"{last} [] [{last}]"

"""Devices as the runtime, their UUIDs and the doctor know them."""

import subprocess
import sys

import pytest

from kvbridge.doctor.findings import Level, Needs
from kvbridge.doctor.machine import read_machine
from kvbridge.doctor.run import Host, examine
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
    """Also the parts of a GPU (MIG): a process that took the GPU's name for that of a part would share memory with another part."""
    for each in range(runtime.device_count()):
        assert device_uuid(each) == bytes(runtime.call("cudaGetDeviceProperties", each).uuid.bytes).hex()
        assert device_by_uuid(device_uuid(each)) == each


def test_to_find_a_device_makes_a_context_on_none(device: int) -> None:
    """A context takes half a gigabyte of its device. The first use of the device makes one there, and on no other device."""
    last = runtime.device_count() - 1
    found = subprocess.run(
        [sys.executable, "-c", CHILD, device_uuid(last)], check=True, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.split("\n")[0] == f"{last} [] [{last}]"


def test_gpus_are_read_and_another_process_opens_their_memory(device: int) -> None:
    found = read_machine([], used=(device,))
    assert (found.gpu_problem, found.ipc_problem) == ("", "")
    assert len(found.gpus) == runtime.device_count()
    assert all(gpu.name and gpu.total_bytes >= gpu.free_bytes > 0 for gpu in found.gpus)
    assert int(found.driver.partition(".")[0]) > 400
    needs = Needs(role="decode", gpus=(device,), device_bytes={device: 1 << 20})
    findings = [each for each in examine(Host(machine=found), needs) if each.check.startswith("devices.")]
    assert not [each for each in findings if each.level is Level.BREAKS]


def test_a_handle_that_is_none_is_a_finding_not_a_crash(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "export_memory", lambda *_: bytes(64))
    problem = read_machine([], used=(device,)).ipc_problem
    assert problem
    assert "Traceback" not in problem

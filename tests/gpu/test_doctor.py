"""What the doctor reads of real GPUs."""

from __future__ import annotations

import pytest

from kvbridge.doctor.devices import read_devices
from kvbridge.doctor.findings import Level, Needs
from kvbridge.doctor.run import Host, examine
from kvbridge.kernels.cuda import runtime

pytestmark = pytest.mark.gpu


def test_gpus_are_read_and_another_process_opens_their_memory(device: int) -> None:
    found = read_devices((device,))
    assert (found.problem, found.ipc_problem) == ("", "")
    assert [gpu.ordinal for gpu in found.gpus] == list(range(runtime.device_count()))
    assert all(gpu.name and gpu.total_bytes >= gpu.free_bytes > 0 for gpu in found.gpus)
    assert int(found.driver.partition(".")[0]) > 400
    needs = Needs(role="decode", gpus=(device,), device_bytes={device: 1 << 20})
    findings = [each for each in examine(Host(devices=found), needs) if each.check.startswith("devices.")]
    assert not [each for each in findings if each.level is Level.BREAKS]


def test_a_handle_that_is_none_is_a_finding_not_a_crash(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "export_memory", lambda *_: bytes(64))
    problem = read_devices((device,)).ipc_problem
    assert problem
    assert "Traceback" not in problem

"""GPUs are read through the runtime's own calls; a machine without one is asked nothing."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from kvbridge.doctor import machine
from kvbridge.doctor.machine import read_machine
from kvbridge.kernels.cuda import runtime

FACTS = runtime.DeviceFacts("NVIDIA H200", 132, (9, 0), 141 << 30, 139 << 30)


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n")
    monkeypatch.setattr(machine, "has_accelerator", lambda: True)
    monkeypatch.setattr(runtime, "device_count", lambda: 2)
    monkeypatch.setattr(runtime, "device_facts", lambda _: FACTS)
    monkeypatch.setattr(runtime, "allocate", lambda *_: 4096)
    monkeypatch.setattr(runtime, "free", lambda *_: None)
    monkeypatch.setattr(runtime, "export_memory", lambda *_: b"\1" * 64)
    return tmp_path


def opener(monkeypatch: pytest.MonkeyPatch, returncode: int, stdout: str, stderr: str = "") -> list[list[str]]:
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_two_gpus(two_gpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = opener(monkeypatch, 0, "")
    found = read_machine([], used=(1,), root=two_gpus)
    assert (found.driver, found.ipc_problem) == ("580.65.06", "")
    assert [(gpu.ordinal, gpu.free_bytes) for gpu in found.gpus] == [(0, 139 << 30), (1, 139 << 30)]
    assert asked[0][1:] == ["-P", "-m", "kvbridge.doctor.machine", "1", "01" * 64]


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "problem"),
    [
        (0, "cuda:0 cannot open another process's device memory\n", "", "cannot open another"),
        (1, "", "Traceback ...\nImportError: no CUDA", "ImportError: no CUDA"),
        (-11, "", "", "SIGSEGV"),
    ],
)
def test_memory_that_nobody_else_can_open(
    returncode: int, stdout: str, stderr: str, problem: str, two_gpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opener(monkeypatch, returncode, stdout, stderr)
    assert problem in str(read_machine([], used=(0,), root=two_gpus).ipc_problem)


def test_without_a_driver_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_accelerator", lambda: False)
    monkeypatch.setattr(runtime, "device_count", lambda: pytest.fail("asked CUDA"))
    assert not read_machine([], used=(0,)).accelerator

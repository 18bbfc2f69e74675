"""The edge reads what the kernel shows: trees of /proc and /sys as hosts have them, sockets that really listen."""

import os
import socket
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.config.transports import TransportSettings
from kvbridge.doctor import machine
from kvbridge.doctor.findings import Needs, Port, needs_of
from kvbridge.doctor.machine import read_machine
from kvbridge.doctor.network import RdmaPort, read_interfaces, read_network, read_rdma
from kvbridge.doctor.reach import Asking
from kvbridge.kernels.cuda import runtime
from tests.helpers.local_servers import held_ports

pytestmark = pytest.mark.outside

CONFIGS = Path(__file__).parents[3] / "configs"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def test_rdma_ports(tmp_path: Path) -> None:
    port = "sys/class/infiniband/mlx5_0/ports/1"
    root = write(
        tmp_path,
        {
            f"{port}/state": "4: ACTIVE\n",
            f"{port}/rate": "400 Gb/sec (4X NDR)\n",
            f"{port}/link_layer": "Ethernet\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "sys/module/nvidia_peermem/version": "1\n",
            "dev/infiniband/uverbs0": "",
        },
    )
    first, second = read_rdma(root)
    assert first == RdmaPort(device="mlx5_0", port=1, rate_gbit=400)
    assert (second.state, second.link_layer, second.rate_gbit) == ("DOWN", "InfiniBand", 0)
    found, bare = read_network(Needs(), root), read_network(Needs(), tmp_path / "bare")
    assert (found.verbs_nodes, found.peer_memory, bare.verbs_nodes, bare.peer_memory) == (True, True, False, False)


def test_interfaces_with_speed_and_addresses(tmp_path: Path) -> None:
    v6 = "20010db8000000000000000000000007 02 40 00 80 {0}\nfe800000000000000000000000000007 02 40 20 80 {0}\n"
    names = ("nosuch0", "nosuch1")
    files = {f"sys/class/net/{name}/mtu": "1500\n" for name in (*names, "lo")}
    root = write(tmp_path, files | {"sys/class/net/nosuch0/speed": "25000\n", "sys/class/net/nosuch1/speed": "-1\n"})
    write(root, {"proc/net/if_inet6": v6.format("nosuch0")})
    assert [(each.name, each.speed_mbit, each.addresses) for each in read_interfaces(root)] == [
        ("nosuch0", 25_000, ("2001:db8::7",)),
        ("nosuch1", 0, ()),
    ]


def test_memory_and_rights(tmp_path: Path) -> None:
    status = {"proc/self/status": "Name:\tx\nCapEff:\t0000000000004000\n", "proc/meminfo": "MemAvailable: 1024 kB\n"}
    found = read_machine([Path("/dev/shm"), tmp_path / "gone"], root=write(tmp_path, status))
    assert found.may_lock_any
    assert "memory of this machine" in {each.name for each in found.limits}
    real, gone = found.shared
    assert real.total_bytes >= real.free_bytes > 0
    assert "No such file" in gone.problem
    write(tmp_path, {"proc/self/status": "CapEff:\t0000000000008000\n"})
    assert not read_machine([], root=tmp_path).may_lock_any


def test_who_listens_is_found_with_process_and_command() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        found = [each for each in read_network(Needs()).listeners if each.port == port]
    assert [(each.host, each.pid) for each in found] == [("127.0.0.1", os.getpid())]
    assert "python" in found[0].command


def test_addresses_of_other_hosts_are_told_from_ours() -> None:
    hosts = "127.0.0.1", "localhost", "0.0.0.0", "192.0.2.7"
    ports = tuple(Port(key="http.port", host=host, port=0, connections=1) for host in hosts)
    told = TransportSettings(mooncake={"host": "192.0.2.8"})
    assert read_network(Needs(role="decode", ports=ports)).foreign == ("192.0.2.7",)
    assert read_network(Needs(role="decode", settings=told)).foreign == ("192.0.2.8",)
    assert read_network(Needs(role="decode", settings=told, transports=("local",))).foreign == ()


def test_the_runtime_directory_is_private_or_the_reason_why_not(tmp_path: Path) -> None:
    for mode, path, problem, exists in (
        (0o700, tmp_path, "", True),
        (0o755, tmp_path, f"runtime directory {tmp_path} can be entered by others", True),
        (0o755, tmp_path / "later", "", False),
    ):
        tmp_path.chmod(mode)
        found = read_machine([], path).runtime
        assert found is not None
        assert found.problem.startswith(problem)
        assert (bool(found.problem), found.exists) == (bool(problem), exists)


def test_what_configurations_need() -> None:
    decode = needs_of(load_config(DecodeConfig, file=CONFIGS / "decode.yaml", environment={}))
    assert (decode.role, decode.name) == ("decode", "decode-0/node-0")
    assert decode.shared_bytes > 1 << 20
    assert [port.key for port in decode.ports] == ["http.port"]
    assert decode.idle_connections == 4 * 1024
    assert not decode.public
    prefill = needs_of(load_config(PrefillConfig, file=CONFIGS / "prefill.yaml", environment={}))
    assert [port.key for port in prefill.ports] == ["http.port", "control.bind"]
    bootstrap = needs_of(load_config(BootstrapConfig, file=CONFIGS / "bootstrap.yaml", environment={}))
    assert (bootstrap.role, bootstrap.transports, bootstrap.shared_bytes) == ("bootstrap", (), 0)
    on_gpu = needs_of(load_config(DecodeConfig, file=CONFIGS / "two-gpus/decode.yaml", environment={}))
    assert on_gpu.gpus
    assert set(on_gpu.device_bytes) == set(on_gpu.gpus)


def asking(pages: dict[str, tuple[int, str]]) -> Asking:
    """Questions to a daemon that has these pages."""

    def answer(request: httpx.Request) -> httpx.Response:
        status, text = pages.get(request.url.path, (404, "{}"))
        return httpx.Response(status, text=text)

    return Asking(http=httpx.Client(transport=httpx.MockTransport(answer)))


def test_a_daemon_that_is_not_ready_something_else_that_answers_and_nobody_are_told() -> None:
    pages = {"/ready": (503, '{"ready": false, "reasons": ["no rank worker"]}')}
    found = asking(pages).ready("decode-0/node-0", "http://d/")
    assert (found.problem, found.ready, found.reasons) == ("", False, ("no rank worker",))
    other = asking({"/ready": (200, "welcome to nginx"), "/v1/instances": (401, "{}")})
    assert "something else answers" in other.ready("x", "http://d").problem
    assert "refuses our token" in other.instances("http://d")[1]
    with held_ports(1) as [port], closing((nobody := Asking()).http):
        assert "refused" in nobody.ready("x", f"http://127.0.0.1:{port}").problem.lower()
        assert "nobody listens there" in nobody.shake("x", f"tcp://127.0.0.1:{port}", encrypted=False).problem


def test_the_daemon_itself_is_known_by_role_and_name() -> None:
    page = '{"role": "decode", "instance": "decode-0", "node": "node-0", "at": 112.3, "started_at": 100}'
    itself, ours = asking({"/status": (200, page)}), Needs(role="decode", instance="decode-0", node="node-0")
    assert itself.running("http://d", ours)[0] == "decode-0/node-0, up for 12 s"
    assert itself.running("http://d", ours.model_copy(update={"instance": "decode-1"})) == ("", None)


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
    assert found.gpus == (FACTS, FACTS)
    assert asked[0][1:] == ["-P", "-m", "kvbridge.doctor.machine", "1", "01" * 64]


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "problem"),
    [
        (0, "cuda:0 cannot open another process's device memory\n", "", "cannot open another"),
        (1, "", "Traceback ...\nImportError: no CUDA", "ImportError: no CUDA"),
        (-11, "", "", "SIGSEGV"),
    ],
)
def test_memory_that_nobody_else_can_open(returncode, stdout, stderr, problem, two_gpus, monkeypatch):
    opener(monkeypatch, returncode, stdout, stderr)
    assert problem in str(read_machine([], used=(0,), root=two_gpus).ipc_problem)


def test_without_a_driver_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_accelerator", lambda: False)
    monkeypatch.setattr(runtime, "device_count", lambda: pytest.fail("asked CUDA"))
    assert not read_machine([], used=(0,)).accelerator

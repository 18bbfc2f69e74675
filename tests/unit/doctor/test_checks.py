"""Every check against recorded hosts: one that it calls broken, and one that it calls fine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvbridge.config.transports import MooncakeSettings, NixlSettings
from kvbridge.doctor.facts import (
    Answer,
    Available,
    Directory,
    Gid,
    Handshake,
    Host,
    HugePages,
    Interface,
    KeyFact,
    LeftFile,
    Limit,
    Listener,
    Moved,
    NumaNode,
    Route,
    SharedDirectory,
)
from kvbridge.doctor.findings import Finding, Level
from kvbridge.doctor.needs import Needs
from kvbridge.doctor.table import CHECKS, examine
from tests.unit.doctor.hosts import GIB, HEALTHY, INFINIBAND, NEEDS, ROCE, changed

GPU = HEALTHY.devices.gpus[0]
TCP = NEEDS.settings.model_copy(update={"mooncake": MooncakeSettings(host="10.1.0.2")})
NIXL_OVER = {
    tls: NEEDS.settings.model_copy(update={"nixl": NixlSettings(ucx_tls=tls)}) for tls in ("", "tcp", "posix,sysv")
}


@dataclass(frozen=True)
class Broken:
    """How a host, or what is asked of it, differs from the healthy one, and what the check then says."""

    check: str
    level: Level
    says: str
    """In what is wrong."""
    cure: str
    """In what to do about it."""
    host: dict[str, Any] = field(default_factory=dict)
    needs: dict[str, Any] = field(default_factory=dict)


B, W = Level.BREAKS, Level.WARNING
CASES = [
    Broken("memory.locked", B, "only 8.0 MiB", "ulimit -l unlimited", {"memory__locked": Limit(soft=8 << 20)}),
    Broken(
        "memory.shared",
        B,
        "/dev/shm has 64.0 MiB free of 64.0 MiB",
        "mount -o remount,size=262144m /dev/shm",
        {"memory__shared": (SharedDirectory(path="/dev/shm", total_bytes=64 << 20, free_bytes=64 << 20),)},
    ),
    Broken(
        "memory.shared",
        B,
        "type 0xef53",
        "pools.host.directory: /dev/shm",
        {"memory__shared": (SharedDirectory(path="/data", problem="/data is on a file system of type 0xef53"),)},
    ),
    Broken(
        "memory.limits",
        B,
        "control group /x: 1.0 GiB left",
        "raise the memory limit",
        {
            "memory__limits": (
                Available(name="memory limit of control group /x", available_bytes=GIB, cure="raise the memory limit"),
            )
        },
    ),
    Broken(
        "memory.huge_pages",
        W,
        "reserved as huge pages and unused",
        "vm.nr_hugepages=0",
        {"memory__huge_pages": HugePages(page_bytes=2 << 20, total=100_000, free=100_000)},
    ),
    Broken(
        "memory.huge_pages",
        W,
        "shmem_enabled is never",
        "echo advise",
        {"memory__huge_pages": HugePages(shared_memory="never")},
    ),
    Broken(
        "memory.numa", W, "only use memory of nodes [1]", "numactl --cpunodebind=0", {"memory__allowed_nodes": (1,)}
    ),
    Broken(
        "memory.numa",
        W,
        "fit on no single node",
        "numactl --interleave=all",
        {"memory__nodes": tuple(NumaNode(number=n, total_bytes=200 * GIB, free_bytes=150 * GIB) for n in (0, 1))},
    ),
    Broken(
        "memory.leftovers",
        W,
        "1 files of dead daemons take 4.0 GiB",
        "kvbridge clean",
        {"memory__left": (LeftFile(path="/dev/shm/kvbridge-a", size_bytes=4 * GIB, user_id=0, ours=True),)},
    ),
    Broken(
        "memory.leftovers",
        W,
        "cannot be swept by this user",
        "sudo -u '#1000' kvbridge clean",
        {
            "memory__left": (
                LeftFile(path="/dev/shm/kvbridge-a", size_bytes=GIB, user_id=1000, ours=False, why="another user's"),
            )
        },
    ),
    Broken(
        "devices.present", B, "cuda:1, but this process sees 1 GPUs", "CUDA_VISIBLE_DEVICES", {"devices__gpus": (GPU,)}
    ),
    Broken(
        "devices.present", B, "can use no GPU", "nvidia-smi", {"devices__gpus": (), "devices__problem": "no library"}
    ),
    Broken(
        "devices.present",
        W,
        "cannot use it: no library",
        "kvbridge[cuda]",
        {"devices__gpus": (), "devices__problem": "no library"},
        {"gpus": ()},
    ),
    Broken(
        "devices.memory",
        B,
        "cuda:0 has 10.0 GiB free",
        "nvidia-smi",
        {"devices__gpus": (changed(GPU, free_bytes=10 * GIB), HEALTHY.devices.gpus[1])},
    ),
    Broken("devices.driver", B, "535.54 is older than CUDA 13", "nixl-cu12", {"devices__driver": "535.54"}),
    Broken(
        "devices.peer_access",
        W,
        "cuda:0 to cuda:1",
        "nvidia-smi topo",
        {"devices__gpus": tuple(changed(gpu, reaches=()) for gpu in HEALTHY.devices.gpus)},
    ),
    Broken(
        "devices.ipc", B, "invalid device context", "--ipc=host", {"devices__ipc_problem": "invalid device context"}
    ),
    Broken("rdma.present", B, "there is no RDMA device", "protocol: tcp", {"network__rdma": ()}),
    Broken(
        "rdma.present", B, "/dev/infiniband is not here", "--device=/dev/infiniband", {"network__verbs_nodes": False}
    ),
    Broken(
        "rdma.state",
        B,
        "mlx5_0/1 is DOWN",
        "ip link set up",
        {"network__rdma": (changed(ROCE, state="DOWN"), INFINIBAND)},
        {
            "settings": NEEDS.settings.model_copy(
                update={"mooncake": NEEDS.settings.mooncake.model_copy(update={"device_name": "mlx5_0"})}
            )
        },
    ),
    Broken(
        "rdma.state",
        W,
        "mlx5_1/1 is INIT",
        "subnet manager",
        {"network__rdma": (ROCE, changed(INFINIBAND, state="INIT"))},
    ),
    Broken(
        "rdma.gids",
        B,
        "at best GID 0, fe80::ee0d:9aff:fe2d:1: link-local",
        "ip addr add",
        {"network__rdma": (changed(ROCE, gids=ROCE.gids[:2]),)},
    ),
    Broken(
        "rdma.gids",
        B,
        "RoCE v1, which crosses no router",
        "cma_roce_mode -d mlx5_0 -m 2",
        {"network__rdma": (changed(ROCE, gids=ROCE.gids[:3]),)},
    ),
    Broken("rdma.gids", B, "no address at all", "ip addr add", {"network__rdma": (changed(ROCE, gids=()),)}),
    Broken(
        "rdma.gids",
        W,
        "at best GID 0, fe80::",
        "ip addr add",
        {"network__rdma": (changed(ROCE, gids=ROCE.gids[:1]),)},
        {"settings": TCP},
    ),
    Broken(
        "rdma.gids",
        B,
        "MC_GID_INDEX=0 is fe80::",
        "export MC_GID_INDEX=3",
        {"software__environment": {"MC_GID_INDEX": "0"}},
    ),
    Broken(
        "rdma.gids",
        B,
        "MC_GID_INDEX=7 is unset",
        "export MC_GID_INDEX=3",
        {"software__environment": {"MC_GID_INDEX": "7"}},
    ),
    Broken(
        "rdma.partitions",
        B,
        "limited member",
        "=full",
        {"network__rdma": (changed(INFINIBAND, partition_keys=(0x7FFF,)),)},
    ),
    Broken(
        "rdma.mtu",
        W,
        "eth2 has 400 Gbit/s and frames of 1500",
        "ip link set eth2 mtu 9000",
        {"network__interfaces": (Interface(name="eth2", speed_mbit=400_000, addresses=("10.1.0.2",)),)},
    ),
    Broken("rdma.numa", W, "NUMA nodes [1]", "nvidia-smi topo -m", {"network__rdma": (changed(ROCE, node=1),)}),
    Broken(
        "network.ports",
        B,
        "7902 is taken by process 42 (nginx -g)",
        "kill 42",
        {"network__listeners": (Listener(host="0.0.0.0", port=7902, pid=42, command="nginx -g"),)},
    ),
    Broken(
        "network.ports",
        B,
        "by a process of another user",
        "sudo ss",
        {"network__listeners": (Listener(host="10.1.0.2", port=7902),)},
    ),
    Broken(
        "network.addresses",
        B,
        "http.host: no interface of this host has the address 10.9.9.9",
        "ip -br addr",
        {"network__foreign": ("10.9.9.9",)},
        {"ports": (NEEDS.ports[0].model_copy(update={"host": "10.9.9.9"}),)},
    ),
    Broken(
        "network.addresses",
        B,
        "transports.mooncake.host is 10.9.9.9, which no interface",
        "10.1.0.2",
        {"network__foreign": ("10.9.9.9",)},
        {"settings": NEEDS.settings.model_copy(update={"mooncake": MooncakeSettings(host="10.9.9.9")})},
    ),
    Broken(
        "network.addresses",
        B,
        "transports.mooncake.host is 127.0.0.1, while",
        "10.1.0.2",
        needs={"settings": NEEDS.settings.model_copy(update={"mooncake": MooncakeSettings()})},
    ),
    Broken(
        "network.routes",
        B,
        "does not answer from 10.1.0.2 (eth2): timed out",
        "ip route get 10.2.0.9 from 10.1.0.2",
        {"network__routes": (Route(source="10.1.0.2", interface="eth2", peer="10.2.0.9:7902", problem="timed out"),)},
    ),
    Broken(
        "process.open_files", B, "only 256 files", "LimitNOFILE", {"process__open_files": Limit(soft=256, hard=256)}
    ),
    Broken(
        "process.open_files",
        W,
        "4096 files may be open",
        "http.max_connections",
        {"process__open_files": Limit(soft=1024, hard=4096)},
    ),
    Broken("process.ptrace", W, "ptrace_scope is 1", "local before nixl", {"process__ptrace_scope": 1}),
    Broken(
        "process.runtime_directory",
        B,
        "can be entered by others",
        "chmod 700 /tmp/x",
        {"process__runtime": Directory(path="/tmp/x", problem="runtime directory /tmp/x can be entered by others")},
    ),
    Broken(
        "process.keys",
        B,
        "others can read it",
        "chmod 600 /k",
        {
            "process__keys": (
                KeyFact(good=False, text="http.token_file: /k has mode 0644, others can read it; run: chmod 600 /k"),
            )
        },
    ),
    Broken(
        "process.keys",
        B,
        "a token of 5 characters",
        "kvbridge keys token NEW_FILE",
        {
            "process__keys": (
                KeyFact(good=False, text="http: a token of 5 characters; `kvbridge keys token` draws one"),
            )
        },
    ),
    Broken(
        "process.keys",
        B,
        "cannot be read",
        "kvbridge keys check --role decode",
        {"process__keys": (KeyFact(good=False, text="control.curve: secret key file /k cannot be read"),)},
    ),
    Broken("software.python", B, "Python 3.10.1", "python3.12 -m venv", {"software__python": (3, 10, 1)}),
    Broken("software.python", W, "built for the CPU", "torch", {"software__packages": {"torch": "2.13.0+cpu"}}),
    Broken(
        "software.mooncake",
        B,
        "several builds",
        "pip uninstall",
        {"software__packages": {"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.3.13"}},
    ),
    Broken(
        "software.mooncake",
        B,
        "older than 0.3.13",
        "--upgrade",
        {"software__packages": {"mooncake-transfer-engine": "0.3.9"}},
    ),
    Broken("software.mooncake", B, "libibverbs", "apt-get install", {"software__libraries": ()}),
    Broken("software.mooncake", B, "not installed", "kvbridge[cpu]", {"software__packages": {}}),
    Broken("software.nixl", B, "older than 1.5", "--upgrade", {"software__packages": {"nixl-cu12": "0.10.1"}}),
    Broken("software.nixl", B, "not installed", "kvbridge[cpu]", {"software__packages": {}}),
    Broken("software.environment", B, "MC_TCP_PROTO=1", "unset", {"software__environment": {"MC_TCP_PROTO": "1"}}),
    Broken(
        "software.environment", B, "MC_FORCE_TCP=true", "unset", {"software__environment": {"MC_FORCE_TCP": "true"}}
    ),
    Broken(
        "software.environment",
        W,
        "UCX_MODULES=all",
        "^ib",
        {"software__environment": {"UCX_MODULES": "all"}, "network__rdma": ()},
    ),
    Broken(
        "software.environment",
        B,
        "nothing but posix,sysv",
        "ucx_tls to tcp",
        needs={"settings": NIXL_OVER["posix,sysv"]},
    ),
    Broken(
        "software.environment", B, "nothing but sysv", "unset UCX_TLS", {"software__environment": {"UCX_TLS": "sysv"}}
    ),
    Broken(
        "reach.bootstrap",
        B,
        "Name or service not known",
        "curl -v http://boot:7900/health",
        {"reach__bootstraps": (Answer(name="bootstrap", url="http://boot:7900", problem="Name or service not known"),)},
    ),
    Broken(
        "reach.clock",
        W,
        "90 s behind ours",
        "chronyc",
        {"reach__bootstraps": (Answer(name="bootstrap", url="http://10.0.0.1:7900", clock_ahead_s=-90.2),)},
    ),
    Broken(
        "reach.peers",
        B,
        "Connection refused",
        "curl -v http://10.1.0.3:7902/ready",
        {"reach__peers": (Answer(name="decode-0/node-0", url="http://10.1.0.3:7902", problem="Connection refused"),)},
    ),
    Broken(
        "reach.peers",
        W,
        "not ready: no rank worker",
        "/status",
        {"reach__peers": (Answer(name="decode-0/node-0", url="http://x", ready=False, reasons=("no rank worker",)),)},
    ),
    Broken("reach.peers", W, "bootstrap knows no prefill node", "http://10.0.0.1:7900", {"reach__peers": ()}),
    Broken(
        "reach.control",
        B,
        "does not allow our key",
        "allowed_keys_file",
        {"reach__handshakes": (Handshake(name="p", endpoint="tcp://x:1", problem="does not allow our key"),)},
    ),
    Broken(
        "reach.transfers",
        B,
        "signal 11",
        "bench-peer",
        {"reach__moved": (Moved(name="this host", transport="nixl", problem="its process was ended by signal 11"),)},
    ),
    Broken(
        "reach.transfers",
        W,
        "4% of eth2 at 400 Gbit/s",
        "UCX_PROTO_INFO",
        {"reach__moved": (changed(HEALTHY.reach.moved[0], bytes_per_s=2e9),)},
    ),
]


def found_by(check: str, host: Host, needs: Needs) -> list[Finding]:
    return [finding for finding in examine(host, needs) if finding.check == check]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.check}: {case.says}")
def test_a_broken_host_is_called_broken(case: Broken) -> None:
    found = found_by(case.check, changed(HEALTHY, **case.host), changed(NEEDS, **case.needs))
    (bad,) = [finding for finding in found if finding.level in {B, W}]
    assert bad.level is case.level
    assert case.says in bad.what
    assert case.cure in bad.cure
    assert bad.why


def test_every_check_has_a_broken_host() -> None:
    assert {case.check for case in CASES} == {check.name for check in CHECKS}
    assert len({check.name for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize("check", [check.name for check in CHECKS])
def test_the_healthy_host_is_called_fine(check: str) -> None:
    found = found_by(check, HEALTHY, NEEDS)
    assert found
    assert {finding.level for finding in found} == {Level.FINE}


def test_a_small_host_without_a_configuration_breaks_nothing() -> None:
    """No GPU, no RDMA, little memory to lock: each is said, with why nothing needs it."""
    host = Host(memory=HEALTHY.memory.model_copy(update={"locked": Limit(soft=8 << 20), "nodes": ()}))
    found = examine(host, Needs())
    assert not [finding for finding in found if finding.level in {B, W}]
    absent = [finding for finding in found if finding.level is Level.NOT_HERE]
    assert {"memory.locked", "devices.present", "rdma.present", "network.ports"} <= {each.check for each in absent}
    assert all(each.why for each in absent)


def test_the_worst_comes_first() -> None:
    host = changed(HEALTHY, memory__allowed_nodes=(1,), process__open_files=Limit(hard=10), network__rdma=())
    levels = [finding.level for finding in examine(host, NEEDS)]
    assert levels == sorted(levels, key=list(Level).index)
    assert {B, W, Level.FINE} <= set(levels)


def test_a_daemon_that_runs_needs_neither_its_port_nor_its_memory_again() -> None:
    host = changed(
        HEALTHY,
        memory__shared=(SharedDirectory(path="/dev/shm", total_bytes=512 * GIB, free_bytes=GIB),),
        network__listeners=(Listener(host="10.1.0.2", port=7902, pid=42, command="kvbridge decode"),),
    )
    assert {each.check for each in examine(host, NEEDS) if each.level is B} == {"memory.shared", "network.ports"}
    running = changed(host, reach__running="decode-0/node-0, up for 5 s")
    assert not [each for each in examine(running, NEEDS) if each.level is B]


def test_gids_are_ranked_for_who_can_reach_them() -> None:
    """An unset one, the bare prefix of a link, and a forced good one."""
    bad = (Gid(index=0, address="::"), Gid(index=1, address="fe80::", kind="RoCE v2"))
    (finding,) = found_by("rdma.gids", changed(HEALTHY, network__rdma=(changed(ROCE, gids=bad),)), NEEDS)
    assert "unset" in finding.what
    good = changed(HEALTHY, software__environment={"MC_GID_INDEX": "3"})
    assert {each.level for each in found_by("rdma.gids", good, NEEDS)} == {Level.FINE}


def test_locking_matters_only_where_something_locks() -> None:
    host = changed(HEALTHY, memory__locked=Limit(soft=8 << 20))
    over_tcp = changed(NEEDS, settings=TCP, transports=("local", "mooncake"))
    assert found_by("memory.locked", host, over_tcp)[0].level is Level.NOT_HERE
    assert found_by("memory.locked", changed(host, memory__may_lock_any=True), NEEDS)[0].level is Level.FINE


def test_a_library_that_no_transport_needs_may_be_broken_or_absent() -> None:
    host = changed(HEALTHY, software__packages={"mooncake-transfer-engine": "0.1"}, software__libraries=())
    local = changed(NEEDS, transports=("local",))
    for check in ("software.mooncake", "software.nixl"):
        assert [each.level for each in found_by(check, host, local)] == [Level.NOT_HERE]
        assert found_by(check, host, NEEDS)[0].level is B
    bare = changed(HEALTHY, software__packages={})
    assert found_by("software.nixl", bare, Needs())[0].level is Level.NOT_HERE

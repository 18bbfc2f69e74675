"""Every check against recorded hosts: one that it calls broken, and one that it calls fine."""

from dataclasses import replace
from typing import Any

import pytest

from kvbridge.api.rooms import RoomReport
from kvbridge.api.status import PrefixStoreStatus
from kvbridge.config.transports import MooncakeSettings, NixlSettings
from kvbridge.control.sockets import TcpListener
from kvbridge.core.ids import Role
from kvbridge.core.session.tables import RoomState
from kvbridge.doctor.findings import Finding, Level, Needs
from kvbridge.doctor.machine import Directory
from kvbridge.doctor.reach import Answer, RunningNode
from kvbridge.doctor.run import CHECKS, Host, examine
from kvbridge.pool.memory.shared_mapping import MemoryLimit
from tests.unit.doctor.hosts import ENGINE, GIB, HEALTHY, INFINIBAND, NEEDS, RANK, ROCE, RUNNING, changed
from tests.unit.http.services import NODE_PAGE

GPU, OTHER_GPU = HEALTHY.machine.gpus
B, W = Level.BREAKS, Level.WARNING
SMALL = Directory(path="/dev/shm", total_bytes=64 << 20, free_bytes=64 << 20)
DISK = Directory(path="/data", problem="/data is on a file system of type 0xef53")
GROUP = MemoryLimit(name="memory limit of control group /x", available_bytes=GIB, cure="raise the memory limit")
NGINX = TcpListener("0.0.0.0", 7902, 42, "nginx -g")
BOOT = Answer(name="bootstrap", url="http://boot:7900", problem="Name or service not known")
PEER = Answer(name="decode-0/node-0", url="http://10.1.0.3:7902", problem="Connection refused")
SLOW_PEER = Answer(name="decode-0/node-0", url="http://x", ready=False, reasons=("no rank worker",))
TWO_BUILDS = {"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.3.13"}


OLD_ROOM = RUNNING.model_copy(
    update={
        "oldest": RoomReport(
            room=9,
            generation=1,
            role=Role.DECODE,
            state=RoomState.COMMITTED,
            prompt_tokens=5,
            age_s=75.0,
            waits_for="its engine",
        )
    }
)
AWAY = PrefixStoreStatus(
    kind="files",
    state="open",
    why_not="",
    pid=5,
    objects={},
    fetched_pages=0,
    prefetches={},
    waiting_prompts=0,
    unsettled=0,
)


def node(**values: Any) -> RunningNode:
    return RunningNode(status=RUNNING.status.model_copy(update=values))


def settings(**values: Any) -> dict[str, Any]:
    return {"settings": NEEDS.settings.model_copy(update=values)}


def mooncake(host: str = "10.1.0.2") -> dict[str, Any]:
    return settings(mooncake=MooncakeSettings(host=host))


def case(check: str, level: Level, says: str, cure: str, needs: dict[str, Any] | None = None, **host: Any):
    """How a host, or what is asked of it, differs from the healthy one; what the check then says, and what to do about it."""
    return pytest.param(check, level, says, cure, needs or {}, host, id=f"{check}: {says}")


CASES = [
    case("memory.locked", B, "only 8.0 MiB", "ulimit -l unlimited", machine__locked_bytes=8 << 20),
    case("memory.shared", B, "64.0 MiB free of 64.0 MiB", "remount,size=262144m /dev/shm", machine__shared=(SMALL,)),
    case("memory.shared", B, "type 0xef53", "pools.host.directory: /dev/shm", machine__shared=(DISK,)),
    case("memory.limits", B, "control group /x: 1.0 GiB left", "raise the memory limit", machine__limits=(GROUP,)),
    case("devices.present", B, "cuda:1, but this process sees 1 GPUs", "CUDA_VIS", machine__gpus=(GPU,)),
    case("devices.present", B, "can use no GPU", "nvidia-smi", machine__gpus=(), machine__gpu_problem="no library"),
    case(
        *("devices.present", W, "cannot use it: no library", "'.[cuda]'", {"gpus": ()}),
        machine__gpus=(),
        machine__gpu_problem="no library",
    ),
    case(
        *("devices.memory", B, "cuda:0 has 10.0 GiB free", "nvidia-smi"),
        machine__gpus=(replace(GPU, free_bytes=10 * GIB), OTHER_GPU),
    ),
    case("devices.driver", B, "535.54 is older than CUDA 13", "nixl-cu12", machine__driver="535.54"),
    case("devices.ipc", B, "invalid device context", "--ipc=host", machine__ipc_problem="invalid device context"),
    case("rdma.present", B, "there is no RDMA device", "protocol: tcp", network__rdma=()),
    case("rdma.present", B, "/dev/infiniband is not here", "--device=/dev/inf", network__verbs_nodes=False),
    case("rdma.present", W, "/dev/infiniband is not here", "--device", mooncake(), network__verbs_nodes=False),
    case("rdma.present", W, "nvidia_peermem is not loaded", "modprobe", network__peer_memory=False),
    case(
        *("rdma.state", B, "mlx5_0/1 is DOWN", "(now mlx5_0)"),
        settings(mooncake=NEEDS.settings.mooncake.model_copy(update={"device_name": "mlx5_0"})),
        network__rdma=(changed(ROCE, state="DOWN"), INFINIBAND),
    ),
    case("rdma.state", W, "mlx5_1/1 is INIT", "(now all)", network__rdma=(ROCE, changed(INFINIBAND, state="INIT"))),
    case("network.ports", B, "7902 is taken by process 42 (nginx -g)", "kill 42", network__listeners=(NGINX,)),
    case("network.ports", B, "by a process of another user", "sudo ss", network__listeners=(NGINX._replace(pid=0),)),
    case(
        *("network.addresses", B, "http.host: no interface of this host has the address 10.9.9.9", "ip -br addr"),
        {"ports": (NEEDS.ports[0].model_copy(update={"host": "10.9.9.9"}),)},
        network__foreign=("10.9.9.9",),
    ),
    case(
        *("network.addresses", B, "transports.mooncake.host is 10.9.9.9, which no interface", "10.1.0.2"),
        mooncake("10.9.9.9"),
        network__foreign=("10.9.9.9",),
    ),
    case("network.addresses", B, "transports.mooncake.host is 127.0.0.1, while", "10.1.0.2", mooncake("127.0.0.1")),
    case("process.open_files", B, "only 256 files", "LimitNOFILE", machine__open_files=256),
    case("process.open_files", W, "4096 files may be open", "http.max", machine__open_files=4096),
    case(
        *("process.runtime_directory", B, "can be entered by others", "chmod 700 /tmp/x"),
        machine__runtime=Directory(path="/tmp/x", problem="runtime directory /tmp/x can be entered by others"),
    ),
    case("software.mooncake", B, "several builds", "pip uninstall", software__packages=TWO_BUILDS),
    case(
        *("software.mooncake", B, "older than 0.3.13", "--upgrade"),
        software__packages={"mooncake-transfer-engine": "0.3.9"},
    ),
    case("software.mooncake", B, "libibverbs", "apt-get install", software__libraries=()),
    case("software.mooncake", B, "not installed", "'.[cpu]'", software__packages={}),
    case("software.nixl", B, "older than 1.5", "--upgrade", software__packages={"nixl-cu12": "0.10.1"}),
    case("software.nixl", B, "not installed", "'.[cpu]'", software__packages={}),
    case("software.environment", B, "MC_TCP_PROTO=1", "unset", software__environment={"MC_TCP_PROTO": "1"}),
    case("software.environment", B, "MC_FORCE_TCP=true", "unset", software__environment={"MC_FORCE_TCP": "true"}),
    case(
        *("software.environment", W, "UCX_MODULES=all", "^ib"),
        software__environment={"UCX_MODULES": "all"},
        network__rdma=(),
    ),
    case(
        "software.environment",
        B,
        "nothing but posix,sysv",
        "ucx_tls to tcp",
        settings(nixl=NixlSettings(ucx_tls="posix,sysv")),
    ),
    case("software.environment", B, "nothing but sysv", "unset UCX_TLS", software__environment={"UCX_TLS": "sysv"}),
    case("running.node", W, "no engine is attached", "runtime_dir", reach__node=node(engines=())),
    case(
        *("running.node", W, "pages wait for the end of engine-7 (pid 7): it hangs", "engine's log"),
        reach__node=node(engines=(ENGINE.model_copy(update={"gone": "it hangs"}),)),
    ),
    case(
        *("running.node", W, "pp0.tp0 (pid 8) is starting", "worker_gone"),
        reach__node=node(ranks=(RANK.model_copy(update={"state": "starting"}),)),
    ),
    case("running.node", W, "0 of 8 pages of the space full", "rooms", reach__node=node(available_pages={})),
    case(
        "running.node",
        W,
        "room 7#1 are in quarantine: late",
        "process",
        reach__node=node(quarantine={"late": ("room 7#1",)}),
    ),
    case(
        *("running.node", W, "for 6 s not even the smallest", "kvbridge rooms"),
        reach__node=node(admission=NODE_PAGE.admission.model_copy(update={"starved_since": 2.0})),
    ),
    case(
        "running.node", W, "room 9 has been under way for 75 s and waits for its engine", "room 9", reach__node=OLD_ROOM
    ),
    case(
        "running.node", W, "files store below host memory is not asked (open)", "runbook", reach__node=node(store=AWAY)
    ),
    case("reach.bootstrap", B, "Name or service", "curl -v http://boot:7900/health", reach__bootstraps=(BOOT,)),
    case("reach.peers", B, "Connection refused", "curl -v http://10.1.0.3:7902/ready", reach__peers=(PEER,)),
    case("reach.peers", W, "not ready: no rank worker", "/status", reach__peers=(SLOW_PEER,)),
    case("reach.peers", W, "bootstrap knows no prefill node", "http://10.0.0.1:7900", reach__peers=()),
    case(
        *("reach.control", B, "does not allow our key", "allowed_keys_file"),
        reach__handshakes=(Answer(name="p", url="tcp://x:1", problem="does not allow our key"),),
    ),
]


def found_by(check: str, host: Host, needs: Needs) -> list[Finding]:
    return [finding for finding in examine(host, needs) if finding.check == check]


@pytest.mark.parametrize(("check", "level", "says", "cure", "needs", "host"), CASES)
def test_a_broken_host_is_called_broken(check, level, says, cure, needs, host):
    found = found_by(check, changed(HEALTHY, **host), changed(NEEDS, **needs))
    (bad,) = [finding for finding in found if finding.level in {B, W}]
    assert bad.level is level
    assert says in bad.what
    assert cure in bad.cure
    assert bad.why


def test_every_check_has_a_broken_host_and_calls_the_healthy_one_fine() -> None:
    assert {each.values[0] for each in CASES} == set(CHECKS)
    found = examine(HEALTHY, NEEDS)
    assert {finding.check for finding in found} == set(CHECKS)
    assert {finding.level for finding in found} == {Level.FINE}


def test_a_small_host_without_a_configuration_breaks_nothing() -> None:
    """No GPU, no RDMA, little memory to lock: each is said, with why nothing needs it."""
    found = examine(changed(Host(), machine__locked_bytes=8 << 20), Needs())
    assert not [finding for finding in found if finding.level in {B, W}]
    absent = [finding for finding in found if finding.level is Level.NOT_HERE]
    assert {"memory.locked", "devices.present", "rdma.present", "network.ports"} <= {each.check for each in absent}
    assert all(each.why for each in absent)


def test_a_daemon_that_runs_needs_neither_its_port_nor_its_memory_again() -> None:
    gpus = (replace(GPU, free_bytes=0), OTHER_GPU)
    host = changed(HEALTHY, machine__shared=(SMALL,), network__listeners=(NGINX,), machine__gpus=gpus)
    broken = {each.check for each in examine(host, NEEDS) if each.level is B}
    assert broken == {"memory.shared", "network.ports", "devices.memory"}
    running = changed(host, reach__running="decode-0/node-0, up for 5 s")
    assert not [each for each in examine(running, NEEDS) if each.level is B]


def test_locking_matters_only_where_something_locks() -> None:
    little = changed(HEALTHY, machine__locked_bytes=8 << 20)
    for needs, rdma, level in (
        (mooncake(), (ROCE,), B),  # NIXL takes a card where there is one
        (mooncake(), (), Level.NOT_HERE),
        (mooncake() | {"transports": ("local", "mooncake")}, (ROCE,), Level.NOT_HERE),
    ):
        (found,) = found_by("memory.locked", changed(little, network__rdma=rdma), changed(NEEDS, **needs))
        assert found.level is level
    free = changed(little, machine__may_lock_any=True)
    assert [each.level for each in found_by("memory.locked", free, NEEDS)] == [Level.FINE]


@pytest.mark.parametrize("ours", ["0.0.0.0", "localhost", "127.0.0.1", "[::]", "::1"])
def test_a_port_is_taken_by_whoever_covers_its_address(ours: str) -> None:
    needs = changed(NEEDS, ports=(changed(NEEDS.ports[0], host=ours),))
    for holder, taken in (("127.0.0.1", ours != "::1"), ("10.7.7.7", ours in {"0.0.0.0", "[::]"})):
        host = changed(HEALTHY, network__listeners=(NGINX._replace(host=holder),))
        (found,) = found_by("network.ports", host, needs)
        assert (found.level is B) is taken
    (elsewhere,) = found_by("network.ports", changed(HEALTHY, network__listeners=(NGINX._replace(port=1),)), needs)
    assert elsewhere.level is Level.FINE

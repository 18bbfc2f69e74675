"""Recorded hosts: a healthy decode node with two GPUs and RDMA, and how one differs from it."""

from typing import Any, TypeVar

from pydantic import BaseModel

from kvbridge.api.status import EngineStatus, RankStatus
from kvbridge.config.transports import MooncakeProtocol, MooncakeSettings, TransportSettings
from kvbridge.control.sockets import TcpListener
from kvbridge.doctor.findings import Needs, Port
from kvbridge.doctor.machine import Directory, Machine
from kvbridge.doctor.network import Interface, Network, RdmaPort
from kvbridge.doctor.reach import Answer, Reach, RunningNode
from kvbridge.doctor.run import Host
from kvbridge.doctor.software import Software
from kvbridge.kernels.cuda.runtime import DeviceFacts
from kvbridge.pool.memory.shared_mapping import MemoryLimit
from tests.unit.http.services import NODE_PAGE

GIB = 1 << 30
ModelT = TypeVar("ModelT", bound=BaseModel)

ROCE = RdmaPort(device="mlx5_0", port=1, rate_gbit=400)
INFINIBAND = RdmaPort(device="mlx5_1", port=1, link_layer="InfiniBand", rate_gbit=400)

ENGINE = EngineStatus(name="engine-7", pid=7, ranks=("pp0.tp0",), gone="")
READY = {"state": "ready", "layers": 4, "registered": 1.0, "restarts": 0, "error": ""}
RANK = RankStatus(rank="pp0.tp0", pid=8, transports=("mooncake",), **READY)
RUNNING = RunningNode(status=NODE_PAGE.model_copy(update={"engines": (ENGINE,), "ranks": (RANK,)}))

HEALTHY = Host(
    machine=Machine(
        shared=(Directory(path="/dev/shm", total_bytes=512 * GIB, free_bytes=500 * GIB),),
        limits=(MemoryLimit(name="memory of this machine", available_bytes=600 * GIB, cure="use a larger machine"),),
        open_files=1 << 20,
        runtime=Directory(path="/run/kvbridge"),
        accelerator=True,
        driver="580.65.06",
        gpus=(DeviceFacts("NVIDIA H200", 132, (9, 0), 141 * GIB, 139 * GIB),) * 2,
        ipc_problem="",
    ),
    network=Network(
        rdma=(ROCE, INFINIBAND),
        verbs_nodes=True,
        peer_memory=True,
        interfaces=(
            Interface(name="eth0", speed_mbit=10_000, addresses=("10.0.0.2",)),
            Interface(name="eth2", speed_mbit=400_000, addresses=("10.1.0.2",)),
        ),
        listeners=(TcpListener("0.0.0.0", 22, 1, "sshd"),),
    ),
    software=Software(
        packages={"mooncake-transfer-engine": "0.3.13.post1", "nixl-cu13": "1.5.1"}, libraries=("ibverbs",)
    ),
    reach=Reach(
        node=RUNNING,
        bootstraps=(Answer(name="bootstrap", url="http://10.0.0.1:7900", took_s=0.001),),
        peers=(Answer(name="decode-0/node-0", url="http://10.1.0.3:7902", took_s=0.001),),
        handshakes=(Answer(name="prefill-1/node-0", url="tcp://10.1.0.4:7801", took_s=0.002),),
    ),
)

NEEDS = Needs(
    role="decode",
    instance="decode-0",
    node="node-0",
    shared_bytes=256 * GIB,
    device_bytes={0: 60 * GIB, 1: 60 * GIB},
    gpus=(0, 1),
    transports=("local", "mooncake", "nixl"),
    settings=TransportSettings(mooncake=MooncakeSettings(host="10.1.0.2", protocol=MooncakeProtocol.RDMA)),
    ports=(Port(key="http.port", host="10.1.0.2", port=7902, connections=2048),),
    idle_connections=4096,
    public=True,
    bootstraps=("http://10.0.0.1:7900",),
)


def changed(model: ModelT, **values: Any) -> ModelT:
    """Return a copy in which `machine__locked=X` is another."""
    for path, value in values.items():
        name, _, rest = path.partition("__")
        inner = changed(getattr(model, name), **{rest: value}) if rest else value
        model = model.model_copy(update={name: inner})
    return model

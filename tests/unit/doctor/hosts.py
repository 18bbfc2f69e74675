"""Recorded hosts: a healthy prefill node with two GPUs and RDMA, and how one differs from it.

Owns: `HEALTHY`, `NEEDS`, `changed`. What a broken host differs in is said where it is used.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel

from kvbridge.config.transports import MooncakeProtocol, MooncakeSettings, TransportSettings
from kvbridge.doctor.facts import (
    Answer,
    Available,
    Devices,
    Directory,
    Gid,
    Gpu,
    Handshake,
    Host,
    HugePages,
    Interface,
    KeyFact,
    Limit,
    Listener,
    Memory,
    Moved,
    Network,
    NumaNode,
    Process,
    RdmaPort,
    Reach,
    Route,
    SharedDirectory,
    Software,
)
from kvbridge.doctor.needs import Needs, Port

GIB = 1 << 30
ModelT = TypeVar("ModelT", bound=BaseModel)

ROCE = RdmaPort(
    device="mlx5_0",
    port=1,
    rate_gbit=400,
    node=0,
    gids=(
        Gid(index=0, address="fe80::ee0d:9aff:fe2d:1", kind="IB/RoCE v1", interface="eth2"),
        Gid(index=1, address="fe80::ee0d:9aff:fe2d:1", kind="RoCE v2", interface="eth2"),
        Gid(index=2, address="::ffff:10.1.0.2", kind="IB/RoCE v1", interface="eth2"),
        Gid(index=3, address="::ffff:10.1.0.2", kind="RoCE v2", interface="eth2"),
    ),
    partition_keys=(0xFFFF,),
)
INFINIBAND = RdmaPort(
    device="mlx5_1",
    port=1,
    link_layer="InfiniBand",
    rate_gbit=400,
    node=0,
    gids=(Gid(index=0, address="fe80::ee0d:9aff:fe2d:2"),),
    partition_keys=(0xFFFF,),
)

HEALTHY = Host(
    memory=Memory(
        locked=Limit(),
        shared=(SharedDirectory(path="/dev/shm", total_bytes=512 * GIB, free_bytes=500 * GIB),),
        limits=(Available(name="memory of this machine", available_bytes=600 * GIB, cure="use a larger machine"),),
        huge_pages=HugePages(page_bytes=2 << 20, total=512, free=0, shared_memory="advise"),
        nodes=tuple(NumaNode(number=number, total_bytes=512 * GIB, free_bytes=400 * GIB) for number in (0, 1)),
        allowed_nodes=(0, 1),
    ),
    devices=Devices(
        accelerator=True,
        driver="580.65.06",
        gpus=tuple(
            Gpu(
                ordinal=one, name="NVIDIA H200", total_bytes=141 * GIB, free_bytes=139 * GIB, node=0, reaches=(1 - one,)
            )
            for one in (0, 1)
        ),
        ipc_problem="",
    ),
    network=Network(
        rdma=(ROCE, INFINIBAND),
        verbs_nodes=True,
        interfaces=(
            Interface(name="eth0", speed_mbit=10_000, addresses=("10.0.0.2",)),
            Interface(name="eth2", speed_mbit=400_000, mtu=9000, addresses=("10.1.0.2",), node=0),
        ),
        listeners=(Listener(host="0.0.0.0", port=22, pid=1, command="sshd"),),
        routes=(Route(source="10.1.0.2", interface="eth2", peer="10.1.0.3:7902"),),
    ),
    process=Process(
        open_files=Limit(soft=1024, hard=1 << 20),
        ptrace_scope=0,
        runtime=Directory(path="/run/kvbridge"),
        keys=(KeyFact(good=True, text="control.curve.secret_key_file: /etc/kvbridge/key"),),
    ),
    software=Software(
        python=(3, 12, 3),
        packages={"mooncake-transfer-engine": "0.3.13.post1", "nixl-cu13": "1.5.1", "torch": "2.11.0"},
        libraries=("ibverbs",),
    ),
    reach=Reach(
        bootstraps=(Answer(name="bootstrap", url="http://10.0.0.1:7900", took_s=0.001, clock_ahead_s=0.2),),
        peers=(Answer(name="decode-0/node-0", url="http://10.1.0.3:7902", took_s=0.001, clock_ahead_s=-0.4),),
        handshakes=(Handshake(name="prefill-1/node-0", endpoint="tcp://10.1.0.4:7801", took_s=0.002),),
        moved=(
            Moved(
                name="10.1.0.3:7909",
                transport="mooncake",
                bytes_per_s=40e9,
                latency_s=9e-6,
                operation_bytes=1 << 20,
                wire="eth2 at 400 Gbit/s",
                wire_bytes_per_s=50e9,
            ),
        ),
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
    ports=(
        Port(key="http.port", host="10.1.0.2", port=7902, connections=2048, connections_key="http.max_connections"),
    ),
    idle_connections=4096,
    public=True,
    bootstraps=("http://10.0.0.1:7900",),
)


def changed(model: ModelT, **values: Any) -> ModelT:
    """A copy in which `memory__locked=X` is another."""
    for path, value in values.items():
        name, _, rest = path.partition("__")
        inner = changed(getattr(model, name), **{rest: value}) if rest else value
        model = model.model_copy(update={name: inner})
    return model

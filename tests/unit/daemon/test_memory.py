from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.shared_memory import DeviceOrder
from kvbridge.daemon.memory import NodeMemory, plan_memory

TINY = preset("tiny-v4")
PAGES = {"full": 8, "swa": 4, "request": 2}
COUNTS = {IndexSpace.FULL: 8, IndexSpace.SWA: 4, IndexSpace.REQUEST: 2}
R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)


def decode(**parallelism) -> DecodeConfig:
    return DecodeConfig.model_validate(
        {
            "instance": "d",
            "model": {"preset": "tiny-v4"},
            "parallelism": parallelism,
            "pools": {"device": PAGES, "host": {"pages": 4}},
        }
    )


@pytest.fixture
def no_cuda(monkeypatch):
    """The node's process must not touch CUDA."""

    def touched(*_: object) -> None:
        raise AssertionError("the node touched CUDA")

    monkeypatch.setattr("kvbridge.kernels.cuda.runtime._library", touched)


def test_device_memory_on_gpus_is_ordered_from_the_workers(no_cuda, tmp_path: Path):
    layout = plan_memory(decode(tp_size=2, device="cuda"), TINY)
    assert layout.orders == {
        rank: DeviceOrder(device=number, page_counts=COUNTS, exclude=(ComponentKind.C4_KV,))
        for number, rank in enumerate((R0, R1))
    }
    assert {(placement.memory, placement.device) for placement in layout.device.values()} == {
        (MemoryKind.VRAM, 0),
        (MemoryKind.VRAM, 1),
    }
    assert layout.host is not None
    assert layout.node_bytes == layout.host.total_bytes < layout.total_bytes
    memory = NodeMemory(layout)
    told: list[tuple[int, int]] = []
    memory.create(
        directory=tmp_path, instance="d", node="n", incarnation="i", on_progress=lambda *done: told.append(done)
    )
    try:
        assert memory.device == {}
        assert memory.host
        assert told[-1] == (layout.node_bytes, layout.node_bytes)
    finally:
        memory.close()


def test_each_rank_may_have_a_device_of_its_own_kind(no_cuda):
    ranks = [{"pp": 0, "tp": 0, "device": "cpu"}, {"pp": 0, "tp": 1, "device": "cuda:3"}]
    layout = plan_memory(decode(tp_size=2, ranks=ranks), TINY)
    assert (set(layout.shared_device()), set(layout.orders)) == ({R0}, {R1})
    assert layout.orders[R1].device == 3
    assert layout.parts[R0].memory is MemoryKind.DRAM


def test_without_gpus_everything_is_the_nodes():
    layout = plan_memory(decode(), TINY)
    assert (layout.orders, layout.node_bytes) == ({}, layout.total_bytes)


def test_memory_that_engines_bring_is_nobodys_to_make(no_cuda):
    config = PrefillConfig.model_validate(
        {
            "instance": "p",
            "model": {"preset": "tiny-v4"},
            "parallelism": {"device": "cuda"},
            "pools": {"memory": "adopted"},
        }
    )
    layout = plan_memory(config, TINY)
    assert (layout.orders, layout.device, layout.total_bytes) == ({}, {}, 0)

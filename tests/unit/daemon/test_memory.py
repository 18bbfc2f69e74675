"""The memory of a node: planned, made, refused, kept and removed; its host tier."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config.pools import ModelConfig
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError, DeadlineError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.messages import DeviceAllocationRequest
from kvbridge.daemon.kept_pools import KeptHeader, Restored
from kvbridge.daemon.layout import NodeLayout, load_geometry, plan_memory
from kvbridge.daemon.memory import NodeMemory, require_memory_directory
from kvbridge.pool.memory.pools import MappedRegions

TINY = preset("tiny-v4")
PAGES = {"full": 8, "swa": 4, "request": 2}
COUNTS = {IndexSpace.FULL: 8, IndexSpace.SWA: 4, IndexSpace.REQUEST: 2}
R0, R1 = Rank(pp=0, tp=0), Rank(pp=0, tp=1)


def decode(pools=None, **parallelism) -> DecodeConfig:
    pools = {"device": PAGES, "host": {"pages": 4}} | (pools or {})
    facts = {"instance": "d", "model": {"preset": "tiny-v4"}, "parallelism": parallelism, "pools": pools}
    return DecodeConfig.model_validate(facts)


@pytest.fixture
def no_cuda(monkeypatch):
    """The node's process must not touch CUDA."""

    def touched(*_: object) -> None:
        raise AssertionError("the node touched CUDA")

    monkeypatch.setattr("kvbridge.kernels.cuda.runtime.library", touched)


def test_a_node_starts_without_kept_pools_where_something_else_has_a_name_of_theirs(tmp_path: Path):
    """Any user of the host can take such a name. The daemon says which, keeps nothing, and starts."""
    config = decode({"host": {"pages": 4, "directory": tmp_path}, "keep_s": 60})
    path = tmp_path / "kvbridge-0123456789ab-keep.lock"
    path.mkdir()
    memory = NodeMemory(plan_memory(decode(), TINY))
    header = KeptHeader(incarnation="1" * 16, form={"layout": "l"}, page_counts={})
    memory.keep(config, "kvbridge-0123456789ab-", header)
    assert memory.kept is None
    assert memory.restored is not None
    assert str(path) in memory.restored.refused
    path.rmdir()
    memory.keep(config, "kvbridge-0123456789ab-", header)
    assert memory.kept is not None
    assert memory.restored == Restored()
    memory.close()


def test_device_memory_on_gpus_is_ordered_from_the_workers(no_cuda, tmp_path: Path):
    layout = plan_memory(decode(tp_size=2, device="cuda"), TINY)
    assert layout.orders == {
        rank: DeviceAllocationRequest(
            device=number, page_counts=COUNTS, exclude=(ComponentKind.C4_KV,), page_first=True
        )
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
    asyncio.run(memory.create(tmp_path, "d", on_progress=lambda *done: told.append(done), cancel_s=5.0))
    try:
        assert memory.device == {}
        assert memory.host
        assert told[-1] == (layout.node_bytes, layout.node_bytes)
    finally:
        memory.close()


@pytest.mark.parametrize("reports_before", [1, 3])
def test_a_creation_that_is_cancelled_ends_at_its_next_report_and_leaves_nothing(tmp_path: Path, reports_before: int):
    """Reports: before the first of the three pools has its name, and before the last one, when nothing is left to report."""
    memory = NodeMemory(plan_memory(decode(tp_size=2), TINY))
    told: list[int] = []

    async def cancelled() -> None:
        loop = asyncio.get_running_loop()

        def on_progress(done_bytes: int, _: int) -> None:
            told.append(done_bytes)
            if len(told) == reports_before:
                loop.call_soon_threadsafe(creation.cancel)
                assert memory._cancelled.wait(20)

        creation = asyncio.create_task(memory.create(tmp_path, "d", on_progress=on_progress, cancel_s=20))
        await creation

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert len(told) == reports_before
    assert not list(tmp_path.iterdir())
    assert (memory.device, memory.host) == ({}, ())


def test_a_creation_that_does_not_stop_is_said_and_still_leaves_nothing(tmp_path: Path):
    memory = NodeMemory(plan_memory(decode(), TINY))
    stuck, released = threading.Event(), threading.Event()

    def on_progress(*_: int) -> None:
        stuck.set()
        assert released.wait(20)

    async def told() -> None:
        creation = asyncio.create_task(memory.create(tmp_path, "d", on_progress=on_progress, cancel_s=0.05))
        assert await asyncio.to_thread(stuck.wait, 20)
        creation.cancel()
        try:
            await creation
        finally:
            released.set()

    with pytest.raises(DeadlineError, match=r"could not be removed within 0.05 s \(timeouts.shutdown_close_s\)"):
        asyncio.run(told())  # returns when the thread has
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("directory", "problem"),
    [
        ("/no/such/place", "/no/such/place: No such file or directory"),
        ("/proc/self/status", "/proc/self/status is not a directory"),
        ("/proc", "/proc is on a file system of type 0x9fa0, not in memory"),
    ],
)
def test_pools_lie_in_memory_only(directory: str, problem: str):
    layout = plan_memory(decode(), TINY)
    require_memory_directory(decode(), layout)
    with pytest.raises(ConfigError) as caught:
        require_memory_directory(decode({"host": {"pages": 4, "directory": directory}}), layout)
    assert str(caught.value) == (
        f"pools.host.directory: {problem}; the pools need a directory in memory, such as /dev/shm"
    )


FLASH = preset("deepseek-v4-flash")
FULL_COPY, SWA_COPY = IndexSpace.FULL_COPY, IndexSpace.SWA_COPY
MODEL = {"enabled": True, "model_name": "m", "model_revision": "1"}


def prefill_tier(host: dict[str, Any], *, model: str = "deepseek-v4-flash", **pools: Any) -> PrefillConfig:
    facts = {"instance": "p", "model": {"preset": model}, "tier": MODEL | {"host": host}}
    return PrefillConfig.model_validate(facts | {"pools": {"device": PAGES} | pools})


def decode_tier(host: dict[str, Any], *, model: str = "deepseek-v4-flash", **more: Any) -> DecodeConfig:
    facts = {"instance": "d", "model": {"preset": model}, "tier": MODEL | {"host": host}}
    return DecodeConfig.model_validate(facts | {"pools": {"device": PAGES, "host": {"pages": 4}}} | more)


def planned(config: PrefillConfig | DecodeConfig) -> NodeLayout:
    return plan_memory(config, preset(config.model.preset))


def test_prefill_has_twins_of_everything_that_a_prefix_takes():
    layout = planned(prefill_tier({"pages": 30, "checkpoint_pages": 5}))
    assert {space: layout.owned[space] for space in (FULL_COPY, SWA_COPY)} == {FULL_COPY: 30, SWA_COPY: 5}
    assert layout.book().available_pages()[FULL_COPY] == 30
    asked = {"size_bytes": 10 * 998_208 + 3 * 4_080_000 + 998_207, "checkpoint_pages": 3}
    layout = planned(prefill_tier(asked))
    assert {space: layout.owned[space] for space in (FULL_COPY, SWA_COPY)} == {FULL_COPY: 10, SWA_COPY: 3}
    assert layout.copies is not None
    assert layout.copies.total_bytes <= asked["size_bytes"] + 4096 * len(layout.copies.regions)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            prefill_tier({"pages": 3}),
            r"tier\.host\.checkpoint_pages is 0: .* say how many checkpoints the host is to keep",
        ),
        (
            prefill_tier({"pages": 3, "checkpoint_pages": 1}, model="tiny-gqa", device={"full": 4}),
            r"tier\.host\.checkpoint_pages is 1: 'tiny-gqa' needs none; set it to 0",
        ),
        (
            prefill_tier({"size_bytes": 4_080_000 + 998_207, "checkpoint_pages": 1}),
            r"tier\.host\.size_bytes: 1 checkpoints take 4080000 bytes, one page of all layers 998208; got 5078207 in all",
        ),
        (
            prefill_tier({"pages": 3, "checkpoint_pages": 1}, memory="adopted", device={}),
            r"tier\.host is set but pools\.memory is adopted: .*; set tier\.host to null",
        ),
        (
            prefill_tier(
                {"pages": 3, "checkpoint_pages": 1, "layout": "page_first", "backend": "direct"},
                device_layout="layer_first",
            ),
            r"tier\.host\.backend direct needs page_first on both sides, .*; set both to page_first, or the backend to null$",
        ),
        (
            decode_tier({"pages": 3}, sparse={"max_requests": 2, "hot_rows": 1000}),
            r"sparse: hot_rows \(sparse.hot_rows\) is 1000",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        planned(config)


def test_a_node_makes_them_beside_its_pools_and_removes_them(tmp_path: Path):
    layout = planned(decode_tier({"pages": 3, "layout": "page_first"}, model="tiny-v4"))
    assert layout.copies is not None
    assert layout.node_bytes == layout.total_bytes
    memory = NodeMemory(layout, group=os.getgid())
    told: list[tuple[int, int]] = []
    asyncio.run(memory.create(tmp_path, "d", on_progress=lambda *done: told.append(done), cancel_s=5.0))
    try:
        assert told[-1] == (layout.node_bytes, layout.node_bytes)
        assert {shared.region.space for shared in memory.copies} == {FULL_COPY}
        with MappedRegions(memory.copies) as mapped:
            assert {region.page_count for region in mapped.regions} == {3}
        assert any("twins" in file.name for file in tmp_path.iterdir())
    finally:
        memory.close()
    assert (memory.copies, list(tmp_path.iterdir())) == ((), [])


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "does not hold a geometry: Invalid JSON.*write it again"),
        ('{"name": "x", "layer_count": 0}', r"does not hold a geometry \(layer_count\)"),
    ],
)
def test_what_is_no_geometry_is_refused_by_its_file(tmp_path: Path, text: str, complaint: str) -> None:
    file = tmp_path / "geometry.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^model.geometry: (?s:.*){complaint}"):
        load_geometry(ModelConfig(geometry=file))

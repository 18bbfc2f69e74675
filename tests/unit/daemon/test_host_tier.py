"""What a node makes of `tier.host`."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.daemon.memory import NodeLayout, NodeMemory, plan_memory
from kvbridge.pool.memory.pools import MappedRegions

FLASH, TINY = preset("deepseek-v4-flash"), preset("tiny-v4")
FULL_COPY, SWA_COPY = IndexSpace.FULL_COPY, IndexSpace.SWA_COPY
MODEL = {"enabled": True, "model_name": "m", "model_revision": "1"}
DEVICE = {"full": 8, "swa": 4, "request": 2}


def prefill(host: dict[str, Any], *, model: str = "deepseek-v4-flash", **pools: Any) -> PrefillConfig:
    return PrefillConfig.model_validate(
        {
            "instance": "p",
            "model": {"preset": model},
            "tier": MODEL | {"host": host},
            "pools": {"device": DEVICE} | pools,
        }
    )


def decode(host: dict[str, Any], *, model: str = "deepseek-v4-flash", **more: Any) -> DecodeConfig:
    pools = {"device": DEVICE, "host": {"pages": 4}}
    tier = MODEL | {"host": host}
    return DecodeConfig.model_validate(
        {"instance": "d", "model": {"preset": model}, "tier": tier, "pools": pools} | more
    )


def planned(config: PrefillConfig | DecodeConfig) -> NodeLayout:
    return plan_memory(config, preset(config.model.preset))


def test_prefill_has_twins_of_everything_that_a_prefix_takes():
    layout = planned(prefill({"pages": 30, "checkpoint_pages": 5}))
    assert {space: layout.owned[space] for space in (FULL_COPY, SWA_COPY)} == {FULL_COPY: 30, SWA_COPY: 5}
    assert layout.page_bytes(FLASH)[FULL_COPY] == 998_208
    assert layout.page_bytes(FLASH)[SWA_COPY] == 4_080_000
    assert layout.book().available_pages()[FULL_COPY] == 30
    asked = {"size_bytes": 10 * 998_208 + 3 * 4_080_000 + 998_207, "checkpoint_pages": 3}
    layout = planned(prefill(asked))
    assert {space: layout.owned[space] for space in (FULL_COPY, SWA_COPY)} == {FULL_COPY: 10, SWA_COPY: 3}
    assert layout.twins is not None
    assert layout.twins.total_bytes <= asked["size_bytes"] + 4096 * len(layout.twins.regions)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (prefill({"pages": 3}), r"tier\.host\.checkpoint_pages is 0: .* say how many checkpoints the host is to keep"),
        (
            prefill({"pages": 3, "checkpoint_pages": 1}, model="tiny-gqa", device={"full": 4}),
            r"tier\.host\.checkpoint_pages is 1: 'tiny-gqa' needs none; set it to 0",
        ),
        (
            prefill({"size_bytes": 4_080_000 + 998_207, "checkpoint_pages": 1}),
            r"tier\.host\.size_bytes: 1 checkpoints take 4080000 bytes, one page of all layers 998208; got 5078207 in all",
        ),
        (
            prefill({"pages": 3, "checkpoint_pages": 1}, memory="adopted", device={}),
            r"tier\.host is set but pools\.memory is adopted: .*; set tier\.host to null",
        ),
        (
            prefill(
                {"pages": 3, "checkpoint_pages": 1, "layout": "page_first", "backend": "direct"},
                device_layout="layer_first",
            ),
            r"tier\.host\.backend direct needs page_first on both sides, .*; set both to page_first, or the backend to null$",
        ),
        (
            decode({"pages": 3}, sparse={"max_requests": 2, "hot_rows": 1000}),
            r"sparse: hot_rows \(sparse.hot_rows\) is 1000",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(config, reason):
    with pytest.raises(ConfigError, match=reason):
        planned(config)


def test_a_node_makes_them_beside_its_pools_and_removes_them(tmp_path: Path):
    layout = planned(decode({"pages": 3, "layout": "page_first"}, model="tiny-v4"))
    assert layout.twins is not None
    assert layout.node_bytes == layout.total_bytes
    memory = NodeMemory(layout, group=os.getgid())
    told: list[tuple[int, int]] = []
    asyncio.run(memory.create(tmp_path, "d", on_progress=lambda *done: told.append(done), cancel_s=5.0))
    try:
        assert told[-1] == (layout.node_bytes, layout.node_bytes)
        assert {shared.region.space for shared in memory.twins} == {FULL_COPY}
        with MappedRegions(memory.twins) as mapped:
            assert {region.page_count for region in mapped.regions} == {3}
        assert any("twins" in file.name for file in tmp_path.iterdir())
    finally:
        memory.close()
    assert (memory.twins, list(tmp_path.iterdir())) == ((), [])

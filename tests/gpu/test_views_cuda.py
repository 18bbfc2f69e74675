from __future__ import annotations

import pytest
import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import MemoryKind
from kvbridge.core.plan.operations import Section
from kvbridge.engine.views import PoolViews
from tests.helpers.synthetic import compare, fill
from tests.helpers.torch_pools import make_pools

pytestmark = pytest.mark.gpu
TINY = preset("tiny-v4")


def test_pages_in_device_memory_are_filled_and_read_in_place(device: int) -> None:
    tokens = 600
    host = make_pools(TINY, tokens=tokens)
    memory, regions = [], []
    for region in host.regions:
        pages = torch.zeros((region.page_count, region.page_bytes), dtype=torch.uint8, device=f"cuda:{device}")
        memory.append(pages)
        moved = {"memory": MemoryKind.VRAM, "device": device, "extent_addresses": (pages.data_ptr(),)}
        regions.append(region.model_copy(update={**moved, "page_stride_bytes": region.page_bytes}))
    views = PoolViews(TINY, regions)
    assert (views.device, host.views.device) == (device, None)
    section = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
    fill(views, room=3, tables=host.tables, section=section)
    assert compare(views, room=3, tables=host.tables, tokens=tokens).mismatches == ()
    fill(host.views, room=3, tables=host.tables, section=section)
    for layer in views.layers(ComponentKind.C4_KV):
        rows = {"tables": host.tables, "start_row": 0, "stop_row": tokens // 4}
        on_device = views.read_rows(ComponentKind.C4_KV, layer, **rows)
        assert on_device.is_cuda
        assert torch.equal(on_device.cpu(), host.views.read_rows(ComponentKind.C4_KV, layer, **rows))
    assert any(bool(pages.any()) for pages in memory)

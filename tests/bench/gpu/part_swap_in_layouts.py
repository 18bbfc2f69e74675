"""Swap-in from host pages of one layer each, and from pages of all layers: what a `page_first` host pool costs the engine.

Owns: the cases. How one is checked and timed is `part_swap_in`'s.
"""

from __future__ import annotations

import itertools

import torch

from kvbridge.config.pools import HostLayout
from kvbridge.kernels.swap_in_device import CudaSwapIn
from tests.bench.gpu.memory import PAGE_BYTES, CacheFlush, device_memory, fill_random, host_memory
from tests.bench.gpu.part_swap_in import REPLAYS, SwapInBench
from tests.bench.gpu.recorder import Recorder
from tests.bench.gpu.swap_in_model import POOL_PAGES, SwapInModel, hot_bytes

HOT_ROWS, TOP_K = 4096, 512
BATCHES = (1, 8)
"""Of the largest, the pages of all layers still fit the pool."""
SHARES = (2, 10, 100)
C4_LAYERS = {HostLayout.LAYER_FIRST: 1, HostLayout.PAGE_FIRST: 21}
"""How many layers' pages lie together; DeepSeek-V4-Flash has 21 with C4."""


def run(recorder: Recorder, *, quick: bool) -> None:
    """Measure each case in one layout after the other."""
    torch.cuda.set_device(0)
    pool_bytes, hot = POOL_PAGES * PAGE_BYTES, hot_bytes(HOT_ROWS)
    with host_memory(pool_bytes) as mapping, device_memory(hot) as memory, torch.cuda.stream(torch.cuda.Stream()):
        fill_random(mapping.address, pool_bytes, 0)
        bench = SwapInBench(recorder, CacheFlush(0), 7 if quick else REPLAYS)
        for batch, (layout, together) in itertools.product(BATCHES, C4_LAYERS.items()):
            scene = SwapInModel(
                batch=batch, hot_rows=HOT_ROWS, pool=mapping.address, hot=memory, layers_together=together
            )
            operation = CudaSwapIn(0, *scene.facts(TOP_K))
            for share in SHARES:
                bench.case(scene, operation, top_k=TOP_K, miss_percent=share, host_layout=layout.value)
            torch.cuda.synchronize()
            operation.close()

"""Swap-in under the conditions of `sglang_h200.json`, beside the bare gather of the same missing rows; checked before it is timed.

The median of 21 replays of one CUDA graph over 8 layers or fewer. Before each: state restored, next selection, cache flushed.
"""

import itertools
from typing import Any

import torch

from kvbridge.kernels.swap_in import CudaSwapIn
from tests.bench.gpu import swap_in_model, timing

FULL = (((4096, (512, 1024, 2048)), (1024, (512,))), (1, 4, 16, 64, swap_in_model.MOST_BATCH), (0, 2, 10, 50, 100))
QUICK = (((4096, (512,)),), (1, 16, 64), (0, 2, 100))
REPLAYS = 21


def run(*, quick: bool) -> dict[str, Any]:
    torch.cuda.set_device(0)
    sizes, batches, shares = QUICK if quick else FULL
    pool_bytes = swap_in_model.POOL_PAGES * timing.PAGE_BYTES
    most_hot = max(swap_in_model.hot_bytes(hot_rows) for hot_rows, _ in sizes)
    with (
        timing.host_memory(pool_bytes) as mapping,
        timing.device_memory(most_hot) as hot,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        timing.fill_random(mapping.address, pool_bytes, 0)
        bench = SwapInBench(timing.CacheFlush(0), 7 if quick else REPLAYS)
        cases = []
        for (hot_rows, top_ks), batch in itertools.product(sizes, batches):
            scene = swap_in_model.SwapInModel(batch=batch, hot_rows=hot_rows, pool=mapping.address, hot=hot)
            for top_k in top_ks:
                operation = CudaSwapIn(0, *scene.facts(top_k))
                cases += [bench.case(scene, operation, top_k=top_k, miss_percent=share) for share in shares]
                operation.close()
            torch.cuda.synchronize()
    return {"cases": cases}


class SwapInBench:
    def __init__(self, flush: timing.CacheFlush, replays: int) -> None:
        self._flush = flush
        self._replays = replays
        self._stream = torch.cuda.current_stream().cuda_stream

    def case(
        self, scene: swap_in_model.SwapInModel, operation: CudaSwapIn, *, top_k: int, miss_percent: int
    ) -> dict[str, Any]:
        misses = swap_in_model.misses_of(top_k, miss_percent)
        layers = swap_in_model.layers_for(scene.batch, misses)
        selections = scene.select(top_k=top_k, misses=misses, layers=layers)
        now = torch.empty_like(selections.top_k[0])
        out = torch.empty_like(now)

        def swap_ins() -> None:
            for layer in range(layers):
                operation.swap_in(
                    layer, scene.step, top_k=now[layer].data_ptr(), out=out[layer].data_ptr(), stream=self._stream
                )

        def before(replay: int) -> None:
            scene.restore(layers)
            now.copy_(selections.top_k[replay % swap_in_model.SETS])
            self._flush.enqueue(self._stream)

        scene.load_residents(layers, self._stream)
        before(0)
        swap_ins()
        torch.cuda.synchronize()
        self._check(scene, selections, out)
        us = timing.graph_us(0, self._stream, swap_ins, replays=self._replays, calls=layers, before=before)
        gathered = self._gathers(scene, selections, layers) if misses else []
        best = min(gathered) if gathered else None
        loaded = scene.batch * misses * timing.ROW_BYTES
        return {
            "hot_rows": scene.hot_rows,
            "top_k": top_k,
            "batch": scene.batch,
            "miss_percent": miss_percent,
            "misses": misses,
            "layers": layers,
            "us": us,
            "bare_gather_us": best,
            "gb_s": loaded / us / 1e3,
        }

    def _check(self, scene: swap_in_model.SwapInModel, selections: swap_in_model.Selections, out: torch.Tensor) -> None:
        hot_words = scene.batch * scene.rows_each // timing.SLOTS * timing.PAGE_BYTES // 8
        for layer in range(len(out)):
            memory = scene.memory[layer]
            selected, found = selections.top_k[0, layer], out[layer]
            wrong = swap_in_model.wrong_bytes(
                scene,
                selected=selected,
                found=found,
                pool=timing.tensor_at(memory.host_addresses[0], scene.host_words, torch.int64, 0),
                hot=timing.tensor_at(memory.hot_address, hot_words, torch.int64, 0),
            )
            assert not wrong, f"batch {scene.batch}, layer {layer}: {wrong}"

    def _gathers(
        self, scene: swap_in_model.SwapInModel, selections: swap_in_model.Selections, layers: int
    ) -> list[float]:
        """Return microseconds of the bare gather of the same rows, in each of its shapes."""
        now = torch.empty_like(selections.source_rows[0])
        took_us = []
        for shape in timing.GATHER_SHAPES:

            def gathers(shape: tuple[int, int] = shape) -> None:
                for layer in range(layers):
                    scene.gather(selections, layer, now).launch(0, self._stream, shape)

            def before(replay: int) -> None:
                now.copy_(selections.source_rows[replay % swap_in_model.SETS])
                self._flush.enqueue(self._stream)

            before(0)
            gathers()
            took_us.append(
                timing.graph_us(0, self._stream, gathers, replays=self._replays, calls=layers, before=before)
            )
        return took_us


def table(found: dict[str, Any]) -> str:
    return timing.with_budgets(found["cases"], timing.of_swap_ins(found["cases"]))

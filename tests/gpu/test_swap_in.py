"""The swap-in kernel against the rules in numpy, bit by bit: places, bytes, residency, ages and counters."""

import numpy as np
import pytest
import torch

from kvbridge.kernels.swap_in import LARGE_BATCH, SMALL_BATCH, CudaSwapIn, ReferenceSwapIn, SwapInShape
from tests.helpers.gpu import SMALL
from tests.helpers.swap_in_simulation import SwapInSimulation, selections, step_of

pytestmark = pytest.mark.gpu


class Pair:
    def __init__(self, shape: SwapInShape, *, device: int, **facts: object) -> None:
        self.on_cpu = SwapInSimulation(shape, device=torch.device("cpu"), **facts)
        self.on_gpu = SwapInSimulation(shape, device=torch.device("cuda", device), **facts)
        self.reference = ReferenceSwapIn(shape, self.on_cpu.state(), self.on_cpu.layer_memory())
        self.kernel = CudaSwapIn(device, shape, self.on_gpu.state(), self.on_gpu.layer_memory())

    def admit(self, request: int, rows: int) -> None:
        self.on_cpu.admit(request, rows)
        self.on_gpu.admit(request, rows)

    def step(self, layer: int, requests: list[int], rows: list[int], selected: np.ndarray, layout: object) -> None:
        answers = []
        for world, swap, more in (
            (self.on_cpu, self.reference, {}),
            (self.on_gpu, self.kernel, {"layout": layout, "stream": torch.cuda.current_stream().cuda_stream}),
        ):
            slots = torch.tensor(requests, dtype=torch.int32, device=world.device)
            counts = torch.tensor(rows, dtype=torch.int32, device=world.device)
            top_k = torch.from_numpy(np.ascontiguousarray(selected)).to(world.device)
            out = torch.full(selected.shape, -7, dtype=torch.int32, device=world.device)
            swap.swap_in(layer, step_of(slots, counts), top_k=top_k.data_ptr(), out=out.data_ptr(), **more)
            answers.append(out.cpu())
        assert torch.equal(*answers)

    def compare(self) -> None:
        gpu = self.on_gpu.arrays()
        for name, tensor in self.on_cpu.arrays().items():
            assert torch.equal(tensor, gpu[name]), name


CASES = [
    # hot, max_rows, top_k, parts, extents, page_first, layout
    (128, 1024, 64, (576, 8), 1, False, (SMALL_BATCH, 1)),
    (512, 8192, 512, (576, 8), 1, False, (LARGE_BATCH, 4)),
    (4096, 32768, 512, (576, 8), 3, False, (SMALL_BATCH, 32)),
    (4096, 32768, 2048, (576, 8), 1, True, (LARGE_BATCH, 1)),
    (4096, 32768, 2048, (576, 8), 1, True, (SMALL_BATCH, 32)),
    (2048, 262144, 1024, (64, 4), 1, False, None),
    (20480, 65536, 700, (64, 8), 1, False, (LARGE_BATCH, 4)),
    (20480, 65536, 700, (64, 8), 1, False, (SMALL_BATCH, 1)),
    (64, 512, 64, (2048,), 2, False, None),
]


@pytest.mark.parametrize("case", CASES[:2] if SMALL else CASES, ids=str)
def test_the_kernel_and_the_rules_agree_bit_by_bit(device: int, case: tuple) -> None:
    hot_rows, max_rows, top_k, parts, extents, page_first, layout = case
    shape = SwapInShape(hot_rows=hot_rows, ring_rows=128, max_rows=max_rows, top_k=top_k, row_parts_bytes=parts)
    layers, requests = (1, 2) if max_rows > 10_000 else (2, 4)
    pair = Pair(shape, device=device, layers=layers, requests=requests, extents=extents, page_first=page_first)
    random = np.random.default_rng(hot_rows + top_k)
    rows = [max_rows, max_rows - 130, max_rows // 2 + 7, 90][:requests]
    for request in range(requests):
        pair.admit(request, rows[request])
    hot = [list(random.choice(count, min(count, hot_rows))) for count in rows]
    for number in range(4 if SMALL else 10):
        order = [int(r) for r in random.permutation(requests)]
        batch = [*order[:1], -1, *order[1:]]
        counts = [rows[max(r, 0)] for r in batch]
        fresh = (0.0, 0.05, 0.5, 1.0)[number % 4]
        selected = np.stack(
            [selections(random, top_k=top_k, rows=rows[max(r, 0)], hot=hot[max(r, 0)], fresh=fresh) for r in batch]
        )
        for layer in range(layers):
            pair.step(layer, batch, counts, selected, layout)
        pair.compare()
    pair.on_gpu.check_state()

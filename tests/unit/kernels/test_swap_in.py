"""The rules of swap-in on the CPU: every row where the answer says, in worlds that are small enough to look at each byte."""

import numpy as np
import pytest
import torch

from kvbridge.kernels.swap_in import ReferenceSwapIn, SwapInShape
from tests.helpers.swap_in_simulation import SwapInSimulation, step_of

CPU = torch.device("cpu")


def _reference(world: SwapInSimulation) -> ReferenceSwapIn:
    return ReferenceSwapIn(world.shape, world.state(), world.layer_memory())


def _ask(swap, world, layer, requests, rows, selected):
    slots, counts = torch.tensor(requests, dtype=torch.int32), torch.tensor(rows, dtype=torch.int32)
    top_k = torch.from_numpy(np.ascontiguousarray(selected, dtype=np.int32))
    out = torch.full(selected.shape, -7, dtype=torch.int32)
    swap.swap_in(layer, step_of(slots, counts), top_k=top_k.data_ptr(), out=out.data_ptr())
    world.check(layer, requests, rows, selected, out.numpy())
    return out.numpy()


def test_missing_rows_take_slots_in_the_order_of_their_host_addresses() -> None:
    shape = SwapInShape(hot_rows=64, ring_rows=64, max_rows=512, top_k=3)
    world = SwapInSimulation(shape, layers=1, requests=1, device=CPU)
    world.admit(0, 512)
    selected = np.array([[5, 450, 200]])
    found = _ask(_reference(world), world, 0, [0], [512], selected)
    by_address = sorted(selected[0], key=lambda row: (world.page_ids[0, row // 64], row % 64))
    assert [by_address.index(row) for row in selected[0]] == found[0].tolist()


def test_what_was_used_longest_ago_gives_way_first() -> None:
    shape = SwapInShape(hot_rows=64, ring_rows=64, max_rows=1024, top_k=16)
    world = SwapInSimulation(shape, layers=1, requests=1, device=CPU)
    world.admit(0, 1024)
    swap = _reference(world)
    for start in (0, 16, 32):  # the third ends the first generation, of 42 slots
        _ask(swap, world, 0, [0], [1024], np.arange(start, start + 16)[None])
    assert world.tallies[0, 0, 0] == 0
    _ask(swap, world, 0, [0], [1024], np.arange(16)[None])  # the first rows are of the second generation, too
    _ask(swap, world, 0, [0], [1024], np.arange(48, 64)[None])  # and these fill the hot slots
    _ask(swap, world, 0, [0], [1024], np.arange(64, 80)[None])
    resident = set(np.flatnonzero(world.slot_of_row[0, 0].numpy() >= 0).tolist())
    assert resident == set(range(16)) | set(range(32, 80))


@pytest.mark.parametrize("rows", [*range(63, 68), *range(127, 131), 256, 257])
def test_the_newest_rows_come_from_the_ring(rows: int) -> None:
    shape = SwapInShape(hot_rows=64, ring_rows=128, max_rows=512, top_k=8)
    world = SwapInSimulation(shape, layers=1, requests=1, device=CPU)
    world.admit(0, 60)
    world.fill_ring(0, 60, rows)
    newest = np.arange(rows - 8, rows)[None]
    found = _ask(_reference(world), world, 0, [0], [rows], newest)
    start = shape.ring_start(rows, 0)
    in_ring = found[0] >= shape.hot_rows
    assert in_ring.tolist() == (newest[0] >= start).tolist()
    assert in_ring[-1]

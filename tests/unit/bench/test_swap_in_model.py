"""The swap-in benchmark's scene and its checks, on the CPU with the reference implementation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvbridge.kernels.swap_in import ReferenceSwapIn
from tests.bench.gpu.memory import PAGE_BYTES, SLOTS, row_words
from tests.bench.gpu.swap_in_model import PAGES, ROWS, SwapInModel, layers_for, misses_of, wrong_bytes, wrong_state

HOT_ROWS = 1024
TOP_K = 512


class World:
    """One request, of which only the first layer has memory."""

    def __init__(self, misses: int, layers_together: int = 1) -> None:
        words = PAGES * layers_together * PAGE_BYTES // 8
        self.pool = torch.from_numpy(np.random.default_rng(1).integers(0, 1 << 62, words))
        self.hot = torch.zeros((HOT_ROWS + 2 * SLOTS) // SLOTS * PAGE_BYTES // 8, dtype=torch.int64)
        where = torch.device("cpu")
        self.scene = SwapInModel(
            batch=1,
            hot_rows=HOT_ROWS,
            pool=self.pool.data_ptr(),
            hot=self.hot.data_ptr(),
            layers_together=layers_together,
            where=where,
        )
        self.misses = misses
        self.selections = self.scene.select(top_k=TOP_K, misses=misses, layers=1)
        self.found = torch.empty(1, TOP_K, dtype=torch.int32)
        self._load_residents()

    def _load_residents(self) -> None:
        held = self.scene.fresh[1][0, 0].long()
        page_ids = self.scene.host_pages[0]
        words = row_words(self.pool, page_ids[held // SLOTS] * SLOTS + held % SLOTS)
        pages = self.hot.reshape(-1, PAGE_BYTES // 8)[: HOT_ROWS // SLOTS]
        pages[:, : SLOTS * 72] = words[:, :72].reshape(-1, SLOTS * 72)
        pages[:, SLOTS * 72 : SLOTS * 73] = words[:, 72].reshape(-1, SLOTS)

    def swap_in(self, which: int = 0) -> None:
        shape, state, memory = self.scene.facts(TOP_K)
        operation = ReferenceSwapIn(shape, state, memory)
        selected = self.selections.top_k[which, 0].contiguous()
        operation.swap_in(0, self.scene.step, top_k=selected.data_ptr(), out=self.found.data_ptr())

    def findings(self) -> tuple[str, str]:
        selected = self.selections.top_k[0, 0]
        return (
            wrong_state(self.scene, layer=0, selected=selected, found=self.found, misses=self.misses),
            wrong_bytes(self.scene, selected=selected, found=self.found, pool=self.pool, hot=self.hot),
        )


@pytest.mark.parametrize("layers_together", [1, 8])
@pytest.mark.parametrize("share", [0, 2, 50, 100])
def test_a_right_swap_in_passes_every_check(share: int, layers_together: int) -> None:
    world = World(misses_of(TOP_K, share), layers_together)
    world.swap_in()
    assert world.findings() == ("", "")


def test_selections_are_distinct_and_have_the_wanted_misses() -> None:
    world = World(51)
    slot_of_row = world.scene.fresh[0][0, 0]
    for chosen in world.selections.top_k[:, 0, 0].long():
        assert len(chosen.unique()) == TOP_K
        assert int(chosen.min()) >= 0
        assert int(chosen.max()) < ROWS
        assert int((slot_of_row[chosen] < 0).sum()) == 51
    assert len(world.selections.source_rows.unique()) == 3 * 51
    assert int(world.selections.source_rows.max()) < ROWS


def test_the_prepared_state_is_one_that_decoding_could_have_left() -> None:
    scene = World(0).scene
    _, _, ages, tallies = (array[0, 0] for array in scene.fresh)
    newest = sum(int(word) % (1 << 32) & 1 << bit != 0 for word in ages[:, 0] for bit in range(32))
    assert newest == int(tallies[0])
    assert 0 < newest < HOT_ROWS // 4


def test_a_wrong_byte_is_found() -> None:
    world = World(10)
    world.swap_in()
    place = int(world.found[0, 7])
    world.hot[place // SLOTS * PAGE_BYTES // 8 + place % SLOTS * 72 + 3] ^= 1 << 40
    assert world.findings() == ("", "1 of 512 rows have wrong bytes")


def test_a_wrong_place_is_found() -> None:
    world = World(10)
    world.swap_in()
    world.found[0, 7] = world.found[0, 8]
    state, content = world.findings()
    assert "two rows share a slot" in state
    assert content


def test_a_step_that_loads_too_much_is_found() -> None:
    world = World(10)
    world.swap_in(1)
    world.swap_in(0)
    state, _ = world.findings()
    assert "other slots changed than rows were missing" in state
    assert "loads are counted wrongly" in state


def test_restoring_undoes_a_swap_in() -> None:
    world = World(256)
    world.swap_in()
    world.scene.restore(1)
    for now, fresh in zip(world.scene.now, world.scene.fresh, strict=True):
        assert torch.equal(now, fresh)


def test_large_calls_have_fewer_layers() -> None:
    assert [layers_for(64, misses) for misses in (0, 51, 256, 512)] == [8, 8, 8, 4]
    assert layers_for(256, 512) == 2

"""The scene of the swap-in benchmark: requests after long decoding, their hot buffers, and a host pool of 4.57 GiB.

A request has 32,768 rows in 512 scattered host pages. Hot slots hold random rows of random age. A selection is `misses` rows
that are not resident and otherwise resident ones, shuffled; no row is in the ring.
"""

from dataclasses import dataclass

import torch

from kvbridge.kernels.swap_in import LayerMemory, Step, SwapInShape, SwapInState
from tests.bench.gpu.timing import GATHER_SHAPES, PAGE_BYTES, ROW_BYTES, SLOTS, Gather, row_words

ROWS = 32_768
"""Rows of a request: 128k tokens."""
PAGES = ROWS // SLOTS
MOST_BATCH = 256
MOST_LAYERS = 8
POOL_PAGES = MOST_BATCH * PAGES
RING_ROWS = 2 * SLOTS
SETS = 3
AGE_SHARES = (1 / 8, 7 / 32, 7 / 32, 7 / 32, 7 / 32)
"""Shares of the slots, by the generation of their last use; the last share is older than all that are remembered."""
CHECKED_ROWS = 65_536


def layers_for(batch: int, misses: int) -> int:
    call_bytes = batch * misses * ROW_BYTES
    if call_bytes >= 50e6:
        return 2
    return 4 if call_bytes >= 12e6 else MOST_LAYERS


def misses_of(top_k: int, miss_percent: int) -> int:
    return round(top_k * miss_percent / 100)


@dataclass
class Selections:
    top_k: torch.Tensor
    """[sets, layers, batch, k]: rows of the request."""
    source_rows: torch.Tensor
    """[sets, layers, batch * misses]: the missing ones as page * 64 + slot of the layer's host region."""
    target_rows: torch.Tensor
    """[layers, batch * misses]: physical rows that they may be written to."""


class SwapInModel:
    """One batch size and hot size. The arrays of the present state are changed by swap-ins; `restore` undoes that."""

    def __init__(
        self, *, batch: int, hot_rows: int, pool: int, hot: int, where: torch.device | None = None, seed: int = 1
    ):
        """`pool`: address of the host pool; `hot`: of memory for 8 layers (`hot_bytes`) on the device `where` (cuda:0)."""
        self.batch, self.hot_rows = batch, hot_rows
        self._where = where or torch.device("cuda", 0)
        self._random = torch.Generator(device=self._where).manual_seed(seed)
        self._make_pages()
        self._make_state()
        region = batch * PAGES * PAGE_BYTES
        regions = min(MOST_LAYERS, MOST_BATCH // batch)
        hot_layer = batch * self.rows_each // SLOTS * PAGE_BYTES
        self.memory = [
            LayerMemory(
                host_addresses=(pool + layer % regions * region,),
                pages_per_extent=batch * PAGES,
                host_stride_bytes=PAGE_BYTES,
                hot_address=hot + layer * hot_layer,
                hot_stride_bytes=PAGE_BYTES,
            )
            for layer in range(MOST_LAYERS)
        ]
        self.request_slots = torch.arange(batch, dtype=torch.int32, device=self._where)
        self.row_counts = torch.full((batch,), ROWS, dtype=torch.int32, device=self._where)
        self.step = Step(batch, self.request_slots.data_ptr(), self.row_counts.data_ptr())

    @property
    def host_pages(self) -> torch.Tensor:
        """[batch, pages of a request], int64: where its pages begin, in pages after the layer's first one."""
        return self.pages[:, :, 0].long()

    @property
    def host_words(self) -> int:
        """Eight-byte words from a layer's first host page to the end of its last one."""
        return self.batch * PAGES * PAGE_BYTES // 8

    @property
    def rows_each(self) -> int:
        return self.hot_rows + RING_ROWS

    def facts(self, top_k: int) -> tuple[SwapInShape, SwapInState, list[LayerMemory]]:
        slot_of_row, row_of_slot, ages, tallies = self.now
        state = SwapInState(
            requests=self.batch,
            slot_of_row=slot_of_row.data_ptr(),
            row_of_slot=row_of_slot.data_ptr(),
            ages=ages.data_ptr(),
            tallies=tallies.data_ptr(),
            pages=self.pages.data_ptr(),
            ring_begin=self.ring_begin.data_ptr(),
        )
        shape = SwapInShape(hot_rows=self.hot_rows, ring_rows=RING_ROWS, max_rows=ROWS, top_k=top_k)
        return shape, state, self.memory

    def restore(self, layers: int) -> None:
        for array, fresh in zip(self.now, self.fresh, strict=True):
            array[:layers].copy_(fresh[:layers])

    def select(self, *, top_k: int, misses: int, layers: int) -> Selections:
        hits = top_k - misses
        turn = torch.arange(SETS, device=self._where)[:, None]
        hit_at = (turn * hits + torch.arange(hits, device=self._where)) % self.hot_rows
        miss_at = self.hot_rows + turn * misses + torch.arange(misses, device=self._where)
        chosen = []
        for which in range(SETS):
            slots = self._some_slots[:layers, :, hit_at[which]]
            resident = torch.gather(self._order[:layers], 2, slots)
            rows = torch.cat([resident, self._order[:layers, :, miss_at[which]]], dim=2)
            shuffle = self._shuffles(layers, top_k)
            chosen.append(torch.gather(rows, 2, shuffle))
        missing = torch.stack([self._order[:layers, :, miss_at[which]] for which in range(SETS)])
        page_ids = self.host_pages[None, None].expand(SETS, layers, -1, -1)
        source = torch.gather(page_ids, 3, missing // SLOTS) * SLOTS + missing % SLOTS
        first = torch.arange(self.batch, device=self._where)[None, :, None] * self.rows_each
        target = self._some_slots[:layers, :, :misses] + first
        return Selections(
            torch.stack(chosen).int().contiguous(),
            source.int().reshape(SETS, layers, -1).contiguous(),
            target.int().reshape(layers, -1).contiguous(),
        )

    def gather(self, selections: Selections, layer: int, source_rows: torch.Tensor) -> Gather:
        """The bare gather of a layer's missing rows; `source_rows` [layers, n] is where they are listed."""
        memory = self.memory[layer]
        return Gather(
            source_rows=source_rows[layer].data_ptr(),
            target_rows=selections.target_rows[layer].data_ptr(),
            count=source_rows.shape[1],
            source=memory.host_addresses[0],
            target=memory.hot_address,
            page_bytes=PAGE_BYTES,
        )

    def load_residents(self, layers: int, stream: int) -> None:
        """Enqueue: the hot slots hold the rows that the fresh state says, byte for byte."""
        first = torch.arange(self.batch, device=self._where)[:, None] * self.rows_each
        places = (first + torch.arange(self.hot_rows, device=self._where)).int().flatten().contiguous()
        page_ids = self.host_pages
        for layer in range(layers):
            rows = self._order[layer, :, : self.hot_rows]
            source = (torch.gather(page_ids, 1, rows // SLOTS) * SLOTS + rows % SLOTS).int().flatten().contiguous()
            memory = self.memory[layer]
            filling = Gather(
                source_rows=source.data_ptr(),
                target_rows=places.data_ptr(),
                count=len(places),
                source=memory.host_addresses[0],
                target=memory.hot_address,
                page_bytes=PAGE_BYTES,
            )
            filling.launch(self._where.index, stream, GATHER_SHAPES[0])
            torch.cuda.synchronize(self._where)  # `source` must live until then

    def _make_pages(self) -> None:
        ids = torch.randperm(self.batch * PAGES, generator=self._random, device=self._where).reshape(self.batch, PAGES)
        ranks = ids.argsort(dim=1).argsort(dim=1)
        self.pages = torch.stack([ids, ranks], dim=2).int().contiguous()
        self.ring_begin = torch.full((self.batch,), ROWS, dtype=torch.int32, device=self._where)

    def _make_state(self) -> None:
        """Slot s of a layer and request holds row `_order[layer, request, s]`; the rest of `_order` is on the host only."""
        orders = [
            torch.rand((self.batch, ROWS), generator=self._random, device=self._where).argsort(dim=1)
            for _ in range(MOST_LAYERS)
        ]
        self._order = torch.stack(orders)
        self._some_slots = self._shuffles(MOST_LAYERS, self.hot_rows)
        slots = torch.arange(self.hot_rows, device=self._where, dtype=torch.int16)
        slot_of_row = torch.full((MOST_LAYERS, self.batch, ROWS), -1, dtype=torch.int16, device=self._where)
        resident = self._order[:, :, : self.hot_rows]
        slot_of_row.scatter_(2, resident, slots.expand_as(resident))
        ages, recent = self._make_ages()
        tallies = torch.zeros((MOST_LAYERS, self.batch, 4), dtype=torch.int32, device=self._where)
        tallies[:, :, 0] = recent
        self.fresh = (slot_of_row, resident.int().contiguous(), ages, tallies)
        self.now = tuple(array.clone() for array in self.fresh)

    def _make_ages(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bit planes [layers, batch, words, 4], and how many slots the present generation has."""
        shape = (MOST_LAYERS, self.batch, self.hot_rows)
        drawn = torch.rand(shape, generator=self._random, device=self._where)
        limits = torch.tensor(AGE_SHARES, device=self._where).cumsum(0)[:-1]
        age = torch.bucketize(drawn, limits)
        weights = torch.ones(32, dtype=torch.int64, device=self._where) << torch.arange(32, device=self._where)
        planes = [
            ((age == plane).reshape(*shape[:2], -1, 32).long() * weights).sum(dim=3)
            for plane in range(len(AGE_SHARES) - 1)
        ]
        words = torch.stack(planes, dim=3)
        signed = torch.where(words >= 1 << 31, words - (1 << 32), words).int().contiguous()
        return signed, (age == 0).sum(dim=2).int()

    def _shuffles(self, layers: int, length: int) -> torch.Tensor:
        shape = (layers, self.batch, length)
        return torch.rand(shape, generator=self._random, device=self._where).argsort(dim=2)


def hot_bytes(hot_rows: int) -> int:
    return MOST_LAYERS * MOST_BATCH * (hot_rows + RING_ROWS) // SLOTS * PAGE_BYTES


def wrong_bytes(
    scene: SwapInModel, *, selected: torch.Tensor, found: torch.Tensor, pool: torch.Tensor, hot: torch.Tensor
) -> str:
    """Say how many rows are not what the host has; empty when none. `pool`, `hot`: int64 words of a layer's regions."""
    rows = selected.long()
    host_rows = (torch.gather(scene.host_pages, 1, rows // SLOTS) * SLOTS + rows % SLOTS).flatten()
    places = found.long().flatten()
    count = 0
    for first in range(0, len(places), CHECKED_ROWS):
        part = slice(first, first + CHECKED_ROWS)
        count += int((row_words(pool, host_rows[part]) != row_words(hot, places[part])).any(dim=1).sum())
    return f"{count} of {len(places)} rows have wrong bytes" if count else ""

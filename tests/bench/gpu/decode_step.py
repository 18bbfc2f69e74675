"""A decode step that reads what DeepSeek-V4-Flash reads, with the hot buffer of kvbridge or with everything on the device.

Owns: the memory that stands for weights and caches, and the order of a layer. Must not know: which rows are selected, time.

A layer: projections (their weights are read, by a matrix product); the indexer (all keys of all requests are read); the new rows
are appended and the selected ones swapped in; attention (the rows of the choice, those of the window, all rows of a C128 layer are
read); experts (their weights are read, by matrix products with as many tokens as they would get). Reading is all that stands for
the indexer and for attention, so a real step takes longer, and what swapping in adds to it is a smaller part.

*Overlapped*, indexer and swap-in of a layer run beside its projections and what attention reads without a choice, on a stream of
their own. On a processor everything is in order, and the hot buffer's reference runs: for tests of this file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from kvbridge.sparse import SparseCache
from tests.bench.gpu import step_model
from tests.bench.gpu.bare import BenchSource
from tests.bench.gpu.step_model import C4, LayerReads

READ_BLOCKS, READ_THREADS = 528, 512
SOURCE = BenchSource("step_kernels")


@dataclass(frozen=True)
class Weights:
    """Of one layer; every layer reads them, more than a cache holds."""

    projection: torch.Tensor
    """[hidden, numbers]; bf16 in place of 8 bits: the same bytes."""
    experts: torch.Tensor
    """[experts of this GPU, hidden, numbers]; bf16 in place of 4 bits."""

    @classmethod
    def on(cls, where: torch.device, *, small: bool = False) -> Weights:
        """Make them; `small` ones are for tests."""
        hidden, count = (16, 2) if small else (step_model.HIDDEN, step_model.EXPERTS // step_model.GPUS)
        of_projection = 8 if small else step_model.PROJECTION_BYTES // 2 // hidden // 8 * 8
        of_expert = 8 if small else step_model.EXPERT_BYTES // 2 // hidden
        made = [torch.zeros(hidden, of_projection), torch.zeros(count, hidden, of_expert)]
        return cls(*(weight.to(where, torch.bfloat16) for weight in made))


@dataclass(frozen=True)
class Selected:
    """Where the selected rows come from: a hot buffer, or pages on the device that hold all rows."""

    rows: torch.Tensor
    """int32 [C4 layers, batch, k]: the choice of the step, written before it."""
    cache: SparseCache | None
    pages: torch.Tensor | None
    """uint8 [pages, page_bytes] of one layer, without a cache: request after request, row after row."""


class DecodeStep:
    """One batch. `enqueue` is captured into a graph; nothing in it allocates or waits."""

    def __init__(
        self, reads: tuple[LayerReads, ...], selected: Selected, weights: Weights, *, overlapped: bool
    ) -> None:
        self._reads, self._selected, self._weights = reads, selected, weights
        self.batch = selected.rows.shape[1]
        self._where = selected.rows.device
        self.overlapped = overlapped
        self._side = torch.cuda.Stream(self._where) if overlapped and self._where.type == "cuda" else None
        longest = max(max(layer.indexer, layer.whole) for layer in reads) * self.batch
        self._cached = torch.zeros(longest // 16 * 16, dtype=torch.uint8, device=self._where)
        self.found = torch.full_like(selected.rows, -1)
        self._new_rows = torch.zeros((self.batch, C4.row_bytes), dtype=torch.uint8, device=self._where)
        self._kept = torch.zeros(1, dtype=torch.int32, device=self._where)
        hidden, experts = weights.projection.shape[0], weights.experts.shape[0]
        tokens = step_model.expert_tokens(self.batch)
        self._tokens = torch.zeros((self.batch, hidden), dtype=torch.bfloat16, device=self._where)
        self._routed = torch.zeros((experts, tokens, hidden), dtype=torch.bfloat16, device=self._where)
        self._projected = self._tokens @ weights.projection
        self._computed = torch.bmm(self._routed, weights.experts)

    def enqueue(self) -> None:
        """All layers, on torch's current stream."""
        selecting = [layer.number for layer in self._reads if layer.indexer]
        for layer in self._reads:
            position = selecting.index(layer.number) if layer.indexer else -1
            with self._beside(layer):
                if layer.indexer:
                    self._select(layer, position)
            torch.mm(self._tokens, self._weights.projection, out=self._projected)
            self._read_all(self.batch * layer.whole)
            self._join(layer)
            if layer.indexer:
                self._attend(layer, position)
            torch.bmm(self._routed, self._weights.experts, out=self._computed)

    @contextlib.contextmanager
    def _beside(self, layer: LayerReads) -> Iterator[None]:
        if self._side is None or not layer.indexer:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._where))
        with torch.cuda.stream(self._side):
            yield

    def _join(self, layer: LayerReads) -> None:
        if self._side is not None and layer.indexer:
            torch.cuda.current_stream(self._where).wait_stream(self._side)

    def _select(self, layer: LayerReads, position: int) -> None:
        self._read_all(self.batch * layer.indexer)
        cache = self._selected.cache
        if cache is not None:
            cache.append(layer.number, self._new_rows)
            cache.swap_in(layer.number, self._selected.rows[position], self.found[position])

    def _attend(self, layer: LayerReads, position: int) -> None:
        cache, pages = self._selected.cache, self._selected.pages
        if cache is not None:
            self._read_rows(self.found[position], cache.hot_pages(layer.number))
        else:
            assert pages is not None
            self._read_rows(self._selected.rows[position], pages)

    def _read_all(self, length_bytes: int) -> None:
        if self._where.type == "cpu":
            self._kept += int(self._cached[:length_bytes].sum())
            return
        arguments = (self._cached.data_ptr(), length_bytes // 16, self._kept.data_ptr())
        self._launch("read_all", arguments)

    def _read_rows(self, rows: torch.Tensor, pages: torch.Tensor) -> None:
        if self._where.type == "cpu":
            self._kept += int(pages[rows.flatten().long() // C4.slots_per_page].sum())
            return
        count = np.int32(rows.numel())
        self._launch("read_rows", (rows.data_ptr(), count, pages.data_ptr(), pages.stride(0), self._kept.data_ptr()))

    def _launch(self, name: str, arguments: tuple[object, ...]) -> None:
        from kvbridge.kernels.cuda.programs import kernel

        stream = torch.cuda.current_stream(self._where).cuda_stream
        made = kernel(SOURCE, name, self._where.index)
        made.launch(arguments, grid=READ_BLOCKS, block=READ_THREADS, stream=stream)

"""What sparse decode buys: how many requests fit into a fixed memory, and tokens a second, beside everything on the device.

Owns: the cases and their timing. The step is `decode_step`, the fit `step_model`, the choice of rows `selection_model`.

In each case a hot buffer has been used until it is as full as it gets; then steps are timed one by one, as a CUDA graph between two
events, and rows that were swapped in last are compared with the host's, byte by byte. What the host does for a step (`begin_step`,
`end_step`) is timed by itself. Host pages of requests are scattered over one pool, which requests share where there are too many.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch

from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.sparse import SparseCache
from tests.bench.gpu import step_model
from tests.bench.gpu.decode_step import DecodeStep, Selected, Weights
from tests.bench.gpu.memory import PAGE_BYTES, SLOTS, fill_random, host_memory, row_words, tensor_at
from tests.bench.gpu.recorder import Recorder
from tests.bench.gpu.selection_model import Batch, RecordedSelections, SelectionsAtARate
from tests.bench.gpu.step_model import C4, TOP_K

POOL_BYTES = 8 << 30
CONTEXTS = (32_768, 131_072, 524_288)
BUDGET_TOKENS, BUDGET_BATCH = 131_072, 64
NEW_ROWS = {"0 %": 0, "2 %": 10, "10 %": 51}
RECORDED = "recorded"
RECORDINGS = {32_768: 2_000}
"""The recording for a context; the longer one for all others."""
REPLAYS = 15
CHECKED_REQUESTS = 4


class Selections(Protocol):
    """Which rows are selected, step after step."""

    warm_up_steps: int

    def step(self, number: int) -> torch.Tensor:
        """Rows, int32 [layers, requests, k]."""


def selections(name: str, batch: Batch) -> Selections:
    """Those of a name."""
    if name == RECORDED:
        return RecordedSelections(batch, RECORDINGS.get(batch.rows * C4.tokens_per_row, 8_000))
    return SelectionsAtARate(batch, NEW_ROWS[name])


def run(recorder: Recorder, *, quick: bool) -> None:
    """The budget's case first, then what fits at each context."""
    torch.cuda.set_device(0)
    where, replays = torch.device("cuda", 0), 5 if quick else REPLAYS
    pool_bytes = POOL_BYTES // 8 if quick else POOL_BYTES
    with host_memory(pool_bytes) as mapping, torch.cuda.stream(torch.cuda.Stream()):
        fill_random(mapping.address, pool_bytes, 0)
        bench = Bench(recorder, Weights.on(where), HostPages(mapping.address, pool_bytes // PAGE_BYTES), replays)
        bench.on_device(BUDGET_TOKENS, BUDGET_BATCH)
        bench.sparse(BUDGET_TOKENS, BUDGET_BATCH, (*NEW_ROWS, RECORDED), overlapped=(False, True))
        for tokens in CONTEXTS[:1] if quick else CONTEXTS:
            whole, most = (step_model.fit(tokens, sparse=sparse) for sparse in (False, True))
            bench.on_device(tokens, whole)
            bench.sparse(tokens, whole, ("2 %",))
            bench.sparse(tokens, most, ("2 %", RECORDED))


@dataclass(frozen=True)
class HostPages:
    """The host pool: pages of random bytes."""

    address: int
    count: int

    def regions(self, pages: int) -> list[Region]:
        """A region of at most so many pages for each layer; those of different layers begin at different pages."""
        each = min(pages, self.count // 2)
        room = self.count - each
        firsts = [position * room // len(C4.layers) for position in range(len(C4.layers))]
        return [
            Region(
                component=C4.kind,
                layer=layer,
                space=IndexSpace.HOST,
                memory=MemoryKind.DRAM,
                extent_addresses=(self.address + first * PAGE_BYTES,),
                pages_per_extent=each,
                page_count=each,
                page_bytes=PAGE_BYTES,
                page_stride_bytes=PAGE_BYTES,
            )
            for layer, first in zip(C4.layers, firsts, strict=True)
        ]


@dataclass
class SparseBatch:
    """A hot buffer with a batch of requests in it, all of one length."""

    cache: SparseCache
    regions: list[Region]
    pages: np.ndarray
    """int32 [requests, pages]: host pages."""
    rows: int
    host_s: list[float] = field(default_factory=list)

    @classmethod
    @contextmanager
    def open(cls, host: HostPages, tokens: int, batch: int, where: torch.device) -> Iterator[SparseBatch]:
        """Make the hot buffer and admit everybody."""
        rows = tokens // C4.tokens_per_row
        each = rows // SLOTS
        regions = host.regions(batch * each)
        count = regions[0].page_count
        order = np.random.default_rng(batch).permutation(count).astype(np.int32)
        pages = order[(np.arange(batch * each) % count).reshape(batch, each)]
        with SparseCache(step_model.settings(tokens, batch), C4, regions, where) as cache:
            for slot in range(batch):
                cache.admit(slot, pages[slot], rows)
            yield cls(cache, regions, pages, rows)

    def begin(self) -> None:
        """What the host does before a step, timed."""
        begun_s = time.perf_counter()
        self.cache.begin_step([(slot, self.rows) for slot in range(len(self.pages))])
        self.host_s.append(time.perf_counter() - begun_s)

    def end(self) -> None:
        """And behind it."""
        begun_s = time.perf_counter()
        self.cache.end_step()
        self.host_s[-1] += time.perf_counter() - begun_s

    def tallies(self) -> tuple[int, int]:
        """Rows hit and rows loaded so far."""
        _, hits, loaded, _ = self.cache.memory.tallies.sum(dim=(0, 1)).tolist()
        return hits, loaded

    def wrong(self, selected: torch.Tensor, found: torch.Tensor) -> str:
        """Compare rows of the last step, [layers, requests, k], of some requests with the host's; empty when all are right."""
        wrong = count = 0
        some = list(range(min(CHECKED_REQUESTS, len(self.pages))))
        tables = torch.from_numpy(self.pages[some].astype(np.int64)).to(selected.device)
        for position in sorted({0, len(self.regions) // 2, len(self.regions) - 1}):
            region = self.regions[position]
            chosen = selected[position, some].long()
            host_rows = torch.gather(tables, 1, chosen // SLOTS) * SLOTS + chosen % SLOTS
            pool = _words(region.extent_addresses[0], region.page_count * PAGE_BYTES // 8, selected.device)
            right = row_words(pool, host_rows.flatten())
            held = self.cache.rows(region.layer, found[position, some]).reshape(-1, C4.row_bytes)
            wrong += int((held.contiguous().view(torch.int64) != right).any(dim=1).sum())
            count += len(right)
        return f"{wrong} of {count} rows have wrong bytes" if wrong else ""


class Bench:
    """Measures cases one after another on torch's current stream."""

    def __init__(self, recorder: Recorder, weights: Weights, host: HostPages, replays: int) -> None:
        self._recorder, self._weights, self._host, self._replays = recorder, weights, host, replays
        self._where = weights.projection.device

    def on_device(self, tokens: int, batch: int) -> None:
        """Every row is on the device: nothing is swapped in."""
        rows = tokens // C4.tokens_per_row
        made = Batch(len(C4.layers), batch, rows, TOP_K, self._where)
        choice = selections("2 %", made)
        pages = torch.zeros((batch * rows // SLOTS, PAGE_BYTES), dtype=torch.uint8, device=self._where)
        now = torch.zeros((made.layers, batch, TOP_K), dtype=torch.int32, device=self._where)
        step = DecodeStep(step_model.layer_reads(tokens), Selected(now, None, pages), self._weights, overlapped=False)
        first = (torch.arange(batch, device=self._where, dtype=torch.int32) * rows)[:, None]
        run = self._runner(step)
        took_ms = []
        for number in range(self._replays + choice.warm_up_steps):
            now.copy_(choice.step(number) + first)
            took_ms.append(run())
        self._record(tokens, batch, took_ms[choice.warm_up_steps :], way="device", overlapped=False, selections="")
        del step, run, pages
        self._forget()

    def _forget(self) -> None:
        """Give the memory of the last case back, so that the next one has all of it."""
        if self._where.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def sparse(self, tokens: int, batch: int, names: Sequence[str], *, overlapped: Sequence[bool] = (True,)) -> None:
        """The hot buffer, with some choices of rows, in order and overlapped."""
        with SparseBatch.open(self._host, tokens, batch, self._where) as held:
            now = torch.zeros((len(C4.layers), batch, TOP_K), dtype=torch.int32, device=self._where)
            made = Batch(len(C4.layers), batch, held.rows, TOP_K, self._where)
            for beside in overlapped:
                step = DecodeStep(
                    step_model.layer_reads(tokens), Selected(now, held.cache, None), self._weights, overlapped=beside
                )
                now.copy_(selections(names[0], made).step(0))
                held.begin()  # so that what is captured finds a step
                run = self._runner(step)
                held.end()
                for name in names:
                    self._sparse_case(held, step, selections(name, made), run, now=now, name=name)
                del step, run
        self._forget()

    def _sparse_case(
        self, held: SparseBatch, step: DecodeStep, choice: Selections, run: Any, *, now: torch.Tensor, name: str
    ) -> None:
        took_ms: list[float] = []
        hits = loaded = 0
        for number in range(choice.warm_up_steps + self._replays):
            if number == choice.warm_up_steps:
                hits, loaded = held.tallies()
                held.host_s.clear()
            now.copy_(choice.step(number))
            held.begin()
            took_ms.append(run())
            held.end()
        hit, load = held.tallies()
        missing = (load - loaded) / max(1, load - loaded + hit - hits)
        self._record(
            held.rows * C4.tokens_per_row,
            len(held.pages),
            took_ms[choice.warm_up_steps :],
            way="sparse",
            overlapped=step.overlapped,
            selections=name,
            missing_percent=100 * missing,
            host_us=1e6 * median(held.host_s),
            wrong=held.wrong(now, step.found),
        )

    def _runner(self, step: DecodeStep) -> Any:
        """How the step is run once and timed, in milliseconds: as a graph on a GPU."""
        if self._where.type == "cpu":
            return lambda: _timed_ms(step.enqueue)
        step.enqueue()  # libraries make what they need
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream):
            step.enqueue()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

        def run() -> float:
            marks[0].record()
            graph.replay()
            marks[1].record()
            torch.cuda.synchronize()
            return float(marks[0].elapsed_time(marks[1]))

        return run

    def _record(self, tokens: int, batch: int, took_ms: Sequence[float], **facts: Any) -> None:
        sparse = facts["way"] == "sparse"
        taken = step_model.request_bytes(tokens, sparse=sparse)
        ms = median(took_ms)
        self._recorder.case(
            tokens=tokens,
            batch=batch,
            fits=batch == step_model.fit(tokens, sparse=sparse),
            device_bytes=taken.device,
            host_bytes=taken.host,
            ms=ms,
            least_ms=min(took_ms),
            most_ms=max(took_ms),
            tokens_s=1e3 * batch / ms,
            **facts,
        )


def _timed_ms(work: Any) -> float:
    begun_s = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - begun_s)


def _words(address: int, count: int, where: torch.device) -> torch.Tensor:
    """Host memory as int64 words that a device, or the processor, reads."""
    if where.type == "cuda":
        return tensor_at(address, count, torch.int64, where.index)
    from kvbridge.kernels.reference import array_at

    return torch.from_numpy(array_at(address, (count,), np.int64))

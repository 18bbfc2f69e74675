"""Device time of work, by events in CUDA graphs or around calls; memory and rows that are measured; a bare gather; budgets."""

import json
import math
import os
import secrets
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from cuda.bindings import runtime as library

from kvbridge.kernels.cuda import runtime
from kvbridge.kernels.cuda.programs import Kernel, Source, kernel
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping
from tests.bench.output import cases_table, met, table

Work = Callable[[], None]


def checked(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the CUDA runtime answered. Raises RuntimeError when it failed."""
    code, *values = answer
    if int(code):
        raise RuntimeError(f"CUDA: {library.cudaGetErrorName(code)[1].decode()}")
    return values[0] if values else None


class TimedGraph:
    """A captured piece of work between two events; each `run_ms` replays it once and says how long it took."""

    def __init__(self, device: int, stream: int, work: Work) -> None:
        """`work` enqueues on `stream` only; it is called once, under capture, and does not run then."""
        runtime.use(device)
        self._device = device
        self._stream = stream
        self._events = [checked(library.cudaEventCreateWithFlags(0)) for _ in range(2)]
        checked(library.cudaStreamBeginCapture(stream, library.cudaStreamCaptureMode.cudaStreamCaptureModeRelaxed))
        try:
            self._mark(0)
            work()
            self._mark(1)
        finally:
            graph = checked(library.cudaStreamEndCapture(stream))
        self._graph = checked(library.cudaGraphInstantiate(graph, 0))
        checked(library.cudaGraphDestroy(graph))

    def run_ms(self) -> float:
        """Replay once, after what is on the stream already, and wait."""
        runtime.use(self._device)
        checked(library.cudaGraphLaunch(self._graph, self._stream))
        checked(library.cudaStreamSynchronize(self._stream))
        return float(checked(library.cudaEventElapsedTime(*self._events)))

    def close(self) -> None:
        checked(library.cudaGraphExecDestroy(self._graph))
        for event in self._events:
            checked(library.cudaEventDestroy(event))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark(self, which: int) -> None:
        checked(library.cudaEventRecordWithFlags(self._events[which], self._stream, library.cudaEventRecordExternal))


def event_us(device: int, stream: int, work: Work, *, replays: int = 21, before: Callable[[int], None]) -> float:
    """Call `work`, which no graph can hold, and return microseconds a call on the device: the median of all calls but the first."""
    runtime.use(device)
    begin, end = (checked(library.cudaEventCreateWithFlags(0)) for _ in range(2))
    took_ms = []
    for replay in range(replays + 1):
        before(replay)
        checked(library.cudaEventRecord(begin, stream))
        work()
        checked(library.cudaEventRecord(end, stream))
        checked(library.cudaStreamSynchronize(stream))
        took_ms.append(float(checked(library.cudaEventElapsedTime(begin, end))))
    for event in (begin, end):
        checked(library.cudaEventDestroy(event))
    return statistics.median(took_ms[1:]) * 1e3


def graph_us(
    device: int, stream: int, work: Work, *, replays: int = 21, calls: int = 1, before: Callable[[int], None]
) -> float:
    """Replay captured `work` of `calls` calls, each after an uncounted `before(replay)`; return the median us of a call."""
    with TimedGraph(device, stream, work) as graph:
        took_ms = []
        for replay in range(replays + 1):
            before(replay)
            took_ms.append(graph.run_ms())
    return statistics.median(took_ms[1:]) * 1e3 / calls


GATHER_SHAPES = ((132, 256), (132, 1024))
"""Blocks and threads of the gather; the better of the two is quoted."""


@dataclass(frozen=True)
class BenchSource(Source):
    def text(self) -> str:
        return (Path(__file__).parent / f"{self.name}.cu").read_text()


SOURCE = BenchSource("bare_kernels")


@cache
def _kernel(name: str, device: int) -> Kernel:
    return kernel(SOURCE, name, device)


@dataclass(frozen=True)
class Gather:
    """C4 rows from one memory to another: addresses of int32 row numbers (page * 64 + slot) and of the first pages."""

    source_rows: int
    target_rows: int
    count: int
    source: int
    target: int
    page_bytes: int

    def launch(self, device: int, stream: int, shape: tuple[int, int]) -> None:
        """Gather once; `shape` is blocks and threads."""
        given = (self.source_rows, self.target_rows, np.int32(self.count), self.source, self.target, self.page_bytes)
        _kernel("bare_gather", device).launch(given, grid=shape[0], block=shape[1], stream=stream)


PAGE_BYTES = 37_440
"""A page of C4 rows: 64 values of 576 bytes, 64 scales of 8, padding."""
SLOTS = 64
ROW_BYTES = 584
VALUE_BYTES = 576
_TYPES = {torch.uint8: "|u1", torch.int32: "<i4", torch.int64: "<i8"}
_FLUSH_BYTES = 256 << 20


class _Memory:
    """An address in the form that torch takes over without a copy."""

    def __init__(self, address: int, count: int, dtype: torch.dtype) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (count,),
            "strides": None,
            "typestr": _TYPES[dtype],
            "version": 3,
        }


def tensor_at(address: int, count: int, dtype: torch.dtype, device: int) -> torch.Tensor:
    """See memory that a device reaches, its own or registered host memory, as a tensor of that device."""
    return torch.as_tensor(_Memory(address, count, dtype), device=torch.device("cuda", device))


@contextmanager
def host_memory(length_bytes: int, device: int = 0) -> Iterator[SharedMapping]:
    """Shared memory as the host pool's, registered with CUDA, without a name that could outlive us."""
    name = f"kvbridge-bench-{os.getpid()}-{secrets.token_hex(4)}"
    with SharedMapping.create(Path(DEFAULT_DIRECTORY), name, length_bytes) as mapping:
        mapping.path.unlink()
        runtime.register_host(mapping.address, length_bytes, device=device)
        try:
            yield mapping
        finally:
            runtime.synchronize(device)
            runtime.unregister_host(mapping.address)


@contextmanager
def device_memory(length_bytes: int, device: int = 0) -> Iterator[int]:
    address = runtime.allocate(device, length_bytes)
    try:
        yield address
    finally:
        runtime.free(device, address)


def fill_random(address: int, length_bytes: int, device: int, *, seed: int = 0, chunk_bytes: int = 256 << 20) -> None:
    """Write random bytes, made on the device, no two stretches alike, and wait. Length in multiples of 8."""
    generator = torch.Generator(device=f"cuda:{device}").manual_seed(seed)
    words = tensor_at(address, length_bytes // 8, torch.int64, device)
    each = chunk_bytes // 8
    stream = torch.cuda.current_stream(device).cuda_stream
    made = torch.empty(min(each, len(words)), dtype=torch.int64, device=f"cuda:{device}")
    for first in range(0, len(words), each):
        part = words[first : first + each]
        made.random_(generator=generator)
        runtime.copy(part.data_ptr(), made.data_ptr(), 8 * len(part), device=device, stream=stream)
    runtime.synchronize(device)


class CacheFlush:
    def __init__(self, device: int) -> None:
        self._device = device
        self._bytes = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=f"cuda:{device}")

    def enqueue(self, stream: int) -> None:
        runtime.fill(self._device, self._bytes.data_ptr(), _FLUSH_BYTES, 0, stream=stream)


def row_words(pages: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows (int64, page * 64 + slot) of C4 pages (int64 words) as int64 [rows, 73]: 72 words of value, one of scale."""
    each = PAGE_BYTES // 8
    page, slot = rows // SLOTS, rows % SLOTS
    values = page * each + slot * (VALUE_BYTES // 8)
    scales = page * each + SLOTS * (VALUE_BYTES // 8) + slot
    offsets = torch.arange(VALUE_BYTES // 8, device=rows.device)
    return torch.cat([pages[values[:, None] + offsets], pages[scales][:, None]], dim=1)


KEYS = ("hot_rows", "top_k", "batch", "miss_percent")
SWAP_LIMITS_US = {
    (4096, 512, 1, 0): 4,
    (4096, 512, 64, 0): 5,
    (4096, 512, 1, 2): 7,
    (4096, 512, 16, 2): 9,
    (4096, 512, 64, 2): 26,
    (4096, 512, 1, 100): 14,
    (4096, 2048, 1, 100): 36,
}
"""By `KEYS`: microseconds of one swap-in."""
MOST_OVER_GATHER = 1.1
LEAST_MEAN = 2.0
LEAST_OF_LINK = 0.85
Case = dict[str, Any]
Row = tuple[str, float, str, str]
"""Name, measured value, budget, and whether it is met."""


def with_budgets(cases: Sequence[Case], rows: Iterable[Row]) -> str:
    return f"{cases_table(cases)}\n{table(('budget', 'measured', 'limit', ''), rows)}"


def at_most(what: str, measured: float, limit: float, unit: str) -> Row:
    return what, measured, f"<= {limit:g} {unit}", met(measured <= limit)


def at_least(what: str, measured: float, limit: float) -> Row:
    return what, measured, f">= {limit:g} x", met(measured >= limit)


def of_swap_ins(cases: Sequence[Case]) -> Iterator[Row]:
    for case in cases:
        if limit := SWAP_LIMITS_US.get(tuple(case[key] for key in KEYS)):
            what = f"swap-in, k {case['top_k']}, batch {case['batch']}, {case['miss_percent']} % missing"
            yield at_most(what, case["us"], limit, "us")
    over = [case["us"] / case["bare_gather_us"] for case in cases if case["batch"] >= 16 and case["miss_percent"] >= 10]
    if over:
        what = "swap-in, batch >= 16, >= 10 % missing, over the bare gather: the worst"
        yield at_most(what, max(over), MOST_OVER_GATHER, "x")
    if faster := times_as_fast(cases):
        yield at_least("swap-in against SGLang: the worst", min(faster), 1.0)
        mean = math.exp(sum(map(math.log, faster)) / len(faster))
        yield at_least(f"swap-in against SGLang: geometric mean of {len(faster)}", mean, LEAST_MEAN)


def times_as_fast(cases: Iterable[Case]) -> list[float]:
    """Return how many times faster than SGLang's kernel each case is that they have, too (`sglang_h200.json`)."""
    measured = json.loads((Path(__file__).parent / "sglang_h200.json").read_text())["swap_in"]
    theirs_us = {tuple(case[key] for key in KEYS): case["us"] for case in measured}
    named = ((tuple(case[key] for key in KEYS), case["us"]) for case in cases)
    return [theirs_us[key] / us for key, us in named if key in theirs_us]


def of_page_copies(cases: Sequence[Case]) -> Iterator[Row]:
    for case in cases:
        if case["pages"] == 512:
            what = f"512 scattered pages {case['way']}, layers: {case['layers']}, of a pinned copy"
            yield at_least(what, case["gb_s"] / case["link_gb_s"], LEAST_OF_LINK)


def of_transport(cases: Sequence[Case]) -> Iterator[Row]:
    for case in cases:
        what = f"local transport, C4 of {case['tokens'] // 1024}k tokens to the host pool, of a pinned copy"
        yield at_least(what, case["gb_s"] / case["copy_gb_s"], LEAST_OF_LINK)

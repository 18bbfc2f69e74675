"""Targets of spawned processes of GPU tests: each gets a pipe and plain data, does one thing with memory and says so."""

import multiprocessing
import socket as unix
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch

from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.pages import pages_needed, request_tables
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank, Tables
from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.messages import SharedRegion
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.engine.views import PoolViews
from kvbridge.pool.memory.gpu_memory import EventRing, HostRegistration
from kvbridge.pool.memory.layout import Placement, RankPart, device_placement
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool
from kvbridge.pool.memory.shared_mapping import SharedMapping
from tests.helpers import synthetic

TINY = preset("tiny-v4")
COUNTS = {IndexSpace.FULL: 12, IndexSpace.SWA: 6, IndexSpace.REQUEST: 4}
TOKENS = 600
ANSWER_S = 60.0
SLEEP_CYCLES = 2_000_000_000
"""About a second of a GPU's time."""
COUNTED_AT_ONCE = 1_000
"""Kernels of one CUDA graph, so that a GPU does not wait for the process that is being killed."""


@dataclass
class Child:
    process: BaseProcess
    pipe: Connection

    def hear(self, timeout_s: float = ANSWER_S) -> Any:
        assert self.pipe.poll(timeout_s), f"{self.process.name} said nothing within {timeout_s} s"
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise AssertionError(f"{self.process.name} ended with exit code {self.process.exitcode}") from error

    def kill(self) -> None:
        self.process.kill()
        self.process.join(ANSWER_S)


@contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[Child]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), name=target.__name__, daemon=True)
    process.start()
    theirs.close()
    started = Child(process, ours)
    try:
        yield started
    finally:
        ours.close()
        process.join(10)
        if process.is_alive():
            started.kill()


def placement(device: int, geometry: ModelGeometry = TINY) -> Placement:
    part = RankPart.of(geometry, Rank(pp=0, tp=0), pp_size=1, tp_size=1)
    part = part.model_copy(update={"memory": MemoryKind.VRAM, "device": device})
    return device_placement(geometry, part, page_counts=COUNTS)


def tables(seed: int) -> Tables:
    random = np.random.default_rng(seed)
    needed = pages_needed(TINY, tokens=TOKENS, prompt_tokens=TOKENS)
    ids = {space: random.permutation(COUNTS[space])[:count].astype(np.int32) for space, count in needed.items()}
    return request_tables(TINY, ids, prompt_tokens=TOKENS)


def write(views: PoolViews, room: int) -> None:
    whole = Section(prompt_tokens=TOKENS, start_token=0, stop_token=TOKENS)
    synthetic.fill(views, room=room, tables=tables(room), section=whole)
    torch.cuda.synchronize(views.device)


def wrong_rows(views: PoolViews, room: int) -> list[str]:
    return [str(one) for one in synthetic.compare(views, room=room, tables=tables(room), tokens=TOKENS).mismatches]


def read_and_write(pipe: Connection, shared: tuple[SharedRegion, ...], expected: int, own: int) -> None:
    """Check the rows of one request in somebody's pool and write another's. Says (device, what was wrong)."""
    with MappedRegions(shared) as mapped:
        views = PoolViews(TINY, mapped.regions)
        wrong = wrong_rows(views, expected)
        write(views, own)
        pipe.send((views.device, wrong))
        _wait(pipe)
        del views


def mark_late(pipe: Connection, shared: tuple[SharedRegion, ...]) -> None:
    """Have the GPU write the first page after a second, name that point at once, and again whenever told to."""
    with MappedRegions(shared) as mapped:
        views = PoolViews(TINY, mapped.regions)
        page = views.region(ComponentKind.C4_KV, views.layers(ComponentKind.C4_KV)[0], space=IndexSpace.FULL).page(0)
        ring = EventRing.on(mapped.regions[0].device)
        stream = torch.cuda.current_stream(page.device)
        page.fill_(0)
        stream.synchronize()
        pipe.send("ready")
        while (value := _next(pipe)) is not None:
            torch.cuda._sleep(SLEEP_CYCLES)
            page.fill_(value)
            point = ring.record(stream.cuda_stream)
            pipe.send((point, stream.query()))
        torch.cuda.synchronize(page.device)
        ring.close()
        del views, page


def own_pool(pipe: Connection, device: int) -> None:
    pool = MemoryPool.on_gpu(placement(device))
    views = PoolViews(TINY, pool.regions)
    write(views, 1)
    pipe.send(pool.shared_regions())
    _wait(pipe)


def count_up(pipe: Connection, runtime_dir: str, room: int, tokens: int, witness: str, device: int) -> None:
    """Attach as a prefill engine, begin a room, say its first page, and have kernels add 1 to its first 8 bytes until killed."""
    torch.zeros(1, device=f"cuda:{device}")
    engine = PrefillEngine.attach(runtime_dir)
    _count_in(engine, engine.begin(room, prompt_tokens=tokens).tables, pipe, witness)


def count_up_claimed(pipe: Connection, runtime_dir: str, room: int, _tokens: int, witness: str, device: int) -> None:
    torch.zeros(1, device=f"cuda:{device}")
    engine = DecodeEngine.attach(runtime_dir)
    _count_in(engine, engine.claim(room, timeout_s=ANSWER_S).tables, pipe, witness)


def _count_in(engine: Engine, tables: Tables, pipe: Connection, witness: str) -> None:
    page_id = int(tables[IndexSpace.FULL].ids[0])
    counter = counter_of(next(iter(engine.views.values())), page_id)
    counter.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(COUNTED_AT_ONCE):
            counter.add_(1)
    with unix.socket(unix.AF_UNIX) as seen:
        seen.connect(witness)
        pipe.send(page_id)
        while True:
            graph.replay()


def counter_of(views: PoolViews, page_id: int) -> torch.Tensor:
    """The first 8 bytes of a page of the full space, as a number: int64 [1], shared with the pool; on a GPU on either side."""
    kind = ComponentKind.C4_INDEXER
    page = views.region(kind, views.layers(kind)[0], space=IndexSpace.FULL).page(page_id)
    return page[:8].view(torch.int64)


def register(pipe: Connection, path: str, device: int) -> None:
    with SharedMapping.open(path) as mapping, HostRegistration([mapping], device=device):
        pipe.send("registered")
        _wait(pipe)


def _next(pipe: Connection) -> Any:
    """Return what the test says, None when it is over."""
    try:
        return pipe.recv()
    except EOFError:
        return None


def _wait(pipe: Connection) -> None:
    while _next(pipe) is not None:
        pass

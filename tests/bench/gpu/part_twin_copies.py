"""Pages of DeepSeek-V4-Flash between a GPU and their twins on the host, all components, scattered on both sides.

Owns: the cases, and that each of them moved the right bytes. What is compared: one copy of as many bytes by a copy engine; for
loads by layer, one launch without layers; for compute beside loads, the same compute alone.

Times are the device's: the stream is held while everything is enqueued, and what is between two events counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime as library

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.presets import preset
from kvbridge.core.geometry.twins import twin_components, twin_pieces
from kvbridge.core.ids import TWINS, IndexSpace, MemoryKind, PageMoves, Rank
from kvbridge.kernels.cuda import buffers, runtime
from kvbridge.kernels.page_copies import CudaPageCopier
from kvbridge.kernels.places import IdPairs, PageMemory
from kvbridge.kernels.reference import array_at
from kvbridge.pool.memory.layout import RankPart, device_placement, twin_placement
from kvbridge.tier.copies import DEFAULT_BLOCKS, CopyMeans, Direction, TwinCopier
from tests.bench.gpu.memory import device_memory, fill_random, host_memory, tensor_at
from tests.bench.gpu.recorder import Recorder
from tests.bench.gpu.timing import checked
from tests.helpers.twin_pools import COMBINATIONS

FLASH = preset("deepseek-v4-flash")
FULL, SWA = IndexSpace.FULL, IndexSpace.SWA
PAGES = (8, 64, 512)
SPARE_PAGES = 64
CHECKPOINTS = 8
BLOCKS = (1, 2, 4, 8, 16, 64)
LOADS = (2, 4, 8)
SWEEP_PAGES = 64
RESTORED_PAGES = 128
"""32k tokens."""
COMPUTE = (4096, 4096, 36_864)
"""Of one matrix product for each layer, about what 4k new tokens take of a layer of Flash."""


def run(recorder: Recorder, *, quick: bool) -> None:
    """Measure everything."""
    torch.cuda.set_device(0)
    replays = 5 if quick else 15
    for host, device in (
        (HostLayout.LAYER_FIRST, DeviceLayout.LAYER_FIRST),
        (HostLayout.PAGE_FIRST, DeviceLayout.LAYER_FIRST),
    ):
        with bed(host, device, replays) as made:
            rates(recorder, made, PAGES[:2] if quick else PAGES)
            for pages in PAGES[1:]:
                by_layer(recorder, made, pages)
            enqueueing(recorder, made)
            if host is HostLayout.LAYER_FIRST and not quick:
                sweep(recorder, made)
            if host is HostLayout.PAGE_FIRST:
                compute(recorder, made)
    for host in HostLayout:
        with bed(host, DeviceLayout.PAGE_FIRST, replays) as made:
            rates(recorder, made, PAGES[:2] if quick else PAGES)


class Bed:
    """A rank's device pool and its twins, and streams to copy on."""

    def __init__(self, host: HostLayout, device: DeviceLayout, replays: int, stack: ExitStack) -> None:
        self.host, self.device, self.replays = host, device, replays
        part = RankPart.of(FLASH, Rank(pp=0, tp=0), pp_size=1, tp_size=1).model_copy(update={"memory": MemoryKind.VRAM})
        self.counts = {FULL: max(PAGES) + SPARE_PAGES, SWA: 2 * CHECKPOINTS}
        pages = self.counts | {IndexSpace.REQUEST: 1}
        pool = device_placement(FLASH, part, page_counts=pages, page_first=device is DeviceLayout.PAGE_FIRST)
        twins = twin_placement(
            FLASH,
            [part],
            twin_components(FLASH, (), checkpoints=True),
            page_counts={TWINS[space]: count for space, count in self.counts.items()},
            layout=host,
        )
        self.bases = (
            stack.enter_context(device_memory(pool.total_bytes)),
            stack.enter_context(host_memory(twins.total_bytes)).address,
        )
        self.sizes = pool.total_bytes, twins.total_bytes
        self.regions = pool.regions_at([self.bases[0]]), twins.regions_at([self.bases[1]])
        self.main, self.other = (stack.enter_context(runtime.Stream.create(0)) for _ in range(2))
        self._word = stack.enter_context(host_memory(4096)).address
        self._turn = 0
        self._events = [checked(library.cudaEventCreateWithFlags(0)) for _ in range(2 + FLASH.layer_count)]
        self._random = np.random.default_rng(3)

    def copier(self, direction: Direction, backend: CopyBackend) -> TwinCopier:
        return TwinCopier(FLASH, *self.regions, direction=direction, means=CopyMeans(backend, 0))

    def moves(self, counts: dict[IndexSpace, int]) -> PageMoves:
        return {
            space: tuple(self._random.permutation(self.counts[space])[:count].astype(np.int32) for _ in range(2))
            for space, count in counts.items()
        }

    def held(self, enqueue: Callable[[], None], marks: Sequence[tuple[int, Callable[[], None]]] = ()) -> list[float]:
        """Microseconds from when the stream is let go until `enqueue` is done on it, and until each mark's stream has got there."""
        runtime.use(0)
        self._turn += 1
        buffers.wait_value(0, self._word, self._turn, self.main.handle)
        checked(library.cudaEventRecord(self._events[0], self.main.handle))
        enqueue()
        checked(library.cudaEventRecord(self._events[1], self.main.handle))
        used = self._events[: 2 + len(marks)]
        for event, (stream, wait) in zip(used[2:], marks, strict=True):
            wait()
            checked(library.cudaEventRecord(event, stream))
        array_at(self._word, (1,), np.uint32)[0] = self._turn
        runtime.synchronize(0)
        return [1e3 * float(checked(library.cudaEventElapsedTime(used[0], event))) for event in used[1:]]

    def median_us(self, enqueue: Callable[[], None]) -> float:
        """The first turn warms up."""
        return statistics.median([self.held(enqueue)[0] for _ in range(self.replays + 1)][1:])

    def link_us(self, direction: Direction, size: int) -> float:
        """One copy of as many bytes by a copy engine."""
        source, target = self.bases if direction is Direction.BACKUP else self.bases[::-1]
        return self.median_us(lambda: runtime.copy(target, source, size, device=0, stream=self.main.handle))

    def size(self, moves: PageMoves, layers: frozenset[int] | None = None) -> int:
        return sum(length for _, _, length in self.pieces(moves, layers))

    def pieces(self, moves: PageMoves, layers: frozenset[int] | None = None) -> Iterator[tuple[Any, Any, int]]:
        """Of each piece of each layer: the addresses on the device and on the host, and the bytes of all its pages."""
        twins = {(region.component, region.layer): region for region in self.regions[1]}
        for region in self.regions[0]:
            twin = twins.get((region.component, region.layer))
            if twin is None or region.space not in moves or (layers is not None and region.layer not in layers):
                continue
            for piece in twin_pieces(FLASH, FLASH.component(region.component), (0, 1), (0, 1)):
                here, there = moves[region.space]
                yield (
                    PageMemory.of(region).addresses(here) + np.uint64(piece.offset_bytes),
                    PageMemory.of(twin).addresses(there) + np.uint64(piece.twin_offset_bytes),
                    piece.length_bytes * len(here),
                )

    def wrong(self, moves: PageMoves) -> str:
        """What differs between both sides; copies have ended."""
        sides = [tensor_at(base, size, torch.uint8, 0) for base, size in zip(self.bases, self.sizes, strict=True)]
        for here, there, size in self.pieces(moves):
            each = torch.arange(size // len(here), device="cuda")
            found = []
            for side, base, addresses in zip(sides, self.bases, (here, there), strict=True):
                offsets = torch.from_numpy((addresses - np.uint64(base)).astype(np.int64)).cuda()
                found.append(side[offsets[:, None] + each])
            if not torch.equal(*found):
                return "pages differ from their twins"
        return ""

    def refill(self, direction: Direction) -> None:
        """Random bytes on the side that is read."""
        which = 0 if direction is Direction.BACKUP else 1
        fill_random(self.bases[which], self.sizes[which] // 8 * 8, 0, seed=self._turn)

    def facts(self, direction: Direction, backend: CopyBackend) -> dict[str, Any]:
        return {
            "way": direction.value,
            "backend": backend.value,
            "layout": self.host.value,
            "device_layout": self.device.value,
        }


@contextmanager
def bed(host: HostLayout, device: DeviceLayout, replays: int) -> Iterator[Bed]:
    with ExitStack() as stack:
        yield Bed(host, device, replays, stack)


def rates(recorder: Recorder, made: Bed, pages: Sequence[int]) -> None:
    """Each legal backend, both ways, against one copy of as many bytes."""
    for direction in Direction:
        for backend in CopyBackend:
            if (made.host, made.device, backend, direction) not in COMBINATIONS:
                continue
            made.refill(direction)
            with made.copier(direction, backend) as copier:
                for counts in (*({FULL: count} for count in pages), {SWA: CHECKPOINTS}):
                    moves = made.moves(counts)
                    copier.copy(moves, stream=made.main.handle)
                    made.main.synchronize()
                    wrong, size = made.wrong(moves), made.size(moves)
                    us = made.median_us(lambda moves=moves: copier.copy(moves, stream=made.main.handle))
                    link_us = made.link_us(direction, size)
                    recorder.case(
                        what="rate",
                        **made.facts(direction, backend),
                        space=next(iter(counts)).value,
                        pages=sum(counts.values()),
                        blocks=0,
                        bytes=size,
                        us=us,
                        gb_s=size / us / 1e3,
                        link_us=link_us,
                        link_gb_s=size / link_us / 1e3,
                        wrong=wrong,
                    )


def sweep(recorder: Recorder, made: Bed) -> None:
    """The kernel with other numbers of blocks, and of loads that a thread has in flight."""
    moves = made.moves({FULL: SWEEP_PAGES})
    size = made.size(moves)
    for direction in Direction:
        link_us = made.link_us(direction, size)
        with made.copier(direction, CopyBackend.KERNEL) as copier:
            pairs = copier._copies._copier.pairs
        both = moves[FULL] if direction is Direction.BACKUP else moves[FULL][::-1]
        ids = torch.from_numpy(np.stack(both)).cuda()
        nothing = IdPairs(0, 0, 0)
        lists = [IdPairs(ids.data_ptr(), ids[1].data_ptr(), SWEEP_PAGES), nothing]
        for blocks, loads in product(BLOCKS, LOADS):
            with CudaPageCopier(0, pairs, blocks=blocks, signals=True, loads=loads) as bare:
                copy = partial(bare.copy, lists, stream=made.main.handle)
                copy()  # a kernel that is not loaded yet would wait for a stream that is held
                made.main.synchronize()
                us = made.median_us(copy)
            recorder.case(
                what="sweep",
                **made.facts(direction, CopyBackend.KERNEL),
                pages=SWEEP_PAGES,
                blocks=blocks,
                loads=loads,
                bytes=size,
                us=us,
                gb_s=size / us / 1e3,
                link_gb_s=size / link_us / 1e3,
                wrong="",
            )


def by_layer(recorder: Recorder, made: Bed, pages: int) -> None:
    """When a load is through with its first layer, and with all, against one launch that tells of no layer."""
    moves, main, other = made.moves({FULL: pages}), made.main.handle, made.other.handle
    layers = sorted({region.layer for region in made.regions[1]})
    loaded = [layer for layer in layers if made.size(moves, frozenset({layer}))]
    first_bytes = made.size(moves, frozenset(loaded[:1]))
    tickets: list[int] = []
    with made.copier(Direction.LOAD_BACK, CopyBackend.KERNEL) as copier:
        marks = [(other, lambda layer=layer: copier.wait_layer(layer, tickets[-1], stream=other)) for layer in loaded]
        found = [
            made.held(lambda: tickets.append(copier.copy(moves, stream=main)), marks) for _ in range(made.replays + 1)
        ][1:]
        pairs = [replace(pair, group=0) for pair in copier._copies._copier.pairs]
    ids = torch.from_numpy(np.stack(moves[FULL][::-1])).cuda()
    lists = [IdPairs(ids.data_ptr(), ids[1].data_ptr(), pages), IdPairs(0, 0, 0)]
    with CudaPageCopier(0, pairs, blocks=DEFAULT_BLOCKS) as bare:
        at_once_us = made.median_us(lambda: bare.copy(lists, stream=main))
    wrong = made.wrong(moves)  # before `link_us` writes over the pools
    first_us, whole_us = (statistics.median(each[index] for each in found) for index in (1, -1))
    recorder.case(
        what="by layer",
        **made.facts(Direction.LOAD_BACK, CopyBackend.KERNEL),
        pages=pages,
        layers=len(loaded),
        first_bytes=first_bytes,
        first_us=first_us,
        first_link_us=made.link_us(Direction.LOAD_BACK, first_bytes),
        whole_us=whole_us,
        at_once_us=at_once_us,
        wrong=wrong,
    )


def enqueueing(recorder: Recorder, made: Bed) -> None:
    """How long the host is busy with a load of all layers and with waits for each, while the device stands still."""
    moves, took_us = made.moves({FULL: max(PAGES), SWA: 1}), []
    with made.copier(Direction.LOAD_BACK, CopyBackend.KERNEL) as copier:

        def enqueue() -> None:
            begun_s = time.perf_counter()
            copier.copy(moves, stream=made.main.handle)
            took_us.append(1e6 * (time.perf_counter() - begun_s))

        for _ in range(made.replays + 3):
            made.held(enqueue)
    recorder.case(
        what="enqueue",
        **made.facts(Direction.LOAD_BACK, CopyBackend.KERNEL),
        pages=max(PAGES),
        us=statistics.median(took_us[3:]),
        wrong="",
    )


def compute(recorder: Recorder, made: Bed) -> None:
    """Prefill goes on from what is being loaded: a matrix product behind each layer; and compute beside loads without an end."""
    rows, inner, columns = COMPUTE
    left = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    right = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(rows, columns, device="cuda", dtype=torch.bfloat16)
    engine = torch.cuda.ExternalStream(made.other.handle)
    with torch.cuda.stream(engine):
        torch.matmul(left, right, out=out)
    torch.cuda.synchronize()
    moves = made.moves({FULL: RESTORED_PAGES, SWA: 1})
    with made.copier(Direction.LOAD_BACK, CopyBackend.KERNEL) as copier:
        main, other = made.main.handle, made.other.handle

        def layers(ticket: int | None) -> None:
            with torch.cuda.stream(engine):
                for layer in range(FLASH.layer_count):
                    if ticket is not None:
                        copier.wait_layer(layer, ticket, stream=other)
                    torch.matmul(left, right, out=out)

        def computed_us(loads: int, *, waits: bool) -> float:
            """From when the device is let go until the last layer is computed."""
            tickets: list[int] = []

            def enqueue() -> None:
                point.record(main)
                point.hold(other)
                tickets.extend(copier.copy(moves, stream=main) for _ in range(loads))

            found = made.held(enqueue, [(other, lambda: layers(tickets[0] if waits else None))])
            return found[1]

        point = runtime.Event.create(0)
        alone_us = statistics.median(computed_us(0, waits=False) for _ in range(made.replays))
        load_us = made.median_us(lambda: copier.copy(moves, stream=main))
        behind_us = statistics.median(computed_us(1, waits=True) for _ in range(made.replays))
        many = min(24, int(alone_us / load_us))
        beside_us = statistics.median(computed_us(many, waits=False) for _ in range(made.replays))
        point.close()
    recorder.case(
        what="compute",
        **made.facts(Direction.LOAD_BACK, CopyBackend.KERNEL),
        pages=RESTORED_PAGES,
        compute_us=alone_us,
        load_us=load_us,
        both_us=behind_us,
        loads=many,
        beside_us=beside_us,
        wrong=made.wrong(moves),
    )

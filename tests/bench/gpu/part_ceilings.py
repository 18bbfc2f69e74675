"""What the machine can do at best: the host link, device to device, a launch, and a gather without any bookkeeping.

Owns: the ceilings that the other parts are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvbridge.kernels.cuda import runtime
from tests.bench.gpu import bare
from tests.bench.gpu.memory import PAGE_BYTES, ROW_BYTES, SLOTS, CacheFlush, device_memory, host_memory
from tests.bench.gpu.recorder import Recorder
from tests.bench.gpu.timing import graph_us, spread, streams, wall_s

GIB = 1 << 30
CHAIN = 100
POOL_PAGES = 131_072


def run(recorder: Recorder, *, quick: bool) -> None:
    """Measure all of it."""
    count = runtime.device_count()
    groups = [[device] for device in range(count)] + [list(range(n)) for n in (2, 4, 8) if n <= count]
    if count < 2:
        recorder.skip("host link of several GPUs at once, and GPU to GPU: this machine has one GPU")
    host_link(recorder, groups[:1] if quick else groups)
    between_devices(recorder, count)
    launch_floor(recorder)
    gathers(recorder, quick=quick)


def host_link(recorder: Recorder, groups: Sequence[Sequence[int]]) -> None:
    """Copies of 1 GiB between each device and its own part of one registered shared mapping, all devices of a group at once."""
    most = max(len(group) for group in groups)
    with host_memory(most * GIB) as mapping:
        for group in groups:
            with streams(group) as lanes:
                buffers = [runtime.allocate(device, GIB) for device in group]
                try:
                    for way in ("h2d", "d2h"):
                        took = wall_s(_copies(way, lanes, buffers, mapping.address), turns=5)
                        total = len(group) * GIB
                        recorder.case(
                            what=way, devices=list(group), bytes=total, gb_s=total / spread(took)["median"] / 1e9
                        )
                finally:
                    for device, buffer in zip(group, buffers, strict=True):
                        runtime.free(device, buffer)


def _copies(way: str, lanes: Sequence[runtime.Stream], buffers: Sequence[int], host: int) -> Callable[[], None]:
    def work() -> None:
        for position, (lane, buffer) in enumerate(zip(lanes, buffers, strict=True)):
            here = host + position * GIB
            target, source = (buffer, here) if way == "h2d" else (here, buffer)
            runtime.copy(target, source, GIB, device=lane.device, stream=lane.handle)
        for lane in lanes:
            lane.synchronize()

    return work


def between_devices(recorder: Recorder, count: int) -> None:
    """1 GiB within a device, and from the first to the second."""
    pairs = [(0, 0)] + ([(0, 1)] if count > 1 and runtime.can_reach(0, 1) else [])
    for source_device, target_device in pairs:
        if source_device != target_device:
            runtime.reach(source_device, target_device)
        with (
            device_memory(GIB, source_device) as source,
            device_memory(GIB, target_device) as target,
            streams([source_device]) as (lane,),
        ):

            def work(target: int = target, source: int = source, lane: runtime.Stream = lane) -> None:
                runtime.copy(target, source, GIB, device=lane.device, stream=lane.handle)
                lane.synchronize()

            took = wall_s(work)
            what = "device copy" if source_device == target_device else "peer copy"
            recorder.case(
                what=what, devices=[source_device, target_device], bytes=GIB, gb_s=GIB / spread(took)["median"] / 1e9
            )


def launch_floor(recorder: Recorder) -> None:
    """One launch in a chain of kernels that do nothing, inside a graph."""
    with streams([0]) as (lane,):
        bare.launch_nothing(0, lane.handle)  # compiled before anything is captured

        def work() -> None:
            for _ in range(CHAIN):
                bare.launch_nothing(0, lane.handle)

        took = graph_us(0, lane.handle, work, calls=CHAIN)
    recorder.case(what="launch floor", us=spread(took)["median"])


def gathers(recorder: Recorder, *, quick: bool) -> None:
    """Random rows of 584 bytes from registered host memory, with a cold cache, by how far they are spread."""
    torch.cuda.set_device(0)
    footprints = (8192,) if quick else (512, 8192, 32_768, POOL_PAGES)
    flush = CacheFlush(0)
    with (
        host_memory(max(footprints) * PAGE_BYTES) as mapping,
        device_memory(65_536 // SLOTS * PAGE_BYTES) as target,
        streams([0]) as (lane,),
    ):
        for pages in footprints:
            for rows in (512, 16_384) if quick else (512, 2048, 16_384, 65_536):
                if rows > pages * SLOTS:
                    continue
                source = torch.randperm(pages * SLOTS, device="cuda", dtype=torch.int32)[:rows].contiguous()
                places = torch.arange(rows, device="cuda", dtype=torch.int32)
                torch.cuda.synchronize()
                gather = bare.Gather(source.data_ptr(), places.data_ptr(), rows, mapping.address, target, PAGE_BYTES)
                best = min(_gather_us(gather, shape, lane.handle, flush) for shape in bare.GATHER_SHAPES)
                recorder.case(
                    what="bare gather",
                    footprint_gib=round(pages * PAGE_BYTES / GIB, 3),
                    rows=rows,
                    us=best,
                    gb_s=rows * ROW_BYTES / best / 1e3,
                )


def _gather_us(gather: bare.Gather, shape: tuple[int, int], stream: int, flush: CacheFlush) -> float:
    gather.launch(0, stream, shape)
    took = graph_us(
        0, stream, lambda: gather.launch(0, stream, shape), replays=11, before=lambda _: flush.enqueue(stream)
    )
    return spread(took)["median"]

"""Whole daemons with `device: cuda`, where a stand-in takes CUDA's place: what nodes, workers and engines do about device memory.

The engine is this process. It looks at device memory as at host memory, since that is what it is here. Tests of a
real GPU are in `tests/gpu/test_cuda_daemons.py`.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from kvbridge.core.errors import DetachedError
from kvbridge.core.ids import MemoryKind, Rank
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.core.wire.messages import StreamPoint
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory.gpu_memory import EventRing, StreamPoints
from tests.helpers.cluster import Cluster, DaemonProcess, eventually
from tests.helpers.live_rooms import all_free, busy_pages, check_rows, cross, ends, fill, http, nodes, write
from tests.helpers.matrices import kept
from tests.helpers.rank_harness import Case
from tests.helpers.stand_in_cuda import cuda_stand_in
from tests.helpers.stand_in_engines import prepare, stand_in_for_daemons

WAIT_S = 30.0
CASES = (Case(700), Case(3, (2,)), Case(130, (57,), by_layer=True), Case(1023, (333, 777)))


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda_stand_in.Runtime]:
    """The stand-in, here and in every process that is started."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with stand_in_for_daemons():
        yield prepare(monkeypatch.setattr)
    torch.set_num_threads(threads)


def gpus(prefill: int = 1, decode: int = 1) -> AbstractContextManager[Cluster]:
    """Daemons with so many GPUs."""
    first, second = ({"parallelism": {"tp_size": count, "device": "cuda"}} for count in (prefill, decode))
    return nodes(first, second, prefill_tp=prefill, decode_tp=decode)


def kill_worker(daemon: DaemonProcess) -> None:
    rank = daemon.get("/status")["ranks"][0]
    os.kill(rank["pid"], signal.SIGKILL)


def wait_detached(engine: Engine) -> set[tuple[str, int]]:
    """Wait until an engine learns that its memory is gone; returns (kind, room) of the events before."""
    events: list[RoomEvent] = []
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        try:
            events += engine.events(0.1)
        except DetachedError:
            return {(event.kind, event.room) for event in events}
    raise AssertionError("the engine was never told that its memory is gone")


@pytest.mark.parametrize(("prefill", "decode"), [(1, 1), kept((2, 2), False)])
def test_every_byte_crosses_between_pools_that_workers_made(prefill: int, decode: int) -> None:
    with (
        gpus(prefill, decode) as running,
        PrefillEngine.attach(running.prefill.runtime_dir) as sender,
        DecodeEngine.attach(running.decode.runtime_dir) as reader,
    ):
        opened = [engine._memory.mapped._opened.values() for engine in (sender, reader)]
        kinds = [{each.extent.kind for each in of_one} for of_one in opened]
        assert kinds == [{MemoryKind.VRAM}, {MemoryKind.VRAM, MemoryKind.DRAM}]
        for case in CASES:
            cross(running, sender, reader, case).release()


class OwnGpu:
    """The engine's GPU: it has recorded its points, and has come nowhere yet."""

    devices = (0,)

    def __init__(self) -> None:
        self._ring = EventRing.on(0)
        self._seen = StreamPoints()

    def points(self, stream: object) -> dict[str, Any]:
        del stream
        return {str(Rank(pp=0, tp=0)): self._ring.record(0)}

    def passed(self, points: Iterable[StreamPoint]) -> bool:
        return not points or self._seen.reached(points)

    def reached(self, stream: object, also: frozenset[StreamPoint] = frozenset()) -> Callable[[], bool]:
        del stream
        return lambda: self.passed(also)

    def catch_up(self) -> None:
        for event, _ in self._ring._entries:
            runtime.library().cudaEventRecord(event.handle, 0)

    def close(self) -> None:
        self._ring.close()


def test_nothing_is_read_before_the_engines_gpu_has_come_to_the_point_of_its_publication(gpu: cuda_stand_in.Runtime):
    with (
        gpus() as running,
        PrefillEngine.attach(running.prefill.runtime_dir) as sender,
        DecodeEngine.attach(running.decode.runtime_dir) as reader,
    ):
        own = sender._order = OwnGpu()  # type: ignore[assignment]
        room = running.pair(700)["room"]
        begun = sender.begin(room, prompt_tokens=700)
        gpu.events_reached = False
        for upto in (256, 700):
            begun.publish(upto)
        begun.finish()
        # Everything is published, and nothing is written yet.
        assert reader.events(1.0) == []
        fill(sender, begun)
        gpu.events_reached = True
        own.catch_up()
        claimed = reader.claim(room, timeout_s=WAIT_S)
        check_rows(reader, claimed)
        claimed.release()


def test_pages_of_a_finished_room_that_fails_wait_for_the_engines_gpu(gpu: cuda_stand_in.Runtime) -> None:
    """The node needs nothing of them any more, but the engine's GPU has yet to write them."""
    with gpus() as running, PrefillEngine.attach(running.prefill.runtime_dir) as sender:
        own = sender._order = OwnGpu()  # type: ignore[assignment]
        room = running.pair(700)["room"]
        begun = sender.begin(room, prompt_tokens=700)
        gpu.events_reached = False
        begun.publish(700)
        begun.finish()
        # Before it has offered its pages, a room that decode gives up is prefill's own to end.
        eventually("the offer", lambda: running.prefill.get(f"/v1/requests/{room}")["state"] == "transferring")
        http("DELETE", running.decode, f"/v1/requests/{room}")
        ends(running.prefill, room, "aborted", "aborted")
        assert sender.events(WAIT_S)[-1].kind == "aborted"
        assert busy_pages(running.prefill)
        gpu.events_reached = True
        own.catch_up()
        sender.events()
        all_free(running.prefill)


@pytest.mark.thorough
def test_a_decode_worker_that_is_killed_fails_what_had_arrived() -> None:
    with gpus() as running:
        sender = PrefillEngine.attach(running.prefill.runtime_dir)
        reader = DecodeEngine.attach(running.decode.runtime_dir)
        claimed = cross(running, sender, reader, CASES[0])
        unclaimed = running.pair(300)["room"]
        write(sender, unclaimed, Case(300))
        eventually("the commit", lambda: running.decode.get(f"/v1/requests/{unclaimed}")["state"] == "committed")
        kill_worker(running.decode)
        assert {("cancel", claimed.id), ("failed", unclaimed)} <= wait_detached(reader)
        claimed.release()
        reader.close()
        with DecodeEngine.attach(running.decode.runtime_dir, call_timeout_s=WAIT_S) as again:
            running.wait_ready()
            for case in CASES[:2]:
                cross(running, sender, again, case).release()
        all_free(running.decode)
        sender.close()

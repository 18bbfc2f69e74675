"""Whole daemons with their pools on GPUs: every byte of every request, and the order between engines and workers."""

import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from kvbridge.config.tier import CopyBackend
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.tier.copies import CopyMeans, Direction, HostCopier
from tests.helpers.cluster import Cluster, DaemonProcess, eventually
from tests.helpers.gpu_children import SLEEP_CYCLES
from tests.helpers.live_rooms import CLAIM_S, check_rows, cross, fill, nodes, status
from tests.helpers.rank_harness import Case

pytestmark = pytest.mark.gpu
TINY = preset("tiny-v4")
FULL, SWA, REQUEST, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST, IndexSpace.HOST
C4_KV = frozenset({ComponentKind.C4_KV})


def on_devices(*devices: int) -> dict[str, Any]:
    ranks = [{"pp": 0, "tp": number, "device": f"cuda:{device}"} for number, device in enumerate(devices)]
    return {"parallelism": {"tp_size": len(devices), "ranks": ranks}}


@pytest.fixture(scope="module")
def running(device: int) -> Iterator[Cluster]:
    with nodes(on_devices(device), on_devices(device)) as started:
        yield started


@pytest.fixture
def sender(running: Cluster) -> Iterator[PrefillEngine]:
    with PrefillEngine.attach(running.prefill.runtime_dir) as engine:
        yield engine


@pytest.fixture
def reader(running: Cluster) -> Iterator[DecodeEngine]:
    with DecodeEngine.attach(running.decode.runtime_dir) as engine:
        yield engine


def free_pages(daemon: DaemonProcess) -> dict[str, int]:
    return {space: states["free"] for space, states in daemon.get("/status")["pools"].items()}


def all_free(daemon: DaemonProcess, engine: Engine) -> bool:
    """Whether nothing is in use; the engine is given the chance to say what it still has to."""
    engine.events()
    pools = daemon.get("/status")["pools"]
    return all(pages == 0 for states in pools.values() for state, pages in states.items() if state != "free")


CASES = (
    Case(700),
    Case(3, (2,)),
    Case(130, (57,), by_layer=True),
    Case(259, (256,)),
    Case(1023, (333, 777), by_layer=True),
    Case(4354, (1025, 3001)),
)


def test_every_byte_crosses_from_gpu_to_gpu_and_to_the_host_pool(running, sender, reader, device):
    (views,) = reader.views.values()
    assert (views.device, next(iter(sender.views.values())).device) == (device, device)
    c4 = views.region(ComponentKind.C4_KV, views.layers(ComponentKind.C4_KV)[0], space=HOST)
    assert c4.region.memory is MemoryKind.DRAM
    assert c4.page(0).is_pinned(), "kernels reach the host pool"
    for case in CASES:
        cross(running, sender, reader, case).release()
    eventually("all pages back", lambda: all_free(running.decode, reader))
    eventually("all pages back", lambda: all_free(running.prefill, sender))


def pages_of(engine: Engine) -> list[torch.Tensor]:
    """All device memory of an engine's ranks, as [pages, page_bytes] of each region."""
    return [
        pages
        for views in engine.views.values()
        for homes in views._homes.values()
        for view in homes.values()
        if view.region.memory is MemoryKind.VRAM
        for pages in view._pages
    ]


@pytest.mark.alone
def test_nothing_is_sent_before_the_engines_gpu_has_written_it(running, sender, reader, device):
    """The GPU sleeps for a second, then writes the pages; publish and finish do not wait for that."""
    tokens = 1023
    stream = torch.cuda.Stream(device)
    for round_ in range(2):  # an event of the ring and its successor
        room = running.pair(tokens)["room"]
        begun = sender.begin(room, prompt_tokens=tokens)
        fill(sender, begun)
        pages = pages_of(sender)
        kept = [page.clone() for page in pages]
        for page in pages:
            page.zero_()
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            for page, right in zip(pages, kept, strict=True):
                page.copy_(right)
        begun_s = time.monotonic()
        if round_ == 0:
            begun.publish(tokens, stream=stream)
        else:
            with torch.cuda.stream(stream):
                begun.publish(tokens)
        begun.finish()
        said_s = time.monotonic() - begun_s
        assert not stream.query(), "publish or finish waited for the GPU, or it was too fast for this test"
        assert said_s < 0.5
        claimed = reader.claim(room, timeout_s=CLAIM_S)
        assert stream.query()
        check_rows(reader, claimed)
        claimed.release()


@pytest.mark.alone
def test_pages_are_used_again_only_when_the_decode_engines_gpu_is_done_with_them(running, sender, reader, device):
    before = free_pages(running.decode)
    claimed = cross(running, sender, reader, Case(700))
    held = free_pages(running.decode)
    assert held != before
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    begun_s = time.monotonic()
    claimed.release(stream=stream)
    assert time.monotonic() - begun_s < 0.5, "release waited for the GPU"
    assert not stream.query(), "the GPU was too fast for this test"
    reader.events()
    assert free_pages(running.decode) == held
    stream.synchronize()
    eventually("the release", lambda: (reader.events(), free_pages(running.decode) == before)[1])


def test_two_gpus_send_in_stripes_to_two_ranks(device: int, second_device: int) -> None:
    with (
        nodes(
            on_devices(device, second_device), on_devices(second_device, device), prefill_tp=2, decode_tp=2
        ) as running,
        PrefillEngine.attach(running.prefill.runtime_dir) as sender,
        DecodeEngine.attach(running.decode.runtime_dir) as reader,
    ):
        assert [views.device for views in reader.views.values()] == [second_device, device]
        for case in CASES:
            cross(running, sender, reader, case).release()
        eventually("all pages back", lambda: all_free(running.prefill, sender))
        eventually("all pages back", lambda: all_free(running.decode, reader))


def test_what_an_engine_backs_up_into_twins_its_gpu_loads_back_elsewhere(device: int) -> None:
    """Workers and engines page-lock the twins that the node makes; pages go down and come back by kernel and by copy engines."""
    tier = {"enabled": True, "model_name": "m", "model_revision": "1"}
    pools = {"device": {"full": 64, "swa": 16, "request": 8}, "device_layout": "page_first"}
    host = {"pages": 8, "checkpoint_pages": 4, "layout": "page_first"}
    prefill = on_devices(device) | {"tier": tier | {"host": host}, "pools": pools}
    down = {FULL: (ids(3, 9, 4), ids(0, 5, 7)), SWA: (ids(2), ids(3))}
    up = {FULL: (ids(20, 11, 12), ids(0, 5, 7)), SWA: (ids(5), ids(3))}
    with nodes(prefill, on_devices(device)) as running, PrefillEngine.attach(running.prefill.runtime_dir) as engine:
        (views,), twins = engine.views.values(), engine._memory.twins
        full = [view for homes in views._homes.values() for view in homes.values() if view.region.space is FULL]
        for pages in pages_of(engine):
            pages.random_(0, 256)
        torch.cuda.synchronize(device)
        stream = torch.cuda.Stream(device)
        for backend in CopyBackend:
            means = CopyMeans(backend, device)
            with (
                HostCopier(TINY, views.regions, twins, direction=Direction.BACKUP, means=means) as backup,
                HostCopier(TINY, views.regions, twins, direction=Direction.LOAD_BACK, means=means) as load,
            ):
                backup.copy(down, stream=stream.cuda_stream)
                ticket = load.copy(up, stream=stream.cuda_stream)
                load.wait(ticket, stream=torch.cuda.current_stream(device).cuda_stream)
                for layer in range(TINY.layer_count):
                    load.wait_layer(layer, ticket, stream=torch.cuda.current_stream(device).cuda_stream)
                for view, (source, target) in product(full, zip(down[FULL][0], up[FULL][0], strict=True)):
                    assert torch.equal(view.page(int(source)), view.page(int(target))), view
                    view.page(int(target)).zero_()  # the next backend has to do it itself
        assert status(running.prefill)["pools"]["full_twin"]["free"] == 8


def ids(*pages: int) -> np.ndarray:
    return np.array(pages, dtype=np.int32)

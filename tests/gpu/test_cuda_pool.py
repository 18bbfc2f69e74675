"""Device pools between processes: the same bytes, and the order between one's kernels and another's reads."""

import ctypes
import os
import time
from collections.abc import Iterator

import pytest
import torch

from kvbridge.core.errors import RegistrationError, TransportError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import MemoryKind
from kvbridge.core.wire.messages import CudaOrigin
from kvbridge.engine.views import PoolViews
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool
from tests.helpers.gpu_children import TINY, child, mark_late, own_pool, placement, read_and_write, write, wrong_rows

pytestmark = pytest.mark.gpu
REACHED_S = 20.0


@pytest.fixture
def pool(device: int) -> Iterator[MemoryPool]:
    with MemoryPool.on_gpu(placement(device)) as made:
        yield made


def first_byte(pool: MemoryPool) -> int:
    """The first byte of the first C4 page, read past all streams of everybody else."""
    region = next(one for one in pool.regions if one.component is ComponentKind.C4_KV)
    found = ctypes.c_ubyte()
    with runtime.Stream.create(region.device) as stream:
        address = region.extent_addresses[0]
        runtime.copy(ctypes.addressof(found), address, 1, device=region.device, stream=stream.handle)
        stream.synchronize()
    return found.value


def test_a_new_pool_is_zero_everywhere(pool: MemoryPool, device: int) -> None:
    views = PoolViews(TINY, pool.regions)
    for homes in views._homes.values():
        for view in homes.values():
            assert view._device == torch.device("cuda", device)
            assert not any(bool(pages.any()) for pages in view._pages)


def test_two_processes_see_the_same_pages(pool: MemoryPool) -> None:
    views = PoolViews(TINY, pool.regions)
    write(views, 1)
    assert wrong_rows(views, 1) == []
    with child(read_and_write, pool.shared_regions(), 1, 2) as engine:
        _, wrong = engine.hear()
        assert wrong == []
        assert wrong_rows(views, 2) == []


def test_devices_are_found_by_their_uuid(pool: MemoryPool, second_device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    write(PoolViews(TINY, pool.regions), 1)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{seen[second_device]},{seen[pool.placement.device]}")
    with child(read_and_write, pool.shared_regions(), 1, 2) as engine:
        assert engine.hear() == (1, [])
    assert wrong_rows(PoolViews(TINY, pool.regions), 2) == []


def test_a_point_is_reached_when_the_other_processs_kernels_are_done_and_not_before(pool: MemoryPool) -> None:
    points = gpu_memory.StreamPoints()
    with child(mark_late, pool.shared_regions()) as engine:
        assert engine.hear() == "ready"
        for value in (7, 9):  # the second record uses another event of the ring
            before = first_byte(pool)
            engine.pipe.send(value)
            point, was_done = engine.hear()
            assert not was_done, "the engine waited for its own GPU"
            assert not points.reached([point])
            assert first_byte(pool) == before, "without the point this is what would have been sent"
            wait_until_reached(points, point)
            assert first_byte(pool) == value
        points.close()


def wait_until_reached(points: gpu_memory.StreamPoints, point: object) -> None:
    deadline_s = time.monotonic() + REACHED_S
    while not points.reached([point]):
        assert time.monotonic() < deadline_s, f"not reached within {REACHED_S} s"
        time.sleep(0.001)


def ask(points: gpu_memory.StreamPoints, point: object) -> str:
    try:
        return str(points.reached([point]))
    except TransportError as error:
        return str(error)


def test_an_engine_that_is_killed_with_work_on_its_gpu_harms_nobody(pool: MemoryPool) -> None:
    points = gpu_memory.StreamPoints()
    with child(mark_late, pool.shared_regions()) as engine:
        assert engine.hear() == "ready"
        engine.pipe.send(7)
        point, _ = engine.hear()
        points.reached([point])
        engine.kill()
        # It may look reached, or never be; or CUDA says that it is gone. The room fails in any case: its engine is dead.
        fresh = gpu_memory.StreamPoints()
        said = [ask(asked, point) for asked in (points, fresh) for _ in range(25)]
        assert all(one in {"", "True", "False"} or "has probably ended" in one for one in said)
        assert first_byte(pool) in {0, 7}
    points.close()
    fresh.close()
    write(PoolViews(TINY, pool.regions), 3)
    assert wrong_rows(PoolViews(TINY, pool.regions), 3) == []


def test_memory_of_a_process_that_has_ended(device: int) -> None:
    with child(own_pool, device) as worker:
        shared = worker.hear()
        mapped = MappedRegions(shared)
        views = PoolViews(TINY, mapped.regions)
        assert wrong_rows(views, 1) == []
        worker.kill()
    # The driver keeps the memory for those who have it open.
    assert wrong_rows(views, 1) == []
    del views
    mapped.close()
    with pytest.raises(RegistrationError, match="must live, on this host"):
        MappedRegions(shared)


def test_a_tensor_lies_in_an_allocation_that_can_be_shared(device: int) -> None:
    whole = torch.zeros(3 << 20, dtype=torch.uint8, device=f"cuda:{device}")
    inner = whole[1 << 20 :]
    address, length_bytes = gpu_memory.allocation_of(device, inner.data_ptr())
    assert address <= whole.data_ptr()
    assert inner.data_ptr() + inner.numel() <= address + length_bytes
    exported = gpu_memory.export(device, inner.data_ptr())
    origin = exported.origin
    assert isinstance(origin, CudaOrigin)
    assert origin.device_uuid == gpu_memory.device_uuid(device)
    with gpu_memory.OpenedAllocation(origin) as own:
        assert own.extent.address == address
    gpu_memory.forget_export(exported)
    host = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(RegistrationError, match="is not in any device memory"):
        gpu_memory.allocation_of(device, host.data_ptr())


@pytest.mark.alone
def test_a_pool_that_does_not_fit_says_what_is_free(device: int) -> None:
    large = placement(device)
    (mapping,) = large.mappings
    far = large.model_copy(update={"mappings": (mapping.model_copy(update={"length_bytes": 1 << 45}),)})
    before = runtime.device_facts(device).free_bytes
    with pytest.raises(RegistrationError, match=r"has no \d+ bytes left .* are free"):
        MemoryPool.on_gpu(far)
    assert runtime.device_facts(device).free_bytes == pytest.approx(before, abs=64 << 20)
    assert far.memory is MemoryKind.VRAM

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from kvbridge.core.errors import InvalidInputError, RegistrationError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import RankManifest, check_manifest, fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.shared_memory import CudaOrigin, FileOrigin, SharedRegion
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.gpu_memory import OpenedAllocation
from kvbridge.pool.memory.layout import Chunking, Placement, RankPart, device_placement, host_placement
from kvbridge.pool.memory.pools import SHARED_ALIGNMENT_BYTES, MappedRegions, MemoryPool
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.pool_pages import page_address, region_of

TINY = preset("tiny-v4")
C4 = ComponentKind.C4_KV
COUNTS = {IndexSpace.FULL: 5, IndexSpace.SWA: 3, IndexSpace.REQUEST: 2}
RANK = Rank(pp=0, tp=0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch):
    fake = FakeCuda(monkeypatch)
    yield fake
    assert fake.opened == []
    assert fake.memory == {}
    assert gpu_memory._here.exported == {}


def placement(device: int = 1, **chunking: int) -> Placement:
    part = RankPart.of(TINY, RANK, pp_size=1, tp_size=1)
    part = part.model_copy(update={"memory": MemoryKind.VRAM, "device": device})
    return device_placement(TINY, part, page_counts=COUNTS, chunking=Chunking(**chunking))


def test_a_pool_is_zeroed_and_every_region_lies_in_an_allocation_that_can_be_shared(cuda):
    told: list[tuple[int, int]] = []
    planned = placement(extent_bytes=1 << 19, mapping_bytes=1 << 19)
    with MemoryPool.on_gpu(planned, on_progress=lambda done, total: told.append((done, total))) as pool:
        assert len(cuda.memory) == len(planned.mappings) > 1
        assert all(len(memory) % SHARED_ALIGNMENT_BYTES == 0 for memory in cuda.memory.values())
        assert told[-1] == (planned.total_bytes, planned.total_bytes)
        for region in pool.regions():
            assert (region.memory, region.device) == (MemoryKind.VRAM, 1)
            for address in region.extent_addresses:
                assert ctypes.string_at(address, region.page_bytes) == bytes(region.page_bytes)
        for extent in pool.extents():
            assert isinstance(extent.origin, CudaOrigin)
            assert extent.origin.device_uuid == cuda.uuids[1]
            assert cuda.handles[extent.origin.handle] + extent.offset_bytes == extent.address
        manifest = RankManifest(fingerprint=fingerprint(TINY), rank=RANK, pp_size=1, tp_size=1, regions=pool.regions())
        check_manifest(manifest, TINY)
        assert "<MemoryPool: " in repr(pool)


def test_another_process_sees_the_same_bytes_and_counts_devices_its_own_way(cuda):
    with MemoryPool.on_gpu(placement()) as pool:
        ctypes.memset(page_address(region_of(pool, *first(pool)), 2), 0xA5, 8)
        shared = pool.shared_regions()
        cuda.uuids.reverse()  # as CUDA_VISIBLE_DEVICES may do
        with cuda.other_process(), MappedRegions(shared) as mapped:
            assert [device for device, _ in cuda.opened] == [0]
            theirs = next(one for one in mapped.regions if (one.component, one.layer) == first(pool))
            assert theirs.device == 0
            address = theirs.extent_addresses[0] + 2 * theirs.page_stride_bytes
            assert ctypes.string_at(address, 8) == b"\xa5" * 8


def test_in_the_process_that_made_it_nothing_is_opened(cuda):
    with MemoryPool.on_gpu(placement()) as pool, MappedRegions(pool.shared_regions()) as mapped:
        assert cuda.opened == []
        assert mapped.regions == pool.regions()


def test_an_allocation_is_opened_once_and_closed_by_its_last_holder(cuda):
    with MemoryPool.on_gpu(placement()) as pool:
        origin = pool.extents()[0].origin
        with cuda.other_process():
            first_holder = OpenedAllocation(origin)
            with OpenedAllocation(origin) as second:
                assert second.extent == first_holder.extent
                assert len(cuda.opened) == 1
                with OpenedAllocation(origin, device=0):
                    assert len(cuda.opened) == 2
            assert len(cuda.opened) == 1
            first_holder.close()
            first_holder.close()


def test_memory_of_a_process_that_is_gone_is_refused_and_nothing_stays_open(cuda, tmp_path: Path):
    pool = MemoryPool.on_gpu(placement(extent_bytes=1 << 19, mapping_bytes=1 << 19))
    shared = pool.shared_regions()
    host = host_placement(TINY, {C4}, page_count=3)
    with MemoryPool.in_files(host, tmp_path, "h") as on_host:
        pool.close()
        with pytest.raises(RegistrationError, match="cannot open another process's"):
            MappedRegions((*on_host.shared_regions(), *shared))


def test_a_region_must_fit_its_origin(cuda, tmp_path: Path):
    with MemoryPool.on_gpu(placement()) as pool:
        good = pool.shared_regions()[0]
        beyond = good.region.model_copy(update={"extent_addresses": (SHARED_ALIGNMENT_BYTES * 99,)})
        with pytest.raises(InvalidInputError, match=r"ends at byte .* of cuda:1"):
            MappedRegions([SharedRegion(region=beyond, origins=good.origins)])
        (tmp_path / "file").write_bytes(bytes(4096))
        with pytest.raises(InvalidInputError, match="is vram, which is not what its origins hold"):
            MappedRegions([SharedRegion(region=good.region, origins=(FileOrigin(path=str(tmp_path / "file")),))])


def test_what_does_not_fit_leaves_nothing_behind(cuda):
    cuda.free_bytes = 3 << 20
    with pytest.raises(RegistrationError, match="bytes left"):
        MemoryPool.on_gpu(placement(extent_bytes=1 << 19, mapping_bytes=1 << 19))
    assert cuda.free_bytes == 3 << 20
    with pytest.raises(InvalidInputError, match="made of VRAM"):
        MemoryPool.on_gpu(host_placement(TINY, {C4}, page_count=3))


def first(pool: MemoryPool) -> tuple[ComponentKind, int]:
    region = pool.regions()[0]
    return region.component, region.layer

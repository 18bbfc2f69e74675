"""Pools in files, on a GPU and in an engine's memory, and their regions in another process."""

import ctypes
import os
from itertools import product
from pathlib import Path

import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.core.errors import InvalidInputError, RegistrationError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import RankManifest, Region, check_manifest, fingerprint
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.messages import CudaOrigin, FileOrigin, SharedRegion
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.gpu_memory import OpenedAllocation
from kvbridge.pool.memory.layout import Chunking, Placement, RankPart, device_placement, host_placement
from kvbridge.pool.memory.pools import SHARED_ALIGNMENT_BYTES, MappedRegions, MemoryPool
from kvbridge.pool.memory.shared_mapping import SharedMapping
from tests.helpers.fake_cuda import FakeCuda, page_address, region_of

TINY = preset("tiny-v4")
C4 = ComponentKind.C4_KV
SPLIT = Chunking(extent_bytes=16_384, mapping_bytes=40_960)


def host(layout=HostLayout.LAYER_FIRST, chunking=None):
    return host_placement(TINY, {C4}, page_count=9, layout=layout, chunking=chunking)


def test_a_pool_that_cannot_be_created_leaves_nothing(shm):
    placement = host(chunking=SPLIT)
    last = shm / f"kvb-1.{placement.mappings[-1].name}"
    last.touch()
    with pytest.raises(RegistrationError, match="exists"):
        MemoryPool.in_files(placement, shm, "kvb-1")
    assert list(shm.iterdir()) == [last]
    last.unlink()


def test_a_region_beyond_its_file_is_refused_before_it_is_touched(shm):
    with MemoryPool.in_files(host(), shm, "kvb-1") as pool:
        good = pool.shared_regions()[0]
        offset = host().total_bytes - good.region.page_bytes
        far = good.region.model_copy(update={"extent_addresses": (offset,)})
        with pytest.raises(InvalidInputError, match="ends at byte"):
            MappedRegions([SharedRegion(region=far, origins=good.origins)])
        with pytest.raises(InvalidInputError, match="1 extents, but 2 origins"):
            MappedRegions([SharedRegion(region=good.region, origins=good.origins * 2)])


def test_regions_of_which_one_is_gone_leave_none_mapped(shm):
    with MemoryPool.in_files(host(chunking=SPLIT), shm, "kvb-1") as pool:
        good = pool.shared_regions()[0]
        origins = (*good.origins[:-1], good.origins[-1].model_copy(update={"path": str(shm / "gone")}))
        mine = Path("/proc/self/maps").read_text().count(str(shm))
        with pytest.raises(RegistrationError, match="gone") as refused:
            MappedRegions([good, SharedRegion(region=good.region, origins=origins)])
        assert Path("/proc/self/maps").read_text().count(str(shm)) == mine, f"while {refused.value} is dealt with"


def test_a_file_that_is_shared_is_open_to_its_group_alone(shm):
    with SharedMapping.create(shm, "kvb-1", 4096) as mapping:
        assert mapping.path.stat().st_mode & 0o777 == 0o600
        mapping.share(os.getgid())
        assert mapping.path.stat().st_mode & 0o777 == 0o660


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
        for region in pool.regions:
            assert (region.memory, region.device) == (MemoryKind.VRAM, 1)
            for address in region.extent_addresses:
                assert ctypes.string_at(address, region.page_bytes) == bytes(region.page_bytes)
        for extent in pool.extents:
            assert isinstance(extent.origin, CudaOrigin)
            assert extent.origin.device_uuid == cuda.uuids[1]
            assert cuda.handles[extent.origin.handle] + extent.offset_bytes == extent.address
        manifest = RankManifest(fingerprint=fingerprint(TINY), rank=RANK, pp_size=1, tp_size=1, regions=pool.regions)
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
        assert mapped.regions == pool.regions


def test_an_allocation_is_opened_once_and_closed_by_its_last_holder(cuda):
    with MemoryPool.on_gpu(placement()) as pool:
        origin = pool.extents[0].origin
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
    region = pool.regions[0]
    return region.component, region.layer


GQA = preset("tiny-gqa")
KV = ComponentKind.MHA_KV
PAGE = 32_768  # two of four heads
PART = RankPart.of(GQA, Rank(pp=0, tp=1), pp_size=1, tp_size=2)
PAGES = 6


@pytest.fixture
def memory():
    return (ctypes.c_ubyte * (3 * PAGES * PAGE))()


def region(address: int, layer: int, **changes) -> Region:
    form = {"component": KV, "space": IndexSpace.FULL, "memory": MemoryKind.DRAM, "lane_start": 2, "lane_stop": 4}
    pages = {"pages_per_extent": PAGES, "page_count": PAGES, "page_bytes": PAGE, "page_stride_bytes": PAGE}
    return Region(**form | pages | {"layer": layer, "extent_addresses": (address,)} | changes)


def apart(buffer, /, **changes) -> list[Region]:
    return [region(ctypes.addressof(buffer) + layer * PAGES * PAGE, layer, **changes) for layer in range(3)]


def interleaved(memory) -> list[Region]:
    return [region(ctypes.addressof(memory) + layer * PAGE, layer, page_stride_bytes=3 * PAGE) for layer in range(3)]


def test_interleaved_layers_share_extents_and_are_cut_at_the_same_page(memory):
    pool = MemoryPool.adopted(GQA, PART, interleaved(memory), extent_bytes=12 * PAGE)
    assert [extent.length_bytes // PAGE for extent in pool.extents] == [12, 6]
    for layer, page in product(range(3), range(PAGES)):
        found = page_address(region_of(pool, KV, layer), page)
        assert found == ctypes.addressof(memory) + (3 * page + layer) * PAGE


def test_memory_in_a_shared_mapping_carries_its_file(shm):
    part = RankPart.of(TINY, Rank(pp=0, tp=0), pp_size=1, tp_size=1)
    counts = {IndexSpace.FULL: 3, IndexSpace.SWA: 3, IndexSpace.REQUEST: 3}
    with MemoryPool.in_files(device_placement(TINY, part, page_counts=counts), shm, "engine") as owned:
        pool = MemoryPool.adopted(TINY, part, owned.regions, shared=[mapping.extent for mapping in owned.mappings])
        assert pool.extents == owned.extents
        assert {extent.origin for extent in pool.extents} == {mapping.extent.origin for mapping in owned.mappings}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_bytes": PAGE // 2}, "layer 0: pages of 16384 bytes, but 2 lanes take 32768"),
        ({"lane_start": 0, "lane_stop": 2}, "must hold \\[2, 4\\)"),
        ({"space": IndexSpace.SWA}, "count space 'swa'"),
        ({"space": IndexSpace.HOST}, "must be device memory"),
    ],
)
def test_memory_of_another_form_is_refused(memory, change, message):
    given = apart(memory)
    with pytest.raises(InvalidInputError, match=message):
        MemoryPool.adopted(GQA, PART, [given[0].model_copy(update=change), *given[1:]])


def test_missing_foreign_and_double_regions_are_refused(memory):
    given = apart(memory)
    with pytest.raises(InvalidInputError, match="gave no memory for mha_kv layer 2 \\(1 regions"):
        MemoryPool.adopted(GQA, PART, given[:2])
    with pytest.raises(InvalidInputError, match="holds no mha_kv layer 0"):
        MemoryPool.adopted(GQA, PART, given, exclude={KV})
    with pytest.raises(InvalidInputError, match="must be host memory"):
        MemoryPool.adopted(GQA, PART, given, own_host={KV})
    with pytest.raises(InvalidInputError, match="4 regions for 3"):
        MemoryPool.adopted(GQA, PART, [*given, given[0]])


def test_layers_that_share_memory_are_refused(memory):
    given = apart(memory)
    aliased = region(given[0].extent_addresses[0], 2)
    with pytest.raises(InvalidInputError, match="share memory"):
        MemoryPool.adopted(GQA, PART, [*given[:2], aliased])

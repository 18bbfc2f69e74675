import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.core.errors import RegistrationError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import preset
from kvbridge.core.geometry.tiers import copied_components
from kvbridge.core.ids import IndexSpace, MemoryKind, Rank
from kvbridge.core.wire.messages import CudaOrigin, DeviceAllocationRequest, FileOrigin
from kvbridge.core.wire.worker_messages import Shutdown, WorkerClosed, WorkerHello, WorkerSetup
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.layout import Progress, RankPart, copy_placement, device_placement, host_placement
from kvbridge.pool.memory.pools import MappedRegions, MemoryPool
from kvbridge.worker.lifecycle import bring_memory, serve_rank
from kvbridge.worker.rank import RankIdentity
from tests.helpers.fake_cuda import FakeCuda

TINY = preset("tiny-v4")
RANK = Rank(pp=0, tp=0)
C4 = ComponentKind.C4_KV
FULL_COPY = IndexSpace.FULL_COPY
COUNTS = {IndexSpace.FULL: 5, IndexSpace.SWA: 3, IndexSpace.REQUEST: 2}
PART = RankPart.of(TINY, RANK, pp_size=1, tp_size=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def host(tmp_path: Path):
    with MemoryPool.in_files(host_placement(TINY, {C4}, page_count=4), tmp_path, "host") as pool:
        yield pool


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


def bring(order: WorkerSetup, given: Sequence[Region], stack: ExitStack, *, on_progress: Progress) -> RankIdentity:
    settings = TransportSettings.model_validate_json(order.transports)
    return bring_memory(order, settings, given, stack, on_progress=on_progress)


def setup(host, *, make=False, order=(TransportName.LOCAL,)):
    return WorkerSetup(
        geometry=TINY,
        rank=RANK,
        pp_size=1,
        tp_size=1,
        layers=PART.layers,
        device=(),
        allocate=DeviceAllocationRequest(device=1, page_counts=COUNTS, exclude=(C4,)) if make else None,
        host=host.shared_regions(),
        transports=TransportSettings(order=order).model_dump_json(),
        transfer_timeout_s=1.0,
    )


def on_gpu(cuda: FakeCuda) -> tuple[Region, ...]:
    """An engine's own cache, all of it in one allocation of cuda:1."""
    part = PART.model_copy(update={"memory": MemoryKind.VRAM, "device": 1})
    placement = device_placement(TINY, part, page_counts=COUNTS, exclude={C4})
    address = cuda.allocate(1, placement.total_bytes + (1 << 20))
    return placement.regions_at([address + (1 << 20)])


def test_a_worker_makes_what_it_is_told_to_and_page_locks_the_host_pool(cuda, host, stack):
    told: list[tuple[int, int]] = []
    memory = bring(setup(host, make=True), (), stack, on_progress=lambda *bytes_: told.append(bytes_))
    on_device = [region for region in memory.manifest.regions if region.space is not IndexSpace.HOST]
    assert {(region.memory, region.device) for region in on_device} == {(MemoryKind.VRAM, 1)}
    assert C4 not in {region.component for region in on_device}
    assert sum(cuda.registered.values()) == host.placement.total_bytes
    assert (host.placement.total_bytes, host.placement.total_bytes) in told
    shared = [piece.origin for piece in memory.memory]
    assert {type(one) for one in shared} == {CudaOrigin, FileOrigin}
    assert {one.device_uuid for one in shared if isinstance(one, CudaOrigin)} == {cuda.uuids[1]}
    with cuda.other_process(), MappedRegions(memory.made) as engine:
        first = engine.regions[0].extent_addresses[0]
        ctypes.memset(first, 0x77, 4)
        assert ctypes.string_at(on_device[0].extent_addresses[0], 4) == b"\x77" * 4
    stack.close()
    assert cuda.registered == {}
    assert len(cuda.memory) == 1, "engines may have it open until the process ends"


def test_twins_are_page_locked_and_in_no_manifest(cuda, host, stack, tmp_path):
    placed = copy_placement(TINY, [PART], copied_components(TINY, {C4}, checkpoints=False), page_counts={FULL_COPY: 3})
    with MemoryPool.in_files(placed, tmp_path, "twins") as twins:
        order = setup(host, make=True).model_copy(update={"twins": twins.shared_regions()})
        memory = bring(order, (), stack, on_progress=lambda *_: None)
        assert [region.component for region in memory.twins] == [region.component for region in placed.regions]
        assert FULL_COPY not in {region.space for region in memory.manifest.regions}
        addresses = {region.extent_addresses[0] for region in memory.twins}
        assert not any(
            extent.address <= address < extent.address + extent.length_bytes
            for extent in memory.memory
            for address in addresses
        )
        assert sum(cuda.registered.values()) == host.placement.total_bytes + placed.total_bytes
        first, other = twins.regions[0].extent_addresses[0], memory.twins[0].extent_addresses[0]
        ctypes.memset(other, 0x55, 4)
        assert ctypes.string_at(first, 4) == b"\x55" * 4
        stack.close()
    assert cuda.registered == {}


@pytest.mark.parametrize("order", [(TransportName.LOCAL,), (TransportName.NIXL, TransportName.LOCAL)])
def test_memory_that_cannot_be_shared_is_refused_where_local_is_to_reach_it(cuda, host, stack, order):
    cuda.shareable = False
    with pytest.raises(RegistrationError, match=r"no expandable_segments .*; or take `local` out of transports\.order"):
        bring(setup(host, order=order), on_gpu(cuda), stack, on_progress=lambda *_: None)


def test_a_worker_that_is_stopped_while_its_memory_is_registered_ends_with_the_next_step(cuda, host):
    """Registering takes minutes for a large pool, and the engine's process waits for its worker."""

    class Link:
        def __init__(self) -> None:
            self.said: list[object] = []
            self.answers = [setup(host), Shutdown()]

        def send(self, message: object) -> None:
            self.said.append(message)

        def receive(self, timeout_s: float) -> object:
            return self.answers.pop(0)

    link = Link()
    stopped = lambda: not isinstance(link.answers[0], WorkerSetup)  # noqa: E731 - once it has its setup
    serve_rank(link, RANK, setup_timeout_s=5.0, adopted=on_gpu(cuda), stopped=stopped)
    assert [type(message) for message in link.said] == [WorkerHello, WorkerClosed]
    assert gpu_memory._ranges.holders() == {}

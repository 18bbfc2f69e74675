"""Host memory registered with CUDA, and devices by their UUID: with stand-ins for CUDA."""

import os
from enum import IntEnum
from pathlib import Path

import pytest

from kvbridge.core.errors import ConflictError, RegistrationError, UnsupportedError
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.gpu_memory import (
    HostRegistration,
    StreamPoints,
    device_by_uuid,
    device_uuid,
)
from kvbridge.pool.memory.layout import Extent
from kvbridge.pool.memory.shared_mapping import SharedMapping
from tests.helpers.fake_cuda import FakeCuda
from tests.helpers.stand_in_cuda import cuda_stand_in

PAGE = 4096


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch):
    yield FakeCuda(monkeypatch)
    assert gpu_memory._ranges.holders() == {}


@pytest.fixture
def mappings(tmp_path: Path):
    with SharedMapping.create(tmp_path, "one", 2 * PAGE) as one, SharedMapping.create(tmp_path, "two", 6 * PAGE) as two:
        yield one, two


def test_a_failure_undoes_what_was_registered_before_and_says_what_limits_there_are(cuda, mappings, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (65_536, 65_536))

    def stop(done: int, _: int) -> None:
        if done > 2 * PAGE:
            cuda.refuse_register = "out of luck"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HostRegistration(mappings, on_progress=stop)
    assert cuda.registered == {}
    with pytest.raises(UnsupportedError, match="cuda:9"):
        HostRegistration(mappings, device=9)
    with pytest.raises(RegistrationError, match=r"two: out of luck\. Here: a memlock limit of 65536 bytes"):
        HostRegistration(mappings[1:])
    cuda.refuse_register = ""
    with HostRegistration(mappings):
        assert len(cuda.registered) == 2
        with pytest.raises(ConflictError, match="views of it are in use"):
            mappings[0].close()
    mappings[0].close()


def test_what_overlaps_registered_memory_is_refused_and_a_part_of_it_costs_nothing(cuda, tmp_path):
    def part(whole: SharedMapping, offset: int, length: int) -> Extent:
        return Extent(address=whole.address + offset, length_bytes=length)

    with SharedMapping.create(tmp_path, "whole", 4 * PAGE) as whole:
        with HostRegistration([part(whole, PAGE, PAGE)]), pytest.raises(ConflictError, match="whole mappings only"):
            HostRegistration([part(whole, 0, 2 * PAGE)])
        owner = HostRegistration([whole])
        with HostRegistration([part(whole, PAGE, PAGE)]):
            owner.close()
            assert gpu_memory._ranges.holders() == {(whole.address, 4 * PAGE): 1}


def test_no_piece_ends_inside_of_an_extent(cuda, tmp_path, monkeypatch):
    """Copy engines refuse what crosses from one registration into the next."""
    monkeypatch.setattr(gpu_memory, "PIECE_BYTES", 3 * PAGE)
    with SharedMapping.create(tmp_path, "pool", 12 * PAGE) as pool:
        starts = [0, PAGE, 2 * PAGE, 2 * PAGE + 8, 6 * PAGE, 11 * PAGE]
        extents = [Extent(address=pool.address + start, length_bytes=8) for start in starts]
        with HostRegistration([pool], extents=extents):
            found = {(address - pool.address) // PAGE: length // PAGE for address, length in cuda.registered.items()}
            assert found == {0: 2, 2: 4, 6: 5, 11: 1}, "at page borders alone, and the fewest pieces"


UUIDS = ["01" * 16, "02" * 16]


class Code(IntEnum):
    """A result of the driver."""

    CUDA_ERROR_INVALID_DEVICE = 101


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> cuda_stand_in.Runtime:
    return cuda_stand_in.install(monkeypatch.setattr)


def test_to_find_a_device_takes_memory_of_none(stand_in: cuda_stand_in.Runtime) -> None:
    """Each process of a host with eight GPUs would otherwise take half a gigabyte of all of them."""
    assert [device_by_uuid(uuid) for uuid in UUIDS] == [0, 1]
    with pytest.raises(UnsupportedError, match=rf"does not see the GPU {'03' * 16}; it sees {', '.join(UUIDS)} "):
        device_by_uuid("03" * 16)
    assert stand_in.contexts == set()


def test_an_event_of_another_process_is_opened_on_its_own_device_alone(stand_in, monkeypatch):
    with monkeypatch.context() as other_process:
        other_process.setattr(gpu_memory, "_own_events", {})
        point = gpu_memory.EventRing.on(1).record(0)
    stand_in.contexts.clear()
    points = StreamPoints()
    assert points.reached([point])
    assert stand_in.contexts == {1}
    points.close()
    cuda_stand_in.sweep(os.getpid())


def test_a_driver_that_does_not_say_is_an_error_in_words(stand_in, monkeypatch):
    driver = runtime.library("cuda.bindings.driver")
    monkeypatch.setattr(driver, "cuDeviceGet", lambda _: (Code.CUDA_ERROR_INVALID_DEVICE, None))
    with pytest.raises(UnsupportedError, match=r"cuda:7 .* answers CUDA_ERROR_INVALID_DEVICE to cuDeviceGet"):
        device_uuid(7)

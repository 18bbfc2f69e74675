"""Devices by their UUID, with a CUDA that notes which devices it was made to take memory of; tests/gpu asks a real one."""

from __future__ import annotations

import os
from enum import IntEnum

import pytest

from kvbridge.core.errors import UnsupportedError
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory import stream_points
from kvbridge.pool.memory.gpu_memory import device_by_uuid, device_uuid
from kvbridge.pool.memory.stream_points import StreamPoints
from tests.helpers.stand_in_cuda import cuda_stand_in

UUIDS = ["01" * 16, "02" * 16]


class Code(IntEnum):
    """Of the driver."""

    CUDA_ERROR_INVALID_DEVICE = 101


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> cuda_stand_in.Runtime:
    return cuda_stand_in.install(monkeypatch.setattr)


def test_to_find_a_device_takes_memory_of_none(cuda: cuda_stand_in.Runtime) -> None:
    """Each process of a host with eight GPUs would otherwise take half a gigabyte of all of them."""
    assert [device_by_uuid(uuid) for uuid in UUIDS] == [0, 1]
    with pytest.raises(UnsupportedError, match=rf"does not see the GPU {'03' * 16}; it sees {', '.join(UUIDS)} "):
        device_by_uuid("03" * 16)
    assert cuda.contexts == set()


def test_an_event_of_another_process_is_opened_on_its_own_device_alone(
    cuda: cuda_stand_in.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other_process:
        other_process.setattr(stream_points, "_own", {})
        point = stream_points.EventRing.on(1).record(0)
    cuda.contexts.clear()
    points = StreamPoints()
    assert points.reached([point])
    assert cuda.contexts == {1}
    points.close()
    cuda_stand_in.sweep(os.getpid())


def test_a_driver_that_does_not_say_is_an_error_in_words(
    cuda: cuda_stand_in.Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = runtime.library("cuda.bindings.driver")
    monkeypatch.setattr(driver, "cuDeviceGet", lambda _: (Code.CUDA_ERROR_INVALID_DEVICE, None))
    with pytest.raises(UnsupportedError, match=r"cuda:7 .* answers CUDA_ERROR_INVALID_DEVICE to cuDeviceGet"):
        device_uuid(7)

"""Shared host memory, page-locked for CUDA by every process that uses it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.cuda import runtime
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.gpu_memory import HostRegistration
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY, SharedMapping
from tests.helpers.gpu_children import child, register

pytestmark = pytest.mark.gpu
LENGTH = 64 << 20


@pytest.fixture
def mapping(tmp_path: Path) -> Iterator[SharedMapping]:
    with SharedMapping.create(DEFAULT_DIRECTORY, f"kvbridge-test-{tmp_path.name}", LENGTH) as made:
        yield made


def is_pinned(mapping: SharedMapping) -> bool:
    torch.cuda.init()  # before that, torch calls nothing pinned
    return torch.frombuffer(mapping.buffer, dtype=torch.uint8).is_pinned()


def test_a_mapping_is_page_locked_while_somebody_holds_it(mapping: SharedMapping, device: int) -> None:
    told: list[tuple[int, int]] = []
    assert not is_pinned(mapping)
    first = HostRegistration([mapping], device=device, on_progress=lambda *done: told.append(done))
    with HostRegistration([mapping], device=device):
        assert is_pinned(mapping)
    assert is_pinned(mapping)
    first.close()
    assert not is_pinned(mapping)
    assert told[-1] == (LENGTH, LENGTH)
    assert (mapping.address, LENGTH) not in gpu_memory._ranges.holders()


def test_the_copy_engines_reach_it(mapping: SharedMapping, device: int) -> None:
    source = torch.arange(LENGTH // 4, dtype=torch.int32, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    half = LENGTH // 2
    with HostRegistration([mapping], device=device), runtime.Stream.create(device) as stream:
        # The two halves change places.
        columns = (
            [source.data_ptr(), source.data_ptr() + half],
            [mapping.address + half, mapping.address],
            [half, half],
        )
        swapped = Operations(*(np.array(column, dtype=np.uint64) for column in columns))
        runtime.copy_batch(swapped, device=device, stream=stream.handle)
        stream.synchronize()
    found = torch.frombuffer(mapping.buffer, dtype=torch.int32)
    assert torch.equal(torch.cat([found[half // 4 :], found[: half // 4]]), source.cpu())
    del found


def test_a_process_that_is_killed_leaves_the_others_registration_alone(mapping: SharedMapping, device: int) -> None:
    with HostRegistration([mapping], device=device):
        with child(register, str(mapping.path), device) as process:
            assert process.hear() == "registered"
            process.kill()
        assert is_pinned(mapping)
        data = torch.full((LENGTH,), 3, dtype=torch.uint8, device=f"cuda:{device}")
        found = torch.frombuffer(mapping.buffer, dtype=torch.uint8)
        found.copy_(data)
        assert bool((found == 3).all())
        del found

"""What tests marked `gpu` have in common: why they are skipped here, how large they are.

Importable without a GPU and without CUDA's libraries.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from kvbridge.kernels.cuda import runtime

SMALL_VARIABLE = "KVBRIDGE_GPU_SMALL"
SMALL = os.environ.get(SMALL_VARIABLE) == "1"
"""Whether tests choose small sizes: under compute-sanitizer everything takes ten to fifty times as long."""


@cache
def reason_without_device() -> str:
    """Why tests marked `gpu` cannot run here; empty when they can."""
    return runtime.reason_without_device()


def skip_without_device(items: Iterable[pytest.Item]) -> None:
    """Mark every test that needs a GPU as skipped, with the reason, when there is none. For `pytest_collection_modifyitems`."""
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    if wanting and reason_without_device():
        mark = pytest.mark.skip(reason=f"needs a GPU: {reason_without_device()}")
        for item in wanting:
            item.add_marker(mark)


def environment_for(root: Path) -> dict[str, str]:
    """Environment of processes that run from a checkout that may not be installed: its root comes first on the path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))}


def wait_value(device: int, address: int, value: int, stream: int) -> None:
    """Have a stream wait until the uint32 at a device address is `value` or later; numbers go round."""
    runtime.use(device)
    driver = runtime.library("cuda.bindings.driver")
    (code,) = driver.cuStreamWaitValue32(
        stream, address, value & 0xFFFFFFFF, driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    )
    if int(code):
        raise RuntimeError(f"a stream of cuda:{device} cannot wait for a kernel's signal: {code.name}")

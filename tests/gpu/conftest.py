"""GPU tests: skipped with the reason where there is no device, so that they are collected everywhere."""

from collections.abc import Iterator

import pytest

from kvbridge.kernels.cuda import runtime
from tests.helpers.gpu import skip_without_device
from tests.helpers.twin_pools import Streams


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without_device(items)


@pytest.fixture(scope="session")
def device() -> int:
    return 0


@pytest.fixture
def streams(device: int) -> Iterator[Streams]:
    with Streams.on(device) as made:
        yield made


@pytest.fixture
def stream(streams: Streams) -> int:
    return streams.main.handle


@pytest.fixture(scope="session")
def second_device() -> int:
    """The second CUDA device, reachable from the first; skips when there is none."""
    count = runtime.device_count()
    if count < 2:
        pytest.skip(f"needs two GPUs; this process sees {count}")
    if not runtime.can_reach(0, 1):
        pytest.skip("cuda:0 cannot reach the memory of cuda:1 directly")
    return 1

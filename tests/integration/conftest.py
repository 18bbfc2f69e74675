"""Shared by the byte-exact tests: one second process for all of them, and connected nodes by parameter; and the shared cluster."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.harness import BACKENDS, require_library
from tests.helpers.live_rooms import LiveCluster, shared_cluster
from tests.helpers.rank_harness import Crossing, crossing
from tests.helpers.rank_pools import DestinationProcess


@pytest.fixture(scope="session")
def destination_process() -> Iterator[DestinationProcess]:
    """Owns the decode ranks of every `link`, one after another."""
    with DestinationProcess() as process:
        yield process


@pytest.fixture(scope="module")
def link(request: pytest.FixtureRequest, destination_process: DestinationProcess) -> Iterator[Crossing]:
    """Two connected nodes; parametrize it indirectly with a `Setting`."""
    require_library(BACKENDS[request.param.transport])
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as folder,
        crossing(request.param, destination_process, Path(folder)) as made,
    ):
        yield made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Rows are small and cores few: the threads of the oracle would mostly wait for each other."""
    import torch  # not every file needs it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def rooms_of_a_failed_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """End the rooms that a failed test leaves on a shared cluster: they are not the failure of the next test."""
    shared = next((name for name in ("live", "tiers") if name in request.fixturenames), "")
    found, failed = request.getfixturevalue(shared) if shared else None, request.session.testsfailed
    yield
    live = getattr(found, "live", found)
    if isinstance(live, LiveCluster) and request.session.testsfailed > failed:
        live.end_rooms()


@pytest.fixture(scope="session")
def endpoints() -> Iterator[LiveCluster]:
    """One cluster for all tests of endpoints."""
    with shared_cluster() as running:
        yield running


@pytest.fixture
def live(endpoints: LiveCluster) -> Iterator[LiveCluster]:
    """The same cluster for one test, which has engines of its own. Files with a cluster of their own define another `live`."""
    yield endpoints
    endpoints.detach()

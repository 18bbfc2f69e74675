"""Fixtures of the contract suite: one backend after another, each with a transport and a peer that its tests share."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.transport.base import Transport
from tests.contract.harness import BACKENDS, DEVICE_BACKENDS, Backend, Pair, PeerProcess, require_library
from tests.helpers.gpu import skip_without_device
from tests.helpers.shared_buffer import connect

MIB = 1 << 20
BUFFER_BYTES = 24 * MIB
OLD = 0x11


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each backend with host memory but those in `LEFT_OUT` of the module; tests of `any_memory` with device memory, too."""
    if "backend" not in metafunc.fixturenames:
        return
    left_out = getattr(metafunc.module, "LEFT_OUT", ())
    chosen = [pytest.param(label, id=label) for label in BACKENDS if label not in left_out]
    on_device = getattr(metafunc.function, "device_backends", ())
    chosen += [pytest.param(label, id=label, marks=pytest.mark.gpu) for label in on_device]
    metafunc.parametrize("backend", chosen, indirect=True, scope="module")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread the suite by backend as well as by file: backends share nothing, and one file takes nearly all of the time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByBackend(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file, _, test = nodeid.partition("::")
            return f"{file} {next((label for label in BACKENDS | DEVICE_BACKENDS if label in test), '')}"

    return ByBackend(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` when this process has no device."""
    skip_without_device(items)


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn; a missing library is a failure."""
    found = (BACKENDS | DEVICE_BACKENDS)[request.param]
    require_library(found)
    return found


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory in shared memory, removed afterwards."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def shared_pair(backend: Backend) -> Iterator[Pair]:
    """A transport with a registered source, connected to a peer; for tests that leave both as they were."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path,
        PeerProcess(backend, Path(path) / "peer", BUFFER_BYTES) as process,
    ):
        transport = backend.create()
        source = backend.source_buffer(Path(path) / "source", BUFFER_BYTES)
        transport.register([source.memory()])
        yield Pair(transport, source, process, connect(transport, process.endpoint))
        transport.close()
        source.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """The shared pair with a patterned source and a zeroed destination."""
    shared_pair.reset()
    return shared_pair


@pytest.fixture
def transport(backend: Backend) -> Iterator[Transport]:
    created = backend.create()
    yield created
    created.close()


@pytest.fixture
def owned(backend: Backend, shm: Path, transport: Transport) -> Iterator[Pair]:
    """A pair of the test's own, for tests that break it."""
    with PeerProcess(backend, shm / "peer", BUFFER_BYTES) as process:
        yield new_pair(backend, transport, shm, process)


def new_pair(backend: Backend, transport: Transport, shm: Path, process: PeerProcess) -> Pair:
    source = backend.source_buffer(shm / "source", BUFFER_BYTES)
    transport.register([source.memory()])
    source.fill(OLD)
    return Pair(transport, source, process, connect(transport, process.endpoint))

"""Fixtures of the contract suite: one backend after another, each with a transport and a peer that its tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge.transport.base import Transport
from tests.contract.harness import BACKENDS, Backend, Pair, PeerProcess, require_library
from tests.helpers.shared_buffer import SharedBuffer

MIB = 1 << 20
BUFFER_BYTES = 24 * MIB


@pytest.fixture(scope="module", params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn; a missing library is a failure."""
    found = BACKENDS[request.param]
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
        source = SharedBuffer(Path(path) / "source", BUFFER_BYTES)
        transport.register([source.memory()])
        yield Pair(transport, source, process, transport.connect(process.endpoint))
        transport.close()


@pytest.fixture
def pair(shared_pair: Pair) -> Pair:
    """The shared pair with a patterned source and a zeroed destination."""
    shared_pair.reset()
    return shared_pair


@pytest.fixture
def transport(backend: Backend) -> Iterator[Transport]:
    """A transport of the test's own."""
    created = backend.create()
    yield created
    created.close()

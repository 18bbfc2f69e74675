from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.core.errors import ConflictError, RegistrationError, UnsupportedError
from kvbridge.pool.memory.host_registration import HostRegistration, registered_ranges
from kvbridge.pool.memory.shared_mapping import SharedMapping
from tests.helpers.fake_cuda import FakeCuda

PAGE = 4096


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch):
    yield FakeCuda(monkeypatch)
    assert registered_ranges() == {}


@pytest.fixture
def mappings(tmp_path: Path):
    with (
        SharedMapping.create(tmp_path, "one", 2 * PAGE) as one,
        SharedMapping.create(tmp_path, "two", 6 * PAGE) as two,
    ):
        yield one, two


def test_a_registered_mapping_cannot_be_closed(cuda, mappings):
    with HostRegistration(mappings), pytest.raises(ConflictError, match="views of it are in use"):
        mappings[0].close()
    mappings[0].close()


def test_a_failure_undoes_what_was_registered_before_and_says_what_limits_there_are(cuda, mappings, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (65_536, 65_536))

    def stop(done: int, _: int) -> None:
        if done > 2 * PAGE:
            cuda.refuse_register = "out of luck"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HostRegistration(mappings, on_progress=stop)
    assert cuda.registered == {}
    with pytest.raises(RegistrationError, match=r"two: out of luck\. Here: a memlock limit of 65536 bytes"):
        HostRegistration(mappings[1:])
    cuda.refuse_register = ""
    with HostRegistration(mappings):
        assert len(cuda.registered) == 2


def test_parts_of_what_is_registered_are_refused(cuda, tmp_path):
    class Part:
        path = tmp_path / "part"
        address, length_bytes = 0, PAGE

        @property
        def buffer(self) -> memoryview:
            return memoryview(b"")

    with SharedMapping.create(tmp_path, "whole", 4 * PAGE) as whole, HostRegistration([whole]):
        part = Part()
        part.address = whole.address + PAGE
        with pytest.raises(ConflictError, match="register whole mappings only"):
            HostRegistration([part])


def test_without_such_a_device_nothing_is_registered(cuda, mappings):
    with pytest.raises(UnsupportedError, match="cuda:9"):
        HostRegistration(mappings, device=9)

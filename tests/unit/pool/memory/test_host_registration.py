from __future__ import annotations

from pathlib import Path

import pytest

from kvbridge.core.errors import ConflictError, RegistrationError, UnsupportedError
from kvbridge.pool.memory import gpu_memory
from kvbridge.pool.memory.extent import Extent
from kvbridge.pool.memory.gpu_memory import HostRegistration, registered_ranges
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


def test_what_overlaps_registered_memory_is_refused_and_a_part_of_it_costs_nothing(cuda, tmp_path):
    def part(whole: SharedMapping, offset: int, length: int) -> Extent:
        return Extent(address=whole.address + offset, length_bytes=length)

    with SharedMapping.create(tmp_path, "whole", 4 * PAGE) as whole:
        with HostRegistration([part(whole, PAGE, PAGE)]), pytest.raises(ConflictError, match="whole mappings only"):
            HostRegistration([part(whole, 0, 2 * PAGE)])
        owner = HostRegistration([whole])
        with HostRegistration([part(whole, PAGE, PAGE)]):
            owner.close()
            assert registered_ranges() == {(whole.address, 4 * PAGE): 1}


def test_no_piece_ends_inside_of_an_extent(cuda, tmp_path, monkeypatch):
    """Copy engines refuse what crosses from one registration into the next."""
    monkeypatch.setattr(gpu_memory, "PIECE_BYTES", 3 * PAGE)
    with SharedMapping.create(tmp_path, "pool", 12 * PAGE) as pool:
        starts = [0, PAGE, 2 * PAGE, 2 * PAGE + 8, 6 * PAGE, 11 * PAGE]
        extents = [Extent(address=pool.address + start, length_bytes=8) for start in starts]
        with HostRegistration([pool], extents=extents):
            found = {(address - pool.address) // PAGE: length // PAGE for address, length in cuda.registered.items()}
            assert found == {0: 2, 2: 4, 6: 5, 11: 1}, "at page borders alone, and the fewest pieces"


def test_without_such_a_device_nothing_is_registered(cuda, mappings):
    with pytest.raises(UnsupportedError, match="cuda:9"):
        HostRegistration(mappings, device=9)

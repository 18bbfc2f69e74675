"""Kernels from source to machine code, and the files that keep it; no device is needed for that."""

from pathlib import Path

import pytest

from kvbridge.kernels.cuda import programs
from kvbridge.kernels.cuda.programs import CACHE_VARIABLE, Source, cache_directory

ARCHITECTURE = "sm_90a"
SOURCE = Source("swap_in")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Source]:
    """The sources compiled since; the cache is an empty directory, and nothing is remembered in this process."""
    seen: list[Source] = []

    def compile_once(source: Source, architecture: str) -> bytes:
        seen.append(source)
        return f"code of {source.name} {source.defines} for {architecture}".encode()

    monkeypatch.setattr(programs, "compile_for", compile_once)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "kernels"))
    programs._machine_code.cache_clear()
    yield seen
    programs._machine_code.cache_clear()


def _code(source: Source = SOURCE) -> bytes:
    programs._machine_code.cache_clear()  # as another process would
    return programs._machine_code(source, ARCHITECTURE)[0]


def test_a_kernel_is_compiled_once_for_all_processes(compiled: list[Source]) -> None:
    assert _code() == _code()
    assert compiled == [SOURCE]


def test_a_damaged_file_costs_a_compilation_and_is_replaced(compiled: list[Source]) -> None:
    whole = _code()
    directory = cache_directory()
    assert directory is not None
    (file,) = directory.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert _code() == whole
    assert _code() == whole
    assert len(compiled) == 2


def test_a_user_without_a_home_compiles_every_time(compiled: list[Source], monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert _code() == _code()
    assert len(compiled) == 2

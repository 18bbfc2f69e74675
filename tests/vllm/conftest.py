"""The suite's servers, and what is looked at after each case. `make test-vllm`; not a part of `make test`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.vllm.fleet import PLANS, Fleet
from tests.vllm.servers import ROOT, Setup

CASE_S = 900.0
"""For one case, the start of all servers included; the first one waits for it."""
_said: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--vllm", type=Path, default=ROOT / "out/vllm/venv/bin/python", help="Python of the environment with vLLM"
    )
    parser.addoption("--vllm-work", type=Path, default=ROOT / "out/vllm", help="for models, logs and results")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(CASE_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _said:
        terminalreporter.write_line(line)


@pytest.fixture
def say() -> list[str]:
    return _said


@pytest.fixture(scope="session")
def setup(request: pytest.FixtureRequest) -> Setup:
    """Where servers find what they need."""
    python, work = (request.config.getoption(name).absolute() for name in ("--vllm", "--vllm-work"))
    if not python.exists():
        raise pytest.UsageError(f"{python} is not there: make test-vllm sets it up, --vllm names another")
    work.mkdir(parents=True, exist_ok=True)
    for log in work.glob("*.log"):
        log.unlink()
    return Setup(python, work)


@pytest.fixture(scope="session")
def fleet(setup: Setup) -> Iterator[Fleet]:
    begun_s = time.monotonic()
    fleet = Fleet(setup, [plan() for plan in PLANS])
    _said.append(f"{len(PLANS)} servers answered {time.monotonic() - begun_s:.0f} s after their start")
    try:
        yield fleet
    finally:
        fleet.end()
        _said.append(
            f"likelihoods of equal tokens differed by {fleet.largest_gap:.2g} nats at most; ties: {fleet.ties or 'none'}"
        )
        _said.append(f"starts, restarts included: {', '.join(f'{each:.0f} s' for each in fleet.starts_s)}")
    assert not [one for one in psutil.Process().children(recursive=True) if "vllm" in " ".join(one.cmdline()).lower()]


@pytest.fixture(autouse=True)
def nothing_is_missing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each case all engines answer, and no block, room or request is left on any side."""
    yield
    if "fleet" in request.fixturenames:
        fleet: Fleet = request.getfixturevalue("fleet")
        assert not (missing := fleet.missing()), "\n".join(missing)


# Servers outlive cases and files, and a case that has killed one starts it again: what is left is looked at after all of them.
@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_by_the_file() -> None:
    """See above."""


@pytest.fixture(autouse=True)
def nothing_is_left_by_the_test(nothing_is_left_by_the_file: None) -> None:
    """See above."""

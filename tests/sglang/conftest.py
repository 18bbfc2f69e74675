"""The suite's servers, and what is looked at after each case. `make test-sglang`; not a part of `make test`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.fleet import PLANS, Fleet
from tests.sglang.servers import Setup
from tests.vllm.servers import ROOT

CASE_S = 900.0
"""For one case, the start of all servers included; the first one waits for it."""
_said: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Say where SGLang is; called by pytest."""
    python = ROOT / "out/sglang/venv/bin/python"
    parser.addoption("--sglang", type=Path, default=python, help="Python of the environment with SGLang")
    parser.addoption("--sglang-work", type=Path, default=ROOT / "out/sglang", help="for models, logs and results")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give cases the time that servers take; called by pytest."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(CASE_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the servers were like; called by pytest."""
    for line in _said:
        terminalreporter.write_line(line)


@pytest.fixture
def say() -> list[str]:
    """Lines that the summary ends with."""
    return _said


@pytest.fixture(scope="session")
def setup(request: pytest.FixtureRequest) -> Setup:
    """Where servers find what they need."""
    python, work = (request.config.getoption(name).absolute() for name in ("--sglang", "--sglang-work"))
    if not python.exists():
        raise pytest.UsageError(f"{python} is not there: make test-sglang sets it up, --sglang names another")
    work.mkdir(parents=True, exist_ok=True)
    for log in work.glob("*.log"):
        log.unlink()
    return Setup(python, work)


@pytest.fixture(scope="session")
def fleet(setup: Setup) -> Iterator[Fleet]:
    """All servers with kvbridge, and the one alone."""
    begun_s = time.monotonic()
    fleet = Fleet(setup, [plan() for plan in PLANS])
    _said.append(f"{len(PLANS)} servers answered {time.monotonic() - begun_s:.0f} s after their start")
    try:
        yield fleet
    finally:
        fleet.end()
        gap = f"likelihoods of equal tokens differed by {fleet.largest_gap:.2g} nats at most"
        _said.append(f"{gap}; ties: {fleet.ties or 'none'}")


@pytest.fixture(autouse=True)
def nothing_is_missing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each case all engines answer, and no page or room is left on any side."""
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

"""The common part of the suites' conftest files: options, fixtures, and what is looked at after each case."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.engines.fleet import Fleet
from tests.engines.servers import ROOT, Setup

CASE_S = 900.0
"""For one case, the start of all servers included; the first one waits for it."""
ENGINES = ("vllm", "sglang")
_said: list[str] = []


def add_options(parser: pytest.Parser, engine: str) -> None:
    """Let the caller say where the engine is."""
    python = ROOT / "out" / engine / "venv/bin/python"
    parser.addoption(f"--{engine}", type=Path, default=python, help=f"Python of the environment with {engine}")
    parser.addoption(f"--{engine}-work", type=Path, default=ROOT / "out" / engine, help="for models, logs and results")


def setup_of(config: pytest.Config, engine: str) -> Setup:
    """Return where servers find what they need. Logs of former runs are removed."""
    python, work = (config.getoption(name).absolute() for name in (f"--{engine}", f"--{engine}-work"))
    if not python.exists():
        raise pytest.UsageError(f"{python} is not there: make test-{engine} sets it up, --{engine} names another")
    work.mkdir(parents=True, exist_ok=True)
    for log in work.glob("*.log"):
        log.unlink()
    return Setup(python, work)


def running(start: Callable[[], Fleet], engine: str) -> Iterator[Fleet]:
    """Have servers run as long as the caller's fixture, and say what they were like."""
    begun_s = time.monotonic()
    fleet = start()
    _said.append(f"{len(fleet.servers)} servers answered {time.monotonic() - begun_s:.0f} s after their start")
    try:
        yield fleet
    finally:
        fleet.end()
        gap = f"likelihoods of equal tokens differed by {fleet.largest_gap:.2g} nats at most"
        _said.append(f"{gap}; ties: {fleet.ties or 'none'}")
        _said.append(f"starts, restarts included: {', '.join(f'{each:.0f} s' for each in fleet.starts_s)}")
    left = [one.as_dict(["cmdline"]) for one in psutil.Process().children(recursive=True) if one.is_running()]
    assert not [one for one in left if engine in " ".join(one["cmdline"] or ()).lower()]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give cases the time that servers take; called by pytest."""
    for item in items:
        if any(item.path.is_relative_to(ROOT / "tests" / engine) for engine in ENGINES):
            item.add_marker(pytest.mark.timeout(CASE_S))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what the servers were like; called by pytest."""
    while _said:
        terminalreporter.write_line(_said.pop(0))


@pytest.fixture
def say() -> list[str]:
    """Lines that the summary ends with."""
    return _said


@pytest.fixture(autouse=True)
def nothing_is_missing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each case all engines answer, and no page, room or request is left on any side."""
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

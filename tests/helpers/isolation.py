"""A pytest plugin: no test leaves anything behind for the next one, and no unit test starts a process or opens a socket.

A plugin and not part of a `conftest.py`, whose hooks do not see the fixtures of a session. `tests/conftest.py` registers it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import process_state

OWN_FIXTURES = {"nothing_is_left_by_the_file", "nothing_is_left_by_the_test"}


@dataclass
class Wider:
    """What fixtures that are wider than one test have started: it is theirs until the end of their file, or of the session."""

    in_file: bool = False
    """Whether this file has used one: then its threads and processes can only be judged at its end."""
    helpers: process_state.Helpers = field(default_factory=dict)
    """Those of fixtures wider than a file."""


_wider = Wider()


OUTSIDE = {"subprocess.Popen", "os.fork", "os.posix_spawn", "socket.bind", "socket.connect"}
"""What a unit test does not do (events of `sys.addaudithook`): with these, it is an integration test."""
_rule = SimpleNamespace(holds=False)
"""Whether a unit test runs that is not marked `outside`."""


def _refuse_outside(event: str, _arguments: tuple[object, ...]) -> None:
    if _rule.holds and event in OUTSIDE:
        raise AssertionError(f"{event} in a unit test: it belongs into tests/integration, or is marked `outside`")


def _held_to_the_rule(item: pytest.Item) -> Iterator[Any]:
    _rule.holds = item.nodeid.startswith("tests/unit/") and item.get_closest_marker("outside") is None
    try:
        return (yield)
    finally:
        _rule.holds = False


pytest_runtest_setup = pytest.hookimpl(wrapper=True, specname="pytest_runtest_setup")(_held_to_the_rule)
pytest_runtest_call = pytest.hookimpl(wrapper=True, specname="pytest_runtest_call")(_held_to_the_rule)
sys.addaudithook(_refuse_outside)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Iterator[Any]:
    """Note what a fixture that is wider than a test starts; called by pytest."""
    ours = fixturedef.func.__module__.startswith("tests.") and fixturedef.argname not in OWN_FIXTURES
    if not ours or fixturedef.scope == "function":
        return (yield)
    before = process_state.read_helpers()
    try:
        return (yield)
    finally:
        _wider.in_file = True
        if fixturedef.scope != "module":
            _wider.helpers |= {k: v for k, v in process_state.read_helpers().items() if k not in before}


def _read_helpers() -> process_state.Helpers:
    return {key: what for key, what in process_state.read_helpers().items() if key not in _wider.helpers}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_by_the_file() -> Iterator[None]:
    """After a file's last test and its fixtures, its process has the names, threads and children that it had before."""
    _wider.in_file = False
    names, helpers = process_state.read_names(), _read_helpers()
    yield
    left = [*process_state.changed_names(names, process_state.read_names())]
    left += process_state.still_there(helpers, _read_helpers)
    assert not left, "this file leaves behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def nothing_is_left_by_the_test(nothing_is_left_by_the_file: None) -> Iterator[None]:
    """After a test and its fixtures, its process is as it was before."""
    found, helpers = process_state.read_settings(), _read_helpers()
    yield
    left = [*process_state.changed_settings(found, process_state.read_settings())]
    if not _wider.in_file:
        left += process_state.still_there(helpers, _read_helpers)
    assert not left, "this test leaves behind:\n" + "\n".join(left)

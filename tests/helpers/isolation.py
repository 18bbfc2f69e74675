"""A pytest plugin: no test leaves anything behind for the next one, and no unit test starts a process or opens a socket.

A plugin and not part of a `conftest.py`, whose hooks do not see the fixtures of a session. `tests/conftest.py` registers it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers import zygote

OWN_FIXTURES = {"nothing_is_left_by_the_file", "nothing_is_left_by_the_test"}


@dataclass
class Wider:
    """Resources of fixtures that are wider than one test: it is theirs until the end of their file, or of the session."""

    in_file: bool = False
    """Whether this file has used one: then its threads and processes can only be judged at its end."""
    helpers: Helpers = field(default_factory=dict)
    """Those of fixtures wider than a file."""


_wider = Wider()


OUTSIDE = {"subprocess.Popen", "os.fork", "os.posix_spawn", "socket.bind", "socket.connect"}
"""Forbidden to a unit test (events of `sys.addaudithook`): with these, it is an integration test."""
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
    before = read_helpers()
    try:
        return (yield)
    finally:
        _wider.in_file = True
        if fixturedef.scope != "module":
            _wider.helpers |= {k: v for k, v in read_helpers().items() if k not in before}


def _read_helpers() -> Helpers:
    return {key: what for key, what in read_helpers().items() if key not in _wider.helpers}


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_by_the_file() -> Iterator[None]:
    """After a file's last test and its fixtures, its process has the names, threads and children that it had before."""
    _wider.in_file = False
    names, helpers = read_names(), _read_helpers()
    yield
    left = [*changed_names(names, read_names())]
    left += still_there(helpers, _read_helpers)
    assert not left, "this file leaves behind:\n" + "\n".join(left)


@pytest.fixture(autouse=True)
def nothing_is_left_by_the_test(nothing_is_left_by_the_file: None) -> Iterator[None]:
    """After a test and its fixtures, its process is as it was before."""
    found, helpers = read_settings(), _read_helpers()
    yield
    left = [*changed_settings(found, read_settings())]
    if not _wider.in_file:
        left += still_there(helpers, _read_helpers)
    assert not left, "this test leaves behind:\n" + "\n".join(left)


State = dict[str, object]
Helpers = dict[tuple[str, int | None], str]
ModuleNames = dict[str, dict[str, object]]

GRACE_S = 10.0
"""Threads and children that were told to end may take this long; nobody waits where nothing is left over."""
CHANGED_BY_PYTEST = {"PYTEST_CURRENT_TEST", "PYTEST_VERSION"}
READ_BY_LIBRARIES = ("MC_", "UCX_")
"""Variables that Mooncake and UCX read once a process: whoever loads them first sets them for everybody after."""
WATCHED_SIGNALS = set(signal.Signals) - {signal.SIGALRM}
"""pytest-timeout takes SIGALRM during a test, and gives it back early when the test fails."""
ENDS_WITH_THE_PROCESS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "import zygote")
"""Helpers that are started once and end with whoever started them."""
ONCE_A_PROCESS = {
    "kvbridge.pool.memory.gpu_memory._uuids",  # names of devices
    "kvbridge.kernels.cuda.programs._loaded",  # compiled kernels
    "kvbridge.kernels.digest._devices",  # compiled kernels
    "kvbridge.transport.mooncake.library._process_environment",  # settings that the library reads once
    "kvbridge.transport.nixl.agent._process_settings",  # settings that the library reads once
    # Locks of device memory, by their name in each module:
    "kvbridge.transport.local.host.PROCESS_LOCK_FILES",
    "kvbridge.transport.local.transport.PROCESS_LOCK_FILES",
    "kvbridge.worker.lifecycle.PROCESS_LOCK_FILES",
}
"""Module state that is meant to outlive a test."""
OURS = ("kvbridge.", "tests.helpers.")
BOOKKEEPING = {__name__, "tests.helpers.isolation"}
"""Modules that note what they see, so they change as they look."""


def read_settings() -> State:
    """State that a test may change in its process, and must change back. Quick: it is read twice for each test."""
    watched = [name for name in os.environ.keys() - CHANGED_BY_PYTEST if not name.startswith(READ_BY_LIBRARIES)]
    found: State = {f"environment variable {name}": os.environ[name] for name in watched}
    found["working directory"] = os.getcwd()  # noqa: PTH109 - several times quicker than Path.cwd()
    found |= {f"handler of {number.name}": signal.getsignal(number) for number in WATCHED_SIGNALS}
    root = logging.getLogger()
    handlers = [handler for handler in root.handlers if not type(handler).__module__.startswith("_pytest.")]
    found["root logger"] = (root.level, root.disabled, root.manager.disable, handlers)
    return found | {name: len(held) for name, held in _containers()}


def read_names() -> ModuleNames:
    return {name: vars(module).copy() for name, module in list(sys.modules.items()) if name.startswith(OURS)}


def read_helpers() -> Helpers:
    found: Helpers = {("thread", thread.ident): thread.name for thread in threading.enumerate()}
    for pid in _children():
        command = _command(pid)
        if not any(name in command for name in ENDS_WITH_THE_PROCESS):
            found["child process", pid] = command or "ended, not waited for"
    return found


def changed_settings(before: State, after: State) -> Iterator[str]:
    """Return the differences, one line each. The state of a module at its import is nobody's doing."""
    if before == after:
        return
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, "not there"), after.get(name, "not there")
        if old != new and not (name not in before and name.startswith("size of")):
            yield f"{name}: {new!r:.200}, was {old!r:.200}"


def changed_names(before: ModuleNames, after: ModuleNames) -> Iterator[str]:
    """The global names that stand for another object than before, one line each."""
    for module, values in before.items():
        now = after.get(module, {})
        for name, value in values.items():
            if now.get(name) is not value:
                yield f"{module}.{name}: {now.get(name)!r:.200}, was {value!r:.200}"


def still_there(before: Helpers, read: Callable[[], Helpers]) -> list[str]:
    """Which threads and children are new, one line each, after waiting for them to end."""
    until_s = time.monotonic() + GRACE_S
    while new := {key: what for key, what in read().items() if key not in before}:
        if time.monotonic() >= until_s:
            break
        time.sleep(0.01)
    return [f"{kind} {number}: {what}" for (kind, number), what in new.items()]


class _Known:
    """The containers of the last look. To look for them takes long; to see that nothing is new does not."""

    def __init__(self) -> None:
        self.loaded = 0
        self.ours: list[dict[str, object]] = []
        self.names = -1
        self.containers: list[tuple[str, Sized]] = []


_known = _Known()


def _containers() -> list[tuple[str, Sized]]:
    if _known.loaded != len(sys.modules):
        _known.loaded, _known.names = len(sys.modules), -1
        _known.ours = [vars(module) for name, module in list(sys.modules.items()) if _is_watched(name)]
    if _known.names != (names := sum(map(len, _known.ours))):
        _known.names = names
        _known.containers = [(f"size of {full}", held) for each in _known.ours for full, held in _find_containers(each)]
    return _known.containers


def _is_watched(module: str) -> bool:
    return module.startswith(OURS) and module not in BOOKKEEPING


def _find_containers(values: Mapping[str, object]) -> Iterator[tuple[str, Sized]]:
    """Containers that can grow: containers with a global name of a module, and those in objects of ours with a global name."""
    for name, value in values.items():
        full = f"{values['__name__']}.{name}"
        if name.startswith("__") or full in ONCE_A_PROCESS:
            continue
        if isinstance(value, (dict, list, set)):
            yield full, value
        elif type(value).__module__.startswith(OURS):
            parts = getattr(value, "__dict__", {}).items()
            yield from ((f"{full}.{part}", held) for part, held in parts if isinstance(held, (dict, list, set)))


def _children() -> list[int]:
    """The children of this process; but for those of dead daemons, which are waited for here."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except FileNotFoundError:  # the thread has ended meanwhile
            continue
    return [pid for pid in found if not _is_of_a_daemon(pid)]


def _is_of_a_daemon(pid: int) -> bool:
    with suppress(OSError):
        if zygote.NAME in Path(f"/proc/{pid}/comm").read_text():
            os.waitpid(pid, os.WNOHANG)
            return True
    return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except FileNotFoundError:
        return ""

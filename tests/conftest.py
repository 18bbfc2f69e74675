"""Shared by all suites: how much Hypothesis tries, the order of files, and that no test leaves anything behind."""

import contextlib
import gc
import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from tests.helpers import isolation, zygote
from tests.run import MARK, NEW_DURATIONS, read_durations

with contextlib.suppress(ImportError):  # GPU tests also run where only pytest is installed
    from hypothesis import Phase, settings

    # How often a test is tried; tests whose examples are dear take a fraction of it (tests/helpers/examples.py).
    # Without explanations: these trace every line once something has failed, and the time of the test is over before it is told.
    options = {"deadline": None, "phases": [phase for phase in Phase if phase is not Phase.explain]}
    settings.register_profile("default", max_examples=50, **options)
    settings.register_profile("unit", max_examples=10, **options)
    settings.register_profile("thorough", max_examples=1000, **options)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# Coloured tracebacks of every defect that a test causes take a tenth of the time of all unit tests.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

_files: dict[str, dict[str, None]] = {}
"""Which files each worker process has run, in that order: which worker gets a file depends on how quick they are."""
_failed: dict[str, tuple[str, ...]] = {}
"""Each file with a failure, and those that its process had run before."""
_durations: dict[str, float] = {}
"""Seconds that each file has taken."""
KINDS_S = {"faults": 60, "contract": 60, "docs": 60, "deploy": 40, "integration": 30, "operate": 20, "page": 20}
"""Estimated seconds of a file that was not measured yet, by its folder."""


def pytest_collection() -> None:
    """Make no pauses while everything is imported; called by pytest."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Have the collector leave alone what lives for as long as the process: it would look at millions of objects each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have those files first that take long, under `tests.run`; files that take about as long stay in their drawn order."""
    if MARK in os.environ:
        known = read_durations()
        files = {item.nodeid.partition("::")[0] for item in items}
        took_s = {file: known.get(file, float(KINDS_S.get(Path(file).parts[1], 1))) for file in files}
        items.sort(key=lambda item: -max(0, math.frexp(took_s[item.nodeid.partition("::")[0]])[1]))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell `tests.run` what each file took; called by pytest."""
    if NEW_DURATIONS in os.environ and not hasattr(session.config, "workerinput"):
        Path(os.environ[NEW_DURATIONS]).write_text(json.dumps(_durations))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note where a test ran; called by pytest in the process that prints."""
    worker, file = getattr(report, "worker_id", ""), report.nodeid.partition("::")[0]
    files = _files.setdefault(worker, {})
    files[file] = None
    _durations[file] = _durations.get(file, 0.0) + report.duration
    if report.failed and file not in _failed:
        _failed[file] = tuple(files)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to repeat what a file met in its process; called by pytest."""
    seed = config.getoption("randomly_seed", None)
    for file, files in _failed.items() if len(_files) > 1 else ():
        terminalreporter.section(f"the process of {file} again", sep="-")
        terminalreporter.write_line(f"python -m pytest --randomly-seed={seed} {' '.join(files)}")


@pytest.fixture
def executed() -> Iterator[None]:
    """Daemons that a test starts begin as users' do: they are not forked."""
    with zygote.executed():
        yield


def pytest_configure(config: pytest.Config) -> None:
    """Have every test looked at; called by pytest."""
    # What a script runs in its background, or under nohup, is born ignoring these, and so would be all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(isolation)
    zygote.install()

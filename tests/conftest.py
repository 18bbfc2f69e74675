"""What all suites share: how much Hypothesis tries, and that no test leaves anything behind for the next one."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.helpers import isolation, zygote

with contextlib.suppress(ImportError):  # GPU tests also run where only pytest is installed
    from hypothesis import settings

    # How often a test is tried; tests whose examples are dear take a fraction of it (tests/helpers/examples.py).
    settings.register_profile("default", max_examples=100, deadline=None)
    settings.register_profile("thorough", max_examples=1000, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


_files: dict[str, dict[str, None]] = {}
"""Which files each worker process has run, in that order: which worker gets a file depends on how quick they are."""
_failed: dict[str, tuple[str, ...]] = {}
"""Each file with a failure, and those that its process had run before."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note where a test ran; called by pytest in the process that prints."""
    worker, file = getattr(report, "worker_id", ""), report.nodeid.partition("::")[0]
    files = _files.setdefault(worker, {})
    files[file] = None
    if report.failed and file not in _failed:
        _failed[file] = tuple(files)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how to repeat what a file met in its process; called by pytest."""
    seed = config.getoption("randomly_seed", None)
    for file, files in _failed.items() if len(_files) > 1 else ():
        terminalreporter.section(f"the process of {file} again", sep="-")
        terminalreporter.write_line(f"python -m pytest --randomly-seed={seed} {' '.join(files)}")


def pytest_configure(config: pytest.Config) -> None:
    """Have every test looked at; called by pytest."""
    # What a script runs in its background, or under nohup, is born ignoring these, and so would be all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    config.pluginmanager.register(isolation)
    zygote.install()

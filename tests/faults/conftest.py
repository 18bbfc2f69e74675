"""The suite's report: a matrix of all strikes, printed, and kept in out/faults when the whole suite was run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.matrix import Matrix

ROW = "strike"
"""The property of a test's report that carries a row: reports travel from the process that ran the test to the one that prints."""
_MATRIX = Matrix()


@pytest.fixture
def matrix(record_property: Callable[[str, object], None]) -> Iterator[Matrix]:
    """Where a strike writes down what became of it."""
    mine = Matrix()
    yield mine
    for row in mine.rows:
        record_property(ROW, {str(column): _plain(value) for column, value in row.items()})


def _plain(value: object) -> object:
    """As it can travel between processes: text instead of a member of an enumeration."""
    return str(value) if isinstance(value, str) else value


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the rows of a test; called by pytest in the process that prints."""
    if report.when == "teardown":
        _MATRIX.rows.extend(value for name, value in report.user_properties if name == ROW)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix; called by pytest."""
    if _MATRIX.rows:
        terminalreporter.section("strikes")
        for line in _MATRIX.lines():
            terminalreporter.write_line(line)
        if not config.option.markexpr and not config.option.keyword:
            _MATRIX.write(Path(config.rootpath) / "out" / "faults")

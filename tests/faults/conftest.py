"""The suite's report: a matrix of all strikes, printed, and kept in out/faults when the whole suite was run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.matrix import Matrix

_MATRIX = Matrix()


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    """Where every strike writes down what became of it."""
    return _MATRIX


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix; called by pytest."""
    if _MATRIX.rows:
        terminalreporter.section("strikes")
        for line in _MATRIX.lines():
            terminalreporter.write_line(line)
        if not config.option.markexpr and not config.option.keyword:
            _MATRIX.write(Path(config.rootpath) / "out" / "faults")

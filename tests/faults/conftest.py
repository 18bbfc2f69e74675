"""The matrix of all strikes: printed, and kept in out/faults when the whole suite was run."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cells import State

Row = dict[str, Any]
"""A strike: where, to whom, and what became of the room in each state. One that failed has no more than that."""
PROPERTY = "strike"
COLUMNS = ("transport", "victim", "fault", *map(str, State), "noticed_s", "recovered_s")
LEGEND = """\
End of each room on the prefill/decode side: C completed, A aborted, L failed because somebody was lost, W and w failed and
aborted with a rank worker, T failed by the transport, - not known there. `noticed_s`: from the strike until rooms in flight
had failed; `recovered_s`: from the end of the strike until everything was free again and the next room had crossed."""
_rows: list[dict[str, str]] = []


@pytest.fixture
def matrix(record_property: Callable[[str, object], None]) -> Iterator[list[Row]]:
    rows: list[Row] = []
    yield rows
    for row in rows:
        record_property(PROPERTY, {str(column): str(value) for column, value in row.items()})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the rows of a test; called by pytest in the process that prints."""
    if report.when == "teardown":
        _rows.extend(value for name, value in report.user_properties if name == PROPERTY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _rows:
        return
    table = [[row.get(column, "FAILED" if column == State.ADMITTED else "") for column in COLUMNS] for row in _rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *table, strict=True)]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |"
        for row in (COLUMNS, ["-" * width for width in widths], *table)
    ]
    terminalreporter.section("strikes")
    for line in lines:
        terminalreporter.write_line(line)
    if not config.option.markexpr and not config.option.keyword:
        folder = Path(config.rootpath) / "out" / "faults"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "matrix.md").write_text(f"# Strikes\n\n{LEGEND}\n\n" + "\n".join(lines) + "\n")

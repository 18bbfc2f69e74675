"""What the strikes led to, as a table for people and as JSON for programs.

Owns: the rows and both files. Must not know: how strikes are made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.cells import Fault, State, Victim

LEGEND = """\
End of each room on the prefill/decode side: C completed, A aborted, L failed because somebody was lost, W and w failed and
aborted with a rank worker, T failed by the transport, - not known there. `noticed_s`: from the strike until rooms in flight
had failed; `recovered_s`: from the end of the strike until everything was free again and the next room had crossed."""
COLUMNS = ("transport", "victim", "fault", *State, "noticed_s", "recovered_s")


@dataclass
class Matrix:
    """One row for each strike; each cell of it is what became of the room in that state (see `cells`)."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        transport: str,
        victim: Victim,
        fault: Fault,
        outcomes: Mapping[State, str],
        *,
        noticed_s: float,
        recovered_s: float,
    ) -> None:
        """A strike that ended as it should."""
        ends = {str(state): outcome for state, outcome in outcomes.items()}
        times = {"noticed_s": noticed_s or "", "recovered_s": recovered_s}
        self.rows.append({"transport": transport, "victim": victim, "fault": fault, **ends, **times})

    @contextmanager
    def notes_failure(self, transport: str, victim: Victim, fault: Fault) -> Iterator[None]:
        """A strike that does not."""
        try:
            yield
        except BaseException:
            self.rows.append({"transport": transport, "victim": victim, "fault": fault, State.ADMITTED.value: "FAILED"})
            raise

    def lines(self) -> list[str]:
        """The table as Markdown."""
        table = [[str(row.get(column, "")) for column in COLUMNS] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(COLUMNS, *table, strict=True)]
        rows = [list(COLUMNS), ["-" * width for width in widths], *table]
        return [
            "| " + " | ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
        ]

    def write(self, folder: Path) -> None:
        """Both files."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "matrix.json").write_text(json.dumps(self.rows, indent=2) + "\n")
        (folder / "matrix.md").write_text(f"# Strikes\n\n{LEGEND}\n\n" + "\n".join(self.lines()) + "\n")

"""What a part of the benchmark writes down while it runs, so that a deadline leaves what was measured before it.

Owns: the file: one JSON object a line, `{"case": {...}}` or `{"skipped": "reason"}`. Must not know: parts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Case = dict[str, Any]


class Recorder:
    """Appends to a part's file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cases: list[Case] = []
        path.write_text("")

    def case(self, **facts: Any) -> Case:
        """Write one measurement down."""
        self.cases.append(facts)
        self._append({"case": facts})
        return facts

    def skip(self, reason: str) -> None:
        """Say what is not measured, and why."""
        self._append({"skipped": reason})

    def _append(self, fact: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(fact) + "\n")


def read(path: Path) -> tuple[list[Case], list[str]]:
    """Return the measurements and what was skipped; a last line that was cut off is left out."""
    cases, skipped = [], []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            fact = json.loads(line)
        except ValueError:
            continue
        if "case" in fact:
            cases.append(fact["case"])
        else:
            skipped.append(fact["skipped"])
    return cases, skipped

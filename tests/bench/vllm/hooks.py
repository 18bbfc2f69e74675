"""What `timed_connectors` has written, read again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.bench.output import percentile


@dataclass(frozen=True)
class Row:
    """See `timed_connectors`. Times are of the host's monotonic clock, in seconds."""

    at_s: float
    what: str
    seconds: float
    request: str


@dataclass(frozen=True)
class HookTimes:
    """The rows of one server. Its processes append while it runs; the last ones come when it ends."""

    path: Path

    def rows(self) -> list[Row]:
        """Return what has been written, in order of time."""
        files = self.path.parent.glob(f"{self.path.name}.*")
        return sorted((row for file in files for row in _rows(file)), key=lambda row: row.at_s)

    def loads(self, begun_s: float, ended_s: float) -> list[Row]:
        """Return the loads that began in a while."""
        return [row for row in self.rows() if row.what == "load" and begun_s <= row.at_s < ended_s]

    def steps_ms(self, begun_s: float, ended_s: float) -> list[float]:
        """Return what the hooks of each step took that began in a while."""
        return [1e3 * row.seconds for row in self.rows() if row.what == "step" and begun_s <= row.at_s < ended_s]

    def requests_ms(self, spans: list[tuple[float, float]], usual_step_s: float) -> list[float]:
        """Return what all hooks of each request took: those that name it, and what its steps took beyond a step without work.

        `spans`: when each was under way, alone.
        """
        rows = self.rows()
        found = []
        for begun_s, ended_s in spans:
            by_kind: dict[bool, list[Row]] = defaultdict(list)
            for row in rows:
                if begun_s <= row.at_s < ended_s and row.what != "load":
                    by_kind[row.what == "step"].append(row)
            if by_kind:
                steps = sum(max(0.0, row.seconds - usual_step_s) for row in by_kind[True])
                found.append(1e3 * (steps + sum(row.seconds for row in by_kind[False])))
        return found


def _rows(file: Path) -> Iterator[Row]:
    for line in file.read_text().splitlines():
        yield Row(*json.loads(line))


def summary(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and range."""
    return {
        "median": median(values),
        "p99": percentile(values, 99),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }

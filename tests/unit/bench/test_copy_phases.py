"""What the benchmark of a local transfer's parts makes of what writers answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.bench.gpu import part_copy_phases, tables
from tests.bench.gpu.recorder import Recorder


class AnsweringWriter:
    """Says that a device began after 0.2 ms, worked for 1 ms and waited for 0.1 ms, and that this was seen 0.05 ms later."""

    def __init__(self, later_s: float) -> None:
        self.told: list[dict[str, Any]] = []
        self._later_s = later_s

    def tell(self, do: str, **arguments: Any) -> None:
        self.told.append({"do": do, **arguments})

    def answer(self) -> dict[str, Any]:
        told = self.told[-1]
        begun_s = told["at_s"] + self._later_s
        if told["do"] == "copy":
            return {"begun_s": begun_s, "ended_s": begun_s + 0.001, "bytes": told["bytes"]}
        device = {"device_began_s": 0.0002, "device_ended_s": 0.0013, "device_busy_s": 0.001, "slices": 2}
        return {"begun_s": begun_s, "ended_s": begun_s + 0.00135, "submitted_s": 0.0001, "bytes": 1, **device}


def test_the_parts_of_a_transfer_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_copy_phases, "CONTEXTS", (32_768,))
    writers = [AnsweringWriter(0.0), AnsweringWriter(0.0005)]
    recorder = Recorder(tmp_path / "cases")
    part_copy_phases.measure(recorder, writers, "host", 2)  # type: ignore[arg-type]
    assert [case["tried"] for case in recorder.cases] == list(part_copy_phases.TRIED)
    case = recorder.cases[0]
    assert case["late_s"] == pytest.approx(0.00005)
    assert case["waited_s"] == pytest.approx(0.0001)
    assert case["gb_s"] == pytest.approx(case["bytes"] / 0.00185 / 1e9)
    assert case["copy_gb_s"] == pytest.approx(case["bytes"] / 0.0015 / 1e9)
    assert {told["order"]["stripe"] for writer in writers for told in writer.told if told["do"] == "phases"} == {0, 1}
    (table,) = tables.part_tables("copy_phases", recorder.cases)
    assert {len(row) for row in table.rows} == {len(table.headings)}

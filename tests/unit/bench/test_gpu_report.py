"""Ratios, budgets, tables and the page's section of the GPU benchmark, from fabricated results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.gpu import plots, recorder, report, tables
from tests.bench.gpu.comparison import budgets, geometric_mean, sglang, swap_comparisons, wrong_cases
from tests.bench.gpu.parts import PARTS
from tests.bench.gpu.recorder import Recorder
from tests.unit.bench.fabricated import results


def test_sglangs_table_is_whole() -> None:
    cases = sglang()["swap_in"]
    assert len({(case["hot_rows"], case["top_k"], case["batch"], case["miss_percent"]) for case in cases}) == 100
    assert all((case["misses"] == 0) == (case["bare_gather_us"] is None) for case in cases)


def test_ratios_are_theirs_over_ours() -> None:
    compared = swap_comparisons([{**sglang()["swap_in"][1], "us": 9.5, "wrong": ""}])
    assert [case.faster for case in compared] == [2.0]
    assert compared[0].over_gather == pytest.approx(9.5 / 3.2)


def test_a_case_that_sglang_has_not_is_left_out() -> None:
    assert swap_comparisons([{**sglang()["swap_in"][1], "batch": 3, "us": 9.5, "wrong": ""}]) == []


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 16.0]) == pytest.approx(4.0)
    assert geometric_mean([]) == 0.0


def test_budgets_say_what_is_missed() -> None:
    found = {budget.what: budget for budget in budgets(results())}
    assert len(found) == 7 + 3 + 2 + 4 + 1 + 9 + 1
    assert found["swap-in against SGLang: the worst"].met
    assert not found["swap-in, k 512, batch 1, 0 % missing"].met  # 8.75 us of at most 4
    assert found["row backup, 1 row, 21 layers"].met
    assert found["swap-in against SGLang: geometric mean of 100"].measured == pytest.approx(2.0)


def test_a_step_with_missing_rows_is_held_against_one_without() -> None:
    found = {budget.what: budget for budget in budgets(results())}
    step = found["decode step, batch 64, 128k tokens, 2 % missing, of the same with nothing missing"]
    assert (round(step.measured, 2), step.limit, step.met) == (1.1, 1.15, True)


def test_every_part_has_a_table() -> None:
    for name in PARTS:
        made = tables.part_tables(name, results()["parts"][name]["cases"])
        assert made
        for table in made:
            assert table.rows
            assert {len(row) for row in table.rows} == {len(table.headings)}
            assert tables.plain(table).count("\n") == len(table.rows) + 1
            assert tables.terminal(table)


def test_a_part_says_what_failed_was_skipped_and_was_wrong() -> None:
    part = results()["parts"]["digest"] | {"skipped": ["no second GPU"], "failed": "not done after 3 s"}
    part["cases"][0]["wrong"] = "2 of 64 digests are wrong"
    text = tables.part_text("digest", part)
    for expected in ("not measured: no second GPU", "digest FAILED: not done after 3 s", "wrong: 2 of 64 digests"):
        assert expected in text


def test_wrong_bytes_are_named() -> None:
    made = results()
    assert wrong_cases(made) == []
    made["parts"]["swap_in"]["cases"][7]["wrong"] = "layer 3: 1 of 512 rows have wrong bytes"
    assert wrong_cases(made) == [
        "swap_in (hot_rows 4096, top_k 512, batch 4, miss_percent 10, layers 8): layer 3: 1 of 512 rows have wrong bytes"
    ]


def test_the_section_has_a_row_for_everything() -> None:
    text = report.section(results(), "one.json")
    assert "tests/bench/results/one.json" in text
    assert "one NVIDIA Imaginary, driver 1.2.3, 16 cores" in text
    assert (
        "| swap-in, k 512, nothing missing, batch 1 / 64 | 8.75 / 11.2 us | SGLang 17.5 / 22.3 | 2.0 x / 2.0 x |"
        in text
    )
    assert "| offer to first swap-in, 8k / 128k tokens, C4 straight to the host |" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 14
    assert {line.count("|") for line in lines} == {5}


def test_what_was_not_measured_has_no_row() -> None:
    made = results()
    made["parts"] = {"copy_rows": made["parts"]["copy_rows"]}
    assert report.section(made, "one.json").count("\n|") == 3


def test_later_runs_replace_parts_of_earlier_ones() -> None:
    first, second = results(), results()
    second["parts"] = {"transport": second["parts"]["transport"], "ttft": {"cases": []}}
    second["parts"]["transport"]["cases"][0]["gb_s"] = 1.0
    both = report.merged([first, second])
    assert both["parts"]["transport"]["cases"][0]["gb_s"] == 1.0
    assert both["parts"]["ttft"] == first["parts"]["ttft"]


def test_the_picture_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.draw(results(), tmp_path / "all.png")
    partly = results()
    partly["parts"] = {"copy_pages": partly["parts"]["copy_pages"]}
    plots.draw(partly, tmp_path / "part.png")
    assert (tmp_path / "all.png").read_bytes()[:4] == b"\x89PNG"
    assert (tmp_path / "part.png").stat().st_size > 10_000


def test_a_recorder_keeps_what_was_written_before_the_end(tmp_path: Path) -> None:
    path = tmp_path / "part.jsonl"
    made = Recorder(path)
    made.case(what="d2h", gb_s=55.0)
    made.skip("one GPU only")
    with path.open("a") as file:
        file.write('{"case": {"what": "cut o')
    assert recorder.read(path) == ([{"what": "d2h", "gb_s": 55.0}], ["one GPU only"])
    assert recorder.read(tmp_path / "never.jsonl") == ([], [])
    assert json.loads(path.read_text().splitlines()[0])["case"]["what"] == "d2h"

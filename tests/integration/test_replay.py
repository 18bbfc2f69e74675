"""A replay of a trace as a person runs it: real daemons, real engines, every byte compared; and one that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.traces import trace_line, write_trace
from tests.integration.test_demo import shared_memory_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TIMEOUT_S = 90
SPOILER = """
import multiprocessing.process

real_run = multiprocessing.process.BaseProcess.run

def run(process):
    if process.name == "the prefill engine":
        from kvbridge.core.geometry.components import ComponentKind
        from tests.helpers import synthetic

        filled = synthetic.fill

        def fill(views, *, tables, section, **whose):
            written = filled(views, tables=tables, section=section, **whose)
            if section.start_token == 0 and section.prompt_tokens == 1000:
                view = views.home(ComponentKind.C4_KV, 2, tables=tables)
                view.page(int(view.table(tables).ids[0]))[0] ^= 0x40
            return written

        synthetic.fill = fill
    real_run(process)

multiprocessing.process.BaseProcess.run = run
"""


@pytest.fixture
def scratch(monkeypatch):
    """Where the replay's folder is made, so that what it leaves can be seen. Short: sockets live below it."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        yield Path(short)


def replay(trace: Path, *arguments: object) -> subprocess.Popen:
    given = ("--trace", trace, "--model", "tiny-v4", "--transport", "local", *arguments)
    command = [sys.executable, "-m", "tests.bench.replay", *map(str, given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_trace_crosses_whole(scratch, tmp_path):
    """Unequal ranks, a pool so small that requests are sent away, and decode holding rooms for a while."""
    logs = tmp_path / "logs"
    trace = write_trace(tmp_path / "trace.jsonl", 20)
    with replay(
        trace,
        *("--speed", "4", "--max-in-flight", "6", "--pool-tokens", "2560", "--decode-ms-per-token", "20"),
        *("--prefill-pp", "2", "--decode-tp", "2", "--chunk-tokens", "300"),
        *("--json", "--report", tmp_path / "r.json", "--keep-logs", logs),
    ) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors + output
    report = json.loads(output)
    assert json.loads((tmp_path / "r.json").read_text()) == report
    assert report["verdict"].startswith("GOOD: 20 of 20 requests served, 0 failed, 0 refused")
    assert report["refusals"].keys() <= {"capacity"}
    assert report["refusals"]["capacity"] > 0
    assert report["mismatched_bytes"] == report["pages_left"] == 0
    assert report["checked_bytes"] > 1_000_000
    assert {"admission", "prefill", "move", "offer_to_commit", "check", "total"} <= report["phases"].keys()
    assert all(phase["count"] == 20 for phase in report["phases"].values())
    assert len(report["amounts"]) == 7
    assert report["most_in_flight"] > 1
    assert not list(scratch.iterdir())
    assert not shared_memory_of((logs / "b" / "log.jsonl").read_text())


@pytest.mark.thorough
def test_one_wrong_byte_is_found_and_named(scratch, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(SPOILER)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    with replay(write_trace(tmp_path / "trace.jsonl", 4), "--speed", "0", "--no-prefixes") as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1, errors + output
    assert "BAD: 4 of 4 requests served" in output
    assert "1 of them wrong" in output.replace("\n", " ")
    assert "c4_kv layer 2 lane 0 row 0" in output


def conversations(path: Path, turns: int) -> Path:
    """Two users whose prompts grow by what was said, with one system prompt."""
    lines = []
    for turn in range(1, turns + 1):
        for user in (1, 2):
            ids = [0, *(100 * user + block for block in range(turn))]
            tokens = 512 * len(ids) - (0, 1, 256, 300)[turn % 4]
            lines.append(trace_line(len(lines), input_length=tokens, output_length=300, hash_ids=ids))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.thorough
@pytest.mark.parametrize("answers", [False, True])
def test_prompts_that_share_blocks_share_pages_and_only_the_rest_is_sent(scratch, tmp_path, answers):
    with replay(
        conversations(tmp_path / "trace.jsonl", 5),
        *(
            "--speed",
            "0",
            "--max-in-flight",
            "1",
            "--pool-tokens",
            "30000",
            "--chunk-tokens",
            "700",
            "--decode-tp",
            "2",
        ),
        *("--json", "--answers" if answers else "--no-answers"),
    ) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors + output
    report = json.loads(output)
    found = report["found_tokens"]
    # One at a time and nothing evicted: decode holds what there is to hold; prefill computes a token at least.
    # The endless cache has no answers, which are prompts of the next turns.
    assert found["decode"] >= found["endless"] > 0 if answers else found["decode"] == found["endless"] > 0
    assert 0 < found["prefill"] <= found["endless"]
    assert report["mismatched_bytes"] == report["pages_left"] == 0
    sent = sum(amount["bytes"] for amount in report["amounts"].values())
    assert sent < 0.9 * report["whole_bytes"]

"""A replay of a trace: real daemons, real engines, every byte compared."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.traces import trace_line, write_trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TIMEOUT_S = 90


def replay(trace: Path, *arguments: object) -> dict[str, Any]:
    given = ("--trace", trace, "--model", "tiny-v4", "--transport", "local", "--output", trace.parent, *arguments)
    command = [sys.executable, "-m", "tests.bench.replay", *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    (report,) = trace.parent.glob("replay-*.json")
    return json.loads(report.read_text())["replay"]


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


def test_a_trace_crosses_whole(tmp_path):
    """A pool so small that requests are sent away."""
    trace = write_trace(tmp_path / "trace.jsonl", 20)
    found = replay(trace, *("--speed", "0", "--max-in-flight", "6", "--pool-tokens", "2560", "--chunk-tokens", "300"))
    assert (found["completed"], found["unserved"]) == (20, [])
    assert found["refusals"].keys() <= {"capacity"}
    assert found["checked_bytes"] > 1_000_000
    assert {"admission", "prefill", "move", "offer_to_commit", "total"} <= found["phases_s"].keys()
    assert len(found["amounts"]) == 7
    assert found["most_in_flight"] > 1


@pytest.mark.thorough
def test_what_the_devices_cannot_hold_comes_back_from_the_host(tmp_path):
    """Pools for the longest request alone: every byte of what comes back is compared, on both sides."""
    trace = conversations(tmp_path / "trace.jsonl", 5)
    small = ("--max-in-flight", "1", "--pool-tokens", "3584", "--host-tokens", "20000")
    held = replay(trace, "--speed", "0", *small)["found_tokens"]
    assert 0 < held["prefill_host"] <= held["prefill"], "nothing came back on prefill"
    assert 0 < held["decode_host"] <= held["decode"], "nothing came back on decode"

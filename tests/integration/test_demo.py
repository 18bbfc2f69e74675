"""`kvbridge demo` as a user runs it: real daemons, a real model, every logit compared; and its sudden end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")
pytest.importorskip("mooncake", reason="the extra 'cpu' or 'cuda' is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TIMEOUT_S = 200


@pytest.fixture
def scratch(monkeypatch):
    """Where the demo's folder is made, so that what it leaves can be seen. Short: sockets live below it."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as short:
        monkeypatch.setenv("TMPDIR", short)
        yield Path(short)
        assert not list(Path(short).iterdir())


@pytest.fixture(autouse=True)
def interrupts_heeded():
    """A shell that runs tests in the background has them ignore Ctrl-C, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def demo(*arguments: str, **more) -> subprocess.Popen:
    command = [sys.executable, "-m", "kvbridge", "demo", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)


def shared_memory_of(log: str) -> list[str]:
    """Files in shared memory whose names carry the incarnation of a daemon that wrote this log."""
    incarnations = {json.loads(line)["incarnation"] for line in log.splitlines() if '"incarnation"' in line}
    assert incarnations
    return [file.name for file in Path("/dev/shm").iterdir() if any(each in file.name for each in incarnations)]


def reported(*arguments: str, code: int = 0, **more) -> dict:
    """Return a demo's report. No run leaves pages, even when its answers are not equal."""
    with demo(*arguments, "--json", **more) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, errors
    report = json.loads(output)
    assert report["pages_left"] == 0
    return report


def test_a_request_decodes_elsewhere_as_it_would_at_home(scratch):
    report = reported("--transport", "mooncake", "--prefill-pp", "3", "--prompts", "4", "--steps", "4")
    assert report["verdict"] == "EQUAL: 4 of 4 requests gave the very logits of the model alone"
    for request in report["requests"]:
        assert request["comparison"]["positions"] == 1 + 4
        assert request["arrived_bytes"]["swa_kv"] > 0
        assert request["source_pages"]["full"] != request["destination_pages"]["full"]
        assert request["source_pages"]["full"] != request["destination_pages"]["host"]


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        pytest.param("--sparse --prompts 2", 20, id="sparse"),
        pytest.param("--prompts 3", 8, marks=pytest.mark.thorough, id="dense"),
    ],
)
def test_a_conversation_goes_on_from_what_both_nodes_hold(scratch, options, steps):
    report = reported("--turns", "2", "--steps", str(steps), "--transport", "local", *options.split())
    count = len(report["requests"])
    assert report["verdict"].startswith(f"EQUAL: {count} of {count} requests gave the very logits of the model alone")
    for request in report["requests"][count // 2 :]:
        assert 0 < request["computed_tokens"] < request["prompt_tokens"]
        assert request["prefix_tokens"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("encoding", "instructions"), [("native", {"ATEN_CPU_CAPABILITY": "avx2"}), ("fp8_v4", {"MKL_CBWR": "COMPATIBLE"})]
)
def test_sparse_decode_gives_the_very_logits(scratch, encoding, instructions):
    """Whatever the processor's instructions: they decide where two selections tie, or a number is quantised either way."""
    report = reported(
        *("--sparse", "--prompts", "2", "--steps", "70", "--transport", "local", "--encoding", encoding),
        env=os.environ | instructions,
    )
    assert report["verdict"].startswith("EQUAL: 2 of 2 requests gave the very logits of the model alone")
    assert report["hot_rows"] == 64
    for request in report["requests"]:
        figures = request["sparse"]
        assert request["comparison"] == {"positions": 1 + 70, "first_difference": None, "largest_difference": 0}
        assert figures["loaded"] > 0
        assert figures["in_hot_slots"] > 0
        assert figures["loaded"] + figures["in_hot_slots"] < 70 * 3 * 64, "others were in the ring"


FLIPPED = """
import multiprocessing.process

real_run = multiprocessing.process.BaseProcess.run

def run(process):
    if process.name == "the decode engine":
        from kvbridge.sparse import SparseCache

        real, steps = SparseCache.rows, []

        def rows(self, layer, places):
            found = real(self, layer, places)
            if layer == 4:
                steps.append(layer)
                if len(steps) == 9:
                    found[3, 0] ^= 1
            return found

        SparseCache.rows = rows
    real_run(process)

multiprocessing.process.BaseProcess.run = run
"""


@pytest.mark.thorough
def test_one_bit_of_one_row_turns_the_verdict(scratch, tmp_path):
    """In the decode engine's process, in one step and layer: the lowest bit of a number of a row that attention reads."""
    (tmp_path / "sitecustomize.py").write_text(FLIPPED)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    arguments = ("--sparse", "--prompts", "1", "--steps", "16", "--transport", "local")
    report = reported(*arguments, env=os.environ | {"PYTHONPATH": path}, code=1)
    assert "DIFFERENT: 1 of 1 requests gave other logits than the model alone" in report["verdict"]
    assert "(request 1: first at decode step 9, " in report["verdict"]


@pytest.mark.thorough
def test_interrupting_leaves_nothing(scratch):
    with demo("--transport", "local") as process:
        for line in process.stderr:
            if "engines have attached" in line:
                break
        (log,) = scratch.glob("*/b/log.jsonl")
        told = log.read_text()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in errors
    assert not shared_memory_of(told)

"""Conversations on a GPU: prefixes, checkpoints and shared pages in device memory; every logit of every turn is the model's own."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("transformers", reason="the extra 'transformers' is not installed")

TIMEOUT_S = 200
CONVERSATIONS, TURNS = 3, 2

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 40)]


@pytest.mark.parametrize("options", [(), ("--sparse", "--steps", "20")], ids=["dense", "sparse"])
def test_turns_on_a_gpu_equal_the_model_alone(options):
    """The order of streams is what is at stake: a page that is shared, restored from or given out anew before a GPU is through."""
    arguments = ("--device", "cuda", "--turns", str(TURNS), "--prompts", str(CONVERSATIONS))
    arguments += (*options, "--json")
    command = [sys.executable, "-m", "kvbridge", "demo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    count = CONVERSATIONS * TURNS
    assert report["verdict"].startswith(f"EQUAL: {count} of {count} requests gave the very logits")
    assert report["pages_left"] == 0
    for request in report["requests"]:
        reused = request["turn"] > 1
        assert bool(request["computed_tokens"]) >= reused
        assert bool(request["prefix_tokens"]) >= reused

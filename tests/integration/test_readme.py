"""The commands that the README shows for the scripts in `examples/` are run, against real daemons."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.cluster import Cluster, cluster

ROOT = Path(__file__).parents[2]
COMMANDS = dict(re.findall(r"^python examples/(\w+)\.py ([^&#\n]+)", (ROOT / "README.md").read_text(), re.MULTILINE))


def _start(script: str, running: Cluster, room: int) -> subprocess.Popen[str]:
    """Run a script with the README's arguments; the runtime directories of its daemons become those of the test's."""
    meant = {
        "/tmp/kvbridge-prefill": str(running.prefill.runtime_dir),
        "/tmp/kvbridge-decode": str(running.decode.runtime_dir),
        "$room": str(room),
    }
    arguments = [meant.get(argument, argument) for argument in shlex.split(COMMANDS[script])]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / f"{script}.py"), *arguments], stdout=subprocess.PIPE, text=True
    )


def _run(reader: str) -> str:
    """Run the prefill engine and a decode engine at once; return what the second printed."""
    with cluster({"preset": "tiny-v4"}) as running:
        room = running.pair(1000, max_new_tokens=64)["room"]
        with _start(reader, running, room) as decode, _start("prefill_engine", running, room) as prefill:
            printed, _ = decode.communicate(timeout=60)
            prefill.communicate(timeout=60)
    assert (prefill.returncode, decode.returncode) == (0, 0)
    return printed


@pytest.mark.parametrize(
    ("reader", "begins", "contains"),
    [
        # One value in every byte of the layer: each row was written with its layer's number.
        ("decode_engine", "c4_kv layer 2 (250, 104) {2}", "first token: 42"),
        # Rows of the prompt and new ones hold the number of the last layer that was read.
        ("sparse_decode", "(1, 64, 104) {4} RequestCounts(hits=", ""),
    ],
)
def test_the_examples_move_a_request(reader: str, begins: str, contains: str) -> None:
    printed = _run(reader)
    assert printed.startswith(begins), printed
    assert contains in printed

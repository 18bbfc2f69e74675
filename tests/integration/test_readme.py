"""The README's engine example is run as it stands there, against real daemons."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.cluster import cluster

README = Path(__file__).parents[2] / "README.md"
PROMPT_TOKENS = "1000"


def test_the_example_moves_a_request(tmp_path: Path) -> None:
    example = tmp_path / "engine.py"
    example.write_text(re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[1])
    with cluster({"preset": "tiny-v4"}) as running:
        room = str(running.pair(int(PROMPT_TOKENS))["room"])

        def engine(role: str, runtime_dir: Path) -> subprocess.Popen[str]:
            command = [sys.executable, str(example), role, str(runtime_dir), room, PROMPT_TOKENS]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

        with (
            engine("prefill", running.prefill.runtime_dir) as prefill,
            engine("decode", running.decode.runtime_dir) as decode,
        ):
            printed, _ = decode.communicate(timeout=60)
            prefill.communicate(timeout=60)
    assert (prefill.returncode, decode.returncode) == (0, 0)
    # One value in every byte of the layer: each row was written with its layer's number.
    assert printed.startswith("c4_kv layer 2 (250, 104) {2}"), printed
    assert "first token: 42" in printed

"""The README's engine example is run as it stands there, against real daemons."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.cluster import cluster

README = Path(__file__).parents[2] / "README.md"
PROMPT_TOKENS = "1000"


def _example(number: int, tmp_path: Path) -> Path:
    file = tmp_path / f"example{number}.py"
    file.write_text(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[number])
    return file


def test_the_example_moves_a_request(tmp_path: Path) -> None:
    example = _example(0, tmp_path)
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


def test_the_example_decodes_sparsely(tmp_path: Path) -> None:
    prefilling, decoding = (str(_example(number, tmp_path)) for number in (0, 1))
    with cluster({"preset": "tiny-v4"}) as running:
        room = str(running.pair(int(PROMPT_TOKENS))["room"])
        writer = [sys.executable, prefilling, "prefill", str(running.prefill.runtime_dir), room, PROMPT_TOKENS]
        reader = [sys.executable, decoding, str(running.decode.runtime_dir), room, "40"]
        subprocess.run(writer, timeout=60, check=True)
        done = subprocess.run(reader, timeout=60, check=True, capture_output=True, text=True)
    # Rows of the prompt and new ones hold the number of the last layer that was read.
    assert done.stdout.startswith("(1, 64, 104) {4} RequestCounts(hits="), done.stdout

"""Pools of models that a processor cannot run: SGLang's own classes, read by the adapter."""

from __future__ import annotations

import json
import subprocess

from tests.engines.servers import ROOT, Setup
from tests.sglang.servers import environment


def test_every_buffer_of_deepseek_v4_is_a_component(setup: Setup) -> None:
    done = subprocess.run(
        [setup.python, "-m", "tests.sglang.v4_pools"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    sparse, heavy, every = [1, 3, 5], [2, 4], [0, 1, 2, 3, 4, 5]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "components": {
            "c4_kv": ["full", 37_440, sparse],
            "c4_indexer": ["full", 8_448, sparse],
            "c4_state": ["swa", 65_536, sparse],
            "c4_indexer_state": ["swa", 16_384, sparse],
            "c128_kv": ["full", 1_728, heavy],
            "c128_state": ["request", 524_288, heavy],
            "swa_kv": ["swa", 149_760, every],
        },
        "regions": 22,
    }

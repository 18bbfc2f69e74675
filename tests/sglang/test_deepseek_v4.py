"""DeepSeek-V4's pools cross between two nodes. Its kernels need a GPU; SGLang's pools and queues do not (`v4_transfer.py`)."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engines.servers import ROOT, Setup, free_port, together
from tests.sglang.servers import environment

PAGE_TOKENS = 256
LIMIT_S = 840.0
ROOMS = [(10_000 + rest, rest + PAGE_TOKENS * (rest % 3) or 3 * PAGE_TOKENS) for rest in range(PAGE_TOKENS)]
"""A room for each remainder that a prompt's length can leave in its last page."""


def run(setup: Setup, asked: dict[str, Any], script: str = "v4_transfer") -> str:
    """Return what one process printed at last."""
    role = asked["role"]
    settings = setup.directory / f"v4-{role}.yaml"
    settings.write_text(json.dumps({"transports": {"order": ["mooncake"]}}))
    done = subprocess.run(
        [setup.python, "-m", f"tests.sglang.{script}", json.dumps(asked)],
        cwd=ROOT,
        env=environment() | {"KVBRIDGE_SGLANG_CONFIG": str(settings)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{role}: {done.stderr[-4_000:]}"
    return (done.stdout.splitlines() or [""])[-1]


@pytest.mark.parametrize(("form", "stages"), [("published", 1), ("hisparse", 1), ("hisparse", 2), ("nextn", 1)])
def test_every_live_byte_of_a_prompt_crosses_and_no_other_byte_changes(
    setup: Setup, tmp_path: Path, form: str, stages: int
) -> None:
    """The form `nextn` has one layer more, longer rings and fp4 keys of the indexer. `stages`: pipeline stages of prefill."""
    rooms = ROOMS if (form, stages) in {("published", 1), ("hisparse", 1)} else ROOMS[:: PAGE_TOKENS // 64]
    asked = {"bootstrap_port": free_port(), "rooms": rooms, "form": form, "stages": stages, "directory": str(tmp_path)}
    prefill = asked | {"role": "prefill", "port": free_port()}
    sides = [prefill | {"stage": stage} for stage in range(stages)]
    sides.append(asked | {"role": "decode", "port": free_port(), "stage": 0})
    said = together([partial(run, setup, side) for side in sides])
    compared = json.loads(said[-1])
    key_bytes = 68 if form == "nextn" else 132
    for kind, layers, rate, row_bytes in (
        ("c4_kv", 3, 4, 584),
        ("c4_indexer", 3, 4, key_bytes),
        ("c128_kv", 2, 128, 584),
    ):
        assert compared[kind] == sum(tokens // rate for _, tokens in rooms) * layers * row_bytes
    assert all(compared.values())


def test_prompts_cross_into_host_memory_that_sglang_names(setup: Setup, tmp_path: Path) -> None:
    rooms = ROOMS[::8]
    asked = {
        "bootstrap_port": free_port(),
        "rooms": rooms,
        "form": "",
        "stages": 1,
        "directory": str(tmp_path),
        "stage": 0,
    }
    sides = [asked | {"role": role, "port": free_port()} for role in ("prefill", "decode")]
    said = together([partial(run, setup, side, "host_receive") for side in sides])
    due = sum(tokens for _, tokens in rooms) * 3 * 128
    assert json.loads(said[-1]) == {"key": due, "value": due}

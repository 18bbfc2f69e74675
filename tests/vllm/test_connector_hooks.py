"""The connector class as vLLM sees it: its name, its hooks, its counts, and what it does with vLLM's own objects."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from tests.vllm.servers import ROOT, Setup


@pytest.fixture(scope="module")
def said(setup: Setup) -> dict[str, Any]:
    """The answers of `hooks.py`."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [setup.python, "-m", "tests.vllm.hooks"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_finds_it_by_its_name_and_by_its_path(said: dict[str, Any]) -> None:
    assert said["names"] == {"by_name": True, "by_path": True, "supports_hma": False, "abstract": []}


def test_its_hooks_are_vllms(said: dict[str, Any]) -> None:
    assert said["signatures"]["different"] == []
    assert set(said["signatures"]["own"]) <= {"unregister_kv_caches", "restore_kv_caches"}, "0.33 has these"


def test_pinned_blocks_are_not_given_away(said: dict[str, Any]) -> None:
    found = said["pins"]
    assert found["taken"] == found["pinned"] == found["at_first"] - 3
    assert found["at_last"] == found["at_first"]


def test_requests_are_compared_by_all_that_decides_about_their_cache(said: dict[str, Any]) -> None:
    found = said["prompts"]
    assert (found["distinct"], found["again"], found["params"]) == (4, True, {"do_remote_decode": True})


def test_counts_go_through_vllms_classes(said: dict[str, Any]) -> None:
    found = said["numbers"]
    assert (found["empty"], found["full"], found["added"]) == (True, True, True)
    assert (found["line"]["Loads"], found["line"]["Failed (unknown_room)"]) == (2, 6)
    labels = '{engine="0",model_name="m"}'
    assert {name: float(value) for name, value in (line.rsplit(" ", 1) for line in found["metrics"])} == {
        f"vllm:kvbridge_load_seconds_count{labels}": 2,
        f"vllm:kvbridge_load_seconds_sum{labels}": 1,
        f"vllm:kvbridge_load_bytes_count{labels}": 2,
        f"vllm:kvbridge_load_bytes_sum{labels}": 2 << 20,
        f"vllm:kvbridge_load_operations_total{labels}": 8,
        f"vllm:kvbridge_sent_total{labels}": 0,
        f"vllm:kvbridge_held_requests{labels}": 2,
        f"vllm:kvbridge_held_blocks{labels}": 7,
        'vllm:kvbridge_failures_total{code="unknown_room",engine="0",model_name="m"}': 6,
    }


def test_one_worker_reports_for_all(said: dict[str, Any]) -> None:
    assert said["workers"] == {"closed_by": [0, 1], "reports": 1}

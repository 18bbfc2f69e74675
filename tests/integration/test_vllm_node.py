"""The nodes beside vLLM: children of the process that has the tensors, or daemons that an operator runs."""

import os
import select
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvbridge.api.client import BlockingClient
from kvbridge.api.endpoint_file import read_endpoint
from kvbridge.api.status import Readiness
from kvbridge.core.errors import ConfigError, ConflictError, NotReadyError, PeerError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit.node import NodePlace, NodePlan, NodeProcess, OperatedNode, open_node
from kvbridge.engine.kit.tensors import instance_cache, rank_cache
from kvbridge.engine.vllm import VLLM
from tests.helpers.cluster import eventually
from tests.helpers.vllm_links import TOKENS, caches

R0 = Rank(pp=0, tp=0)
LIMIT_S = 120.0
CALLS = BlockingClient(timeout_s=LIMIT_S, timeout_key="a limit of this test")


def plan(role: Role = Role.PREFILL, **extra: Any) -> NodePlan:
    told = rank_cache(caches(range(3), 4, 6), block_tokens=TOKENS, product=VLLM)
    cache = instance_cache({R0: told}, name="tiny", kv_heads=4, facts={"attention_backend": "CPU_ATTN"})
    extra = extra or {"transports": {"order": ["mooncake"]}}
    return NodePlan(NodePlace(VLLM, role, f"test-{uuid.uuid4()}", extra), cache, tp_size=1, devices={R0: "cpu"})


@pytest.fixture(autouse=True)
def runtime_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home:
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield Path(home)


PARENT = """
import time
from kvbridge.engine.kit.node import open_node
from tests.integration.test_vllm_node import plan
node = open_node(plan(), timeout_s=120)
print(node.runtime_dir, flush=True)
time.sleep(600)
"""


@pytest.mark.thorough
def test_the_end_of_its_parent_ends_it_and_its_log_is_the_parents() -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", PARENT]
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=log, text=True) as parent,
        ExitStack() as stack,
    ):
        try:
            assert parent.stdout is not None
            endpoint = read_endpoint(Path(parent.stdout.readline().strip()))
            assert endpoint is not None
            node = os.pidfd_open(endpoint.pid)
            stack.callback(os.close, node)
            eventually("its log", lambda: b"prefill" in os.pread(log.fileno(), 1 << 20, 0), LIMIT_S)
        finally:
            parent.kill()
        assert select.select([node], [], [], LIMIT_S)[0], "the node lives"


def test_a_node_that_cannot_start_says_what_and_why_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PeerError, match=r"could not start: exit code 3; .*Try it by itself: kvbridge prefill") as told:
        open_node(plan(control={"curve": {"secret_key_file": "/nowhere/a.key"}}), timeout_s=LIMIT_S)
    assert "/nowhere/a.key" in capfd.readouterr().err
    command = str(told.value).partition("Try it by itself: kvbridge ")[2].split()
    tried = subprocess.run(
        [sys.executable, "-m", "kvbridge", *command], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (tried.returncode, "/nowhere/a.key" in tried.stderr) == (3, True)


@pytest.mark.thorough
def test_another_engine_of_the_same_name_is_refused_and_an_operated_node_is_found_by_its_directory() -> None:
    made = plan()
    first = open_node(made, timeout_s=LIMIT_S)
    try:
        assert isinstance(first, NodeProcess)
        pid = first.endpoint().pid
        with pytest.raises(ConflictError, match=r"engine id .* runs on this host already .*engine_id of its own"):
            open_node(made, timeout_s=0)
        CALLS.ask(Readiness, "GET", f"{first.endpoint().http_url}/ready")
        directory = {"runtime_dir": str(first.runtime_dir)}
        found = open_node(plan(**directory), timeout_s=LIMIT_S)
        assert isinstance(found, OperatedNode)
        assert found.endpoint() == first.endpoint()
        with pytest.raises(ConfigError, match="is of role prefill; this vLLM needs one of role decode"):
            open_node(plan(Role.DECODE, **directory), timeout_s=LIMIT_S)
        found.close()
        assert first.endpoint().pid == pid, "it was left to whoever runs it"
    finally:
        first.close()
    assert not first.runtime_dir.exists()
    with pytest.raises(NotReadyError, match="start one there, or take runtime_dir out"):
        found.endpoint()
    open_node(made, timeout_s=LIMIT_S).close()

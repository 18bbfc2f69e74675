"""The nodes beside vLLM: children of the process that has the tensors, through real daemons and rank workers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvbridge.api.endpoint_file import DaemonEndpoint, read_endpoint
from kvbridge.api.status import Readiness
from kvbridge.cli.wait import why_not_ready
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import ConfigError, ConflictError, NotReadyError, PeerError
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role, Tables
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.adapters.vllm.node_config import NodePlan
from kvbridge.engine.adapters.vllm.node_process import NodeProcess, OperatedNode, open_node
from kvbridge.engine.adapters.vllm.tensors import InstanceCache, instance_cache, rank_cache, rank_regions
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.http.client import BlockingClient
from tests.helpers.cluster import eventually
from tests.helpers.vllm_caches import BLOCKS, TOKENS, caches

R0 = Rank(pp=0, tp=0)
LIMIT_S = 120.0
CALLS = BlockingClient(timeout_s=LIMIT_S, timeout_key="a limit of this test")
EXTRA: dict[str, Any] = {"transports": {"order": ["mooncake"]}}


def read_cache(tensors: dict[str, torch.Tensor]) -> InstanceCache:
    told = rank_cache(tensors, block_tokens=TOKENS)
    return instance_cache({R0: told}, name="tiny", kv_heads=4, facts={"attention_backend": "CPU_ATTN"})


def plan(role: Role, cache: InstanceCache, **extra: Any) -> NodePlan:
    return NodePlan(role, f"test-{uuid.uuid4()}", cache, tp_size=1, devices={R0: "cpu"}, extra=EXTRA | extra)


@pytest.fixture(autouse=True)
def runtime_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home:
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield Path(home)


def table(*ids: int) -> Tables:
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32))}


def hear(engine: PrefillEngine | DecodeEngine, room: int) -> RoomEvent:
    """The next event of a room."""
    deadline_s = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline_s:
        for event in engine.events(0.2):
            if event.room == room:
                return event
    raise AssertionError(f"nothing was said of room {room}")


@dataclass
class Side:
    """One vLLM: its tensors, its node, and what has attached to that."""

    tensors: dict[str, torch.Tensor]
    node: NodeProcess

    @contextmanager
    def attached(self, kind: type[PrefillEngine | DecodeEngine]) -> Iterator[Any]:
        regions = rank_regions(read_cache(self.tensors).geometry.components[0], self.tensors, R0, tp_size=1)
        with kind.adopt(self.node.runtime_dir, {R0: regions}) as engine:
            yield engine

    def blocks(self, *ids: int) -> torch.Tensor:
        return torch.stack([tensor[list(ids)] for tensor in self.tensors.values()]).view(torch.int16)


@contextmanager
def side(role: Role) -> Iterator[Side]:
    tensors = caches(range(3), 4, 6)
    node = open_node(plan(role, read_cache(tensors)), timeout_s=LIMIT_S)
    assert isinstance(node, NodeProcess)
    try:
        yield Side(tensors, node)
    finally:
        node.close()


def cross(room: int, source: Side, target: Side, sender: PrefillEngine, reader: DecodeEngine) -> None:
    """Move the blocks of one request."""
    for each in (source, target):
        eventually("it is ready", lambda node=each.node: not why_not_ready(CALLS, node.endpoint().http_url), LIMIT_S)
    control = source.node.endpoint().control
    assert control is not None
    place = (PeerAddress(endpoint=control.endpoint, public_key=control.public_key),)
    before = target.blocks(*range(BLOCKS)).clone()
    sender.hold(room, prompt_tokens=3 * TOKENS, tables=table(5, 0, 3), published_tokens=3 * TOKENS, metadata=b"first")
    reader.fetch(room, prompt_tokens=3 * TOKENS, prefill=place, tables=table(2, 6, 1))
    event = hear(reader, room)
    assert (event.kind, event.metadata) == ("committed", {str(R0): b"first"}), event.reason
    assert hear(sender, room).kind == "completed"
    assert torch.equal(target.blocks(2, 6, 1), source.blocks(5, 0, 3))
    assert torch.equal(target.blocks(0, 3, 4, 5), before[:, [0, 3, 4, 5]])


def end_of(pid: int) -> None:
    """Wait until a process that may be somebody else's child has ended."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([process], [], [], LIMIT_S)[0], f"process {pid} lives"
    finally:
        os.close(process)


@pytest.mark.thorough
def test_blocks_cross_and_a_node_that_was_killed_comes_back_and_serves_again() -> None:
    with side(Role.PREFILL) as source, side(Role.DECODE) as target, source.attached(PrefillEngine) as sender:
        with target.attached(DecodeEngine) as reader:
            cross(1, source, target, sender, reader)
            first = target.node.endpoint()
            os.kill(first.pid, signal.SIGKILL)
            eventually("the end is seen", lambda: target.node.ends, LIMIT_S)
            assert "killed by SIGKILL" in target.node.ends[0]

        def again() -> DaemonEndpoint | None:
            with suppress(NotReadyError):
                return target.node.endpoint()
            return None

        second = eventually("the next one listens", again, LIMIT_S)
        assert (second.instance, second.node) == (first.instance, first.node)
        assert second.incarnation != first.incarnation
        for tensor in target.tensors.values():
            tensor.zero_()
        with target.attached(DecodeEngine) as reader:
            cross(2, source, target, sender, reader)
        directories = [source.node.runtime_dir, target.node.runtime_dir]
        pids = [source.node.pid, target.node.pid]
    assert not any(directory.exists() for directory in directories)
    for pid in pids:
        end_of(pid)


PARENT = """
import sys, time, torch
from kvbridge.core.ids import Role
from kvbridge.engine.adapters.vllm.node_process import open_node
from tests.integration.test_vllm_node import plan, read_cache
from tests.helpers.vllm_caches import caches
node = open_node(plan(Role.PREFILL, read_cache(caches(range(3), 4, 6))), timeout_s=120)
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
    ):
        try:
            assert parent.stdout is not None
            endpoint = read_endpoint(Path(parent.stdout.readline().strip()))
            assert endpoint is not None
            eventually("its log", lambda: b"prefill" in os.pread(log.fileno(), 1 << 20, 0), LIMIT_S)
        finally:
            parent.kill()
        end_of(endpoint.pid)


def test_a_node_that_cannot_start_says_what_and_why_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    made = plan(
        Role.PREFILL, read_cache(caches(range(3), 4, 6)), control={"curve": {"secret_key_file": "/nowhere/a.key"}}
    )
    with pytest.raises(
        PeerError, match=r"could not start: exit code 3; .*Try it by itself: kvbridge prefill"
    ) as raised:
        open_node(made, timeout_s=LIMIT_S)
    assert "/nowhere/a.key" in capfd.readouterr().err
    command = str(raised.value).partition("Try it by itself: kvbridge ")[2].split()
    tried = subprocess.run(
        [sys.executable, "-m", "kvbridge", *command], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (tried.returncode, "/nowhere/a.key" in tried.stderr) == (3, True)


@pytest.mark.thorough
def test_another_engine_of_the_same_name_is_refused_and_the_first_goes_on() -> None:
    made = plan(Role.PREFILL, read_cache(caches(range(3), 4, 6)))
    first = open_node(made, timeout_s=LIMIT_S)
    try:
        with pytest.raises(ConflictError, match=r"engine id .* runs on this host already .*engine_id of its own"):
            open_node(made, timeout_s=0)
        CALLS.ask(Readiness, "GET", f"{first.endpoint().http_url}/ready")
    finally:
        first.close()
    open_node(made, timeout_s=LIMIT_S).close()


@pytest.mark.thorough
def test_a_node_that_an_operator_runs_is_found_by_its_directory() -> None:
    with side(Role.PREFILL) as ours, ExitStack() as stack:
        directory = str(ours.node.runtime_dir)
        extra = {"runtime_dir": directory}
        operated = NodePlan(Role.PREFILL, "another", read_cache(ours.tensors), 1, {R0: "cpu"}, extra)
        found = open_node(operated, timeout_s=LIMIT_S)
        stack.callback(found.close)
        assert isinstance(found, OperatedNode)
        assert found.endpoint() == ours.node.endpoint()
        other = NodePlan(Role.DECODE, "another", operated.cache, 1, {R0: "cpu"}, extra)
        with pytest.raises(ConfigError, match="is of role prefill; this vLLM needs one of role decode"):
            open_node(other, timeout_s=LIMIT_S)
        found.close()
        assert ours.node.endpoint().pid == ours.node.pid
    with pytest.raises(NotReadyError, match="start one there, or take runtime_dir out"):
        found.endpoint()

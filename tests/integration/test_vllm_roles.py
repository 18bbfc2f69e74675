"""Both halves of the connector over real nodes and tensors, with this test in vLLM's place."""

from __future__ import annotations

import os
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit import Guard
from kvbridge.engine.vllm.processes import Scheduler, Worker
from kvbridge.engine.vllm.requests import Request
from kvbridge.engine.vllm.stats import TransferStats, no_counts
from tests.helpers.matrices import kept
from tests.helpers.vllm_links import BLOCKS, TOKENS, caches, instance

R0 = Rank(pp=0, tp=0)
LIMIT_S = 120.0
PROMPT = 3 * TOKENS - 1
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}


@pytest.fixture(autouse=True)
def runtime_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home:
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield Path(home)


class Vllm:
    """A vLLM without the model, all of its workers in this process."""

    def __init__(self, *roles: Role, tp_size: int = 1) -> None:
        ranks = [Rank(pp=0, tp=tp) for tp in range(tp_size)]
        self.caches = [caches(range(3), 4 // tp_size, 6) for _ in ranks]
        transports = {"transports": {"order": ["mooncake"]}}
        name = f"test-{uuid.uuid4()}"
        self.instance = instance(*roles, block_tokens=TOKENS, tp_size=tp_size, engine_id=name, extra=transports)
        self.stats = TransferStats()
        guard = Guard(self.stats.failed)
        self.scheduler = Scheduler(self.instance, self.stats, guard)
        self.workers = [Worker(self.instance, rank, guard) for rank in ranks]
        told = [
            worker.register(held, {"attention_backend": "CPU_ATTN"})
            for worker, held in zip(self.workers, self.caches, strict=True)
        ]
        self.scheduler.start(dict(zip(ranks, told, strict=True)))
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []

    def step(self) -> None:
        """The calls of vLLM, in its order."""
        self.scheduler.look()
        said = self.scheduler.step()
        for worker in self.workers:
            worker.start(said)
            sent, received, failed = worker.results()
            for role, nodes in worker.closed_here().items():
                self.scheduler.closed(worker.number, role, nodes)
            self.scheduler.reported(received, sent)
            self.sent += sent
            self.received += received
            self.failed += failed
        time.sleep(0.001)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def blocks(self, *ids: int) -> torch.Tensor:
        """For all layers and all heads: [layers, blocks, heads, tokens, content]."""
        held = [torch.stack([tensor[list(ids)] for tensor in cache.values()]) for cache in self.caches]
        return torch.cat(held, dim=2).view(torch.int16)

    def wipe(self) -> None:
        for cache in self.caches:
            for tensor in cache.values():
                tensor.zero_()

    def node_pid(self, role: Role) -> int:
        return self.rooms(role).process.endpoint().pid

    def rooms(self, role: Role) -> Any:
        return self.scheduler.prefill if role is Role.PREFILL else self.scheduler.decode

    def load(self, params: dict[str, Any] | None, blocks: list[int], digest: bytes = b"p") -> str:
        """A request whose prompt is elsewhere, up to where vLLM waits for its blocks."""
        request = Request(f"load-{uuid.uuid4()}", PROMPT, digest, params)
        self.scheduler.arrived(request)
        assert self.scheduler.decode.matched_tokens(request, 0) == PROMPT
        self.scheduler.decode.allocated(request, (blocks,), PROMPT)
        assert self.scheduler.decode.matched_tokens(request, 0) == 0
        return request.id

    def hold(self, blocks: list[int]) -> tuple[str, dict[str, Any]]:
        """A request that has been computed for somebody else."""
        request = Request(f"hold-{uuid.uuid4()}", PROMPT, b"p", HOLD)
        self.scheduler.arrived(request)
        held, params = self.scheduler.finished(request, (blocks,), well=True)
        assert held
        assert params is not None
        return request.id, params


@contextmanager
def vllms(*roles: tuple[Role, ...], tp_sizes: tuple[int, int] = (1, 1)) -> Iterator[list[Vllm]]:
    made: list[Vllm] = []
    try:
        for each, tp_size in zip(roles, tp_sizes, strict=True):
            made.append(Vllm(*each, tp_size=tp_size))
        yield made
    finally:
        for one in made:
            one.close()


def step_until(engines: list[Vllm], done: Any, what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not done():
        assert time.monotonic() < deadline_s, what
        for engine in engines:
            engine.step()


def cross(source: Vllm, target: Vllm) -> None:
    """One request in plain order."""
    before = target.blocks(*range(BLOCKS)).clone()
    held, params = source.hold([5, 4, 3])
    loaded = target.load(params, [2, 6, 1])
    step_until([source, target], lambda: loaded in target.received and held in source.sent, "a request that crosses")
    assert not target.failed
    assert torch.equal(target.blocks(2, 6, 1), source.blocks(5, 4, 3))
    assert torch.equal(target.blocks(0, 3, 4, 5), before[:, [0, 3, 4, 5]])


def refused(source: Vllm, target: Vllm) -> None:
    """A room that prefill does not hold fails soon, and another prompt does not get one that it holds."""
    held, params = source.hold([5, 4, 3])
    unknown = params | {"kvbridge": params["kvbridge"] | {"room": str(int(params["kvbridge"]["room"]) ^ 1)}}
    for wrong, digest in ((unknown, b"p"), (params, b"another")):
        target.received.clear()
        target.failed.clear()
        loaded = target.load(wrong, [2, 6, 1], digest)
        step_until([target], lambda loaded=loaded: target.received == [loaded], "a load that was refused")
        assert target.failed == [loaded]
    assert held not in source.sent
    target.failed.clear()


def node_dies(role: Role, source: Vllm, target: Vllm) -> None:
    """Kill a node: its loads and held requests end."""
    if role is Role.PREFILL:
        held, _ = source.hold([5, 4, 3])
        source.step()
        os.kill(source.node_pid(role), signal.SIGKILL)
        step_until([source], lambda: held in source.sent, "a request that was held by a dead node")
        return
    address = source.hold([5, 4, 3])[1]["kvbridge"]["prefill"]
    params = {"do_remote_prefill": True, "kvbridge": {"room": "77", "prefill": address}}
    loaded = target.load(params, [2, 6, 1])  # it waits: nobody said that the room is held
    target.step()
    os.kill(target.node_pid(role), signal.SIGKILL)
    step_until([target], lambda: loaded in target.received, "a load of a dead node")
    assert target.failed == [loaded]
    target.failed.clear()


@pytest.mark.parametrize("role", [Role.PREFILL, kept(Role.DECODE, False)])
def test_prompts_cross_also_after_a_node_has_died_and_nothing_is_left(role: Role, runtime_home: Path) -> None:
    with vllms((Role.PREFILL,), (Role.DECODE,), tp_sizes=(1, 2)) as (source, target):
        cross(source, target)
        assert counted(target) == source.blocks(5, 4, 3).nbytes
        refused(source, target)
        victim = source if role is Role.PREFILL else target
        first, rooms = victim.node_pid(role), victim.rooms(role)
        node_dies(role, source, target)
        step_until([victim], lambda: rooms.node and rooms.process.endpoint().pid != first, "the next node")
        target.wipe()
        cross(source, target)
    assert not list(runtime_home.iterdir())


def counted(target: Vllm) -> int:
    """The bytes of a load: the scheduler's process may hear of the load later than the worker that reports it."""
    loaded: list[int] = []
    step_until(
        [target], lambda: loaded.extend((target.scheduler.stats.take() or no_counts())["bytes"]) or loaded, "a count"
    )
    return sum(loaded)


@pytest.mark.thorough
def test_instances_of_both_roles_serve_each_other() -> None:
    roles = (Role.PREFILL, Role.DECODE)
    with vllms(roles, roles) as (source, target):
        cross(source, target)
        source.wipe()
        cross(target, source)
        assert (source.sent[1:], target.received[1:]) == ([], [])


def test_a_node_that_cannot_be_started_ends_the_start_in_our_words() -> None:
    tensors = caches(range(3), 4, 6)
    extra = {"transports": {"odrer": ["mooncake"]}}
    made = instance(Role.PREFILL, block_tokens=TOKENS, engine_id="x", extra=extra)
    stats = TransferStats()
    guard = Guard(stats.failed)
    worker, scheduler = Worker(made, R0, guard), Scheduler(made, stats, guard)
    try:
        report = worker.register(tensors, {})
        with pytest.raises(ConfigError, match="odrer"):
            scheduler.start({R0: report})
    finally:
        worker.close()
        scheduler.close()
    assert not made.place(Role.PREFILL).runtime_dir.exists()

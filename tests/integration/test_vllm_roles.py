"""Both halves of the connector over real nodes and tensors, with this test in vLLM's place."""

import os
import random
import signal
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvbridge.core.errors import ConfigError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.kit import Guard
from kvbridge.engine.vllm.groups import NULL_BLOCK, CacheGroup, CacheGroups, GroupKind
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

    def __init__(self, *roles: Role, tp_size: int = 1, tensors: dict[str, torch.Tensor] | None = None, **more: Any):
        """`tensors` and `more`: the caches of its only worker, and fields of the instance, of another model."""
        ranks = [Rank(pp=0, tp=tp) for tp in range(tp_size)]
        self.caches = [tensors or caches(range(3), 4 // tp_size, 6) for _ in ranks]
        transports = {"transports": {"order": ["mooncake"]}}
        name = f"test-{uuid.uuid4()}"
        self.instance = instance(*roles, block_tokens=TOKENS, tp_size=tp_size, engine_id=name, extra=transports, **more)
        self.stats = TransferStats()
        guard = Guard(self.stats.failed)
        self.scheduler = Scheduler(self.instance, self.stats, guard)
        self.workers = [Worker(self.instance, rank, guard) for rank in ranks]
        told = [
            worker.register(held, {"attention_backend": "CPU_ATTN"})
            for worker, held in zip(self.workers, self.caches, strict=True)
        ]
        self.scheduler.start(dict(zip(ranks, told, strict=True)))
        self._reported: Counter[tuple[str, str]] = Counter()
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
            self.failed += failed - set(self.failed)
            sent, received = self._by_all("sent", sent), self._by_all("received", received)
            self.scheduler.reported(received, sent)
            self.sent += sent
            self.received += received
        time.sleep(0.001)

    def _by_all(self, what: str, reported: set[str]) -> set[str]:
        """Return the requests that each worker has reported now: vLLM waits for all, and ends of a report too many."""
        self._reported.update((what, one) for one in reported)
        counts = {one: self._reported[what, one] for one in reported}
        assert max(counts.values(), default=0) <= len(self.workers)
        return {one for one, count in counts.items() if count == len(self.workers)}

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

    def load(
        self, params: dict[str, Any] | None, *blocks: list[int], digest: bytes = b"p", tokens: int = PROMPT
    ) -> str:
        """A request whose prompt is elsewhere, up to where vLLM waits for its blocks, which are those of each group."""
        request = Request(f"load-{uuid.uuid4()}", tokens, digest, params)
        self.scheduler.arrived(request)
        assert self.scheduler.decode.matched_tokens(request, 0) == tokens
        self.scheduler.decode.allocated(request, blocks, tokens)
        assert self.scheduler.decode.matched_tokens(request, 0) == 0
        return request.id

    def hold(self, *blocks: list[int], tokens: int = PROMPT) -> tuple[str, dict[str, Any]]:
        """A request that has been computed for somebody else, with the blocks of each group."""
        request = Request(f"hold-{uuid.uuid4()}", tokens, b"p", HOLD)
        self.scheduler.arrived(request)
        held, params = self.scheduler.finished(request, blocks, well=True)
        assert held
        assert params is not None
        return request.id, params


@contextmanager
def vllms(*roles: tuple[Role, ...], more: Sequence[dict[str, Any]] = ({}, {})) -> Iterator[list[Vllm]]:
    made: list[Vllm] = []
    try:
        for each, fields in zip(roles, more, strict=True):
            made.append(Vllm(*each, **fields))
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
        loaded = target.load(wrong, [2, 6, 1], digest=digest)
        step_until([target], lambda loaded=loaded: target.received == [loaded], "a load that was refused")
        assert target.failed == [loaded]
    assert held not in source.sent
    target.failed.clear()


def node_dies(role: Role, source: Vllm, target: Vllm) -> None:
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
    with vllms((Role.PREFILL,), (Role.DECODE,), more=({}, {"tp_size": 2})) as (source, target):
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


def rows_cross(groups, caches_of, sizes, prompts):
    """Prompts cross between two pools of rows, and every byte of their blocks is compared, and that no other byte has changed.

    `sizes`: bytes of a row, bytes that caches have of it, and rows of a pool. Returns how many rows each prompt had.
    """
    row, used, blocks = sizes
    memory = [torch.randint(0, 256, (blocks, row), dtype=torch.uint8) for _ in range(2)]
    made = CacheGroups(tuple(groups), {"kv_groups": "alike"}, blocks)
    more = [{"tensors": caches_of(pool), "groups": made, "latent": True, "kv_heads": 1} for pool in memory]
    counts = []
    with vllms((Role.PREFILL,), (Role.DECODE,), more=more) as (source, target):
        for tokens in prompts:
            for pool in memory:
                pool.random_(0, 256)
            theirs, ours = (lists(groups, tokens, random.Random(f"{tokens} {side}"), blocks) for side in "pd")
            before, order = memory[1].clone(), made.of(tokens)
            held, params = source.hold(*theirs, tokens=tokens)
            loaded = target.load(params, *ours, tokens=tokens)
            over = lambda held=held, loaded=loaded: loaded in target.received and held in source.sent  # noqa: E731
            step_until([source, target], over, "rows that cross")
            assert not target.failed
            before[list(order.pick(ours)), :used] = memory[0][list(order.pick(theirs)), :used]
            assert torch.equal(memory[1], before)
            counts.append(len(order))
    return counts


def lists(groups: Sequence[CacheGroup], tokens: int, draw: random.Random, blocks: int) -> list[list[int]]:
    """Return blocks as vLLM lists them for a request, drawn from a pool: those that nobody needs are null."""
    free = draw.sample(range(1, blocks), blocks - 1)
    found = [[NULL_BLOCK] * (max(group.blocks(tokens), default=-1) + 1) for group in groups]
    for group, of in zip(groups, found, strict=True):
        for number in group.blocks(tokens):
            of[number] = free.pop()
    return found


def test_blocks_of_several_groups_are_rows_that_cross_whoever_lies_over_whom() -> None:
    """Caches of different sizes lie over each other: the same bytes are ends of some and middles of others."""
    groups = [CacheGroup(GroupKind.FULL, 16), CacheGroup(GroupKind.WINDOW, 8, 20), CacheGroup(GroupKind.RING, 8)]

    def caches_of(pool: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = {"attn": [(0, 70), (70, 50)], "swa": [(0, 40), (40, 40), (80, 40)], "ring": [(0, 100)]}
        return {
            f"model.layers.{layer}.{name}": pool.as_strided(
                (pool.shape[0], 1, 1, size), (pool.stride(0), size, size, 1), start
            )
            for name, places in parts.items()
            for layer, (start, size) in enumerate(places)
        }

    assert rows_cross(groups, caches_of, (128, 120, 30), [1, 40, 100]) == [3, 7, 11]


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

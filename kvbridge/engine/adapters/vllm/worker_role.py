"""The connector in one worker process of vLLM: its tensors served to the nodes, and which requests it reports.

Owns: the rank workers of this process (threads), and by when they move nothing for a node that has ended. Must not know: vLLM.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import structlog
import torch

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Rank, Role
from kvbridge.engine.adapters.vllm.attachment import NodeAttachment
from kvbridge.engine.adapters.vllm.guard import Guard
from kvbridge.engine.adapters.vllm.instance import Instance
from kvbridge.engine.adapters.vllm.node_config import runtime_directory
from kvbridge.engine.adapters.vllm.requests import Results
from kvbridge.engine.adapters.vllm.scheduler_role import IDLE_LOOK_S, RankReport, StepOfRole
from kvbridge.engine.adapters.vllm.tensors import cache_component, rank_cache, rank_regions
from kvbridge.engine.adapters.vllm.worker_side import WorkerSide
from kvbridge.engine.adopted import AdoptedWorker
from kvbridge.engine.attachment import WorkerEnd

log = structlog.get_logger(__name__)

_STAYING: list[Mapping[str, torch.Tensor]] = []
"""Tensors that a rank worker may still reach, though it was to end: nobody may free them before this process ends."""


class ClosedNodes:
    """Of which incarnations of the node this rank moves nothing any more. Not of one that lives: it says itself what has failed."""

    def __init__(self) -> None:
        self._served: set[str] = set()

    def left(self, node: str) -> None:
        """The rank worker has ended of its own accord."""
        self._served.update({node} - {""})

    def take(self, ends: list[WorkerEnd], serves: str) -> list[str]:
        """Return which are closed since the last call. `serves`: the incarnation that the rank worker is with now, if any."""
        self._served.update(end.node for end in ends if end.node)
        gone = {end.node for end in ends if end.node and end.node_gone}
        gone |= {node for node in self._served if serves and node != serves}
        self._served -= gone
        return sorted(gone)


class _Half:
    """One role."""

    def __init__(self, role: Role, runtime_dir: Path, serve: Callable[[], AdoptedWorker], *, reports: bool) -> None:
        self.role = role
        self.side = WorkerSide(reports=reports)
        self._serve = serve
        self._worker: AdoptedWorker | None = serve()
        self._attachment = NodeAttachment(role, runtime_dir) if reports else None
        self._closed = ClosedNodes()
        self._next_look_s = 0.0

    def start(self, said: StepOfRole) -> None:
        self.side.start(said.step)
        self.side.heard(said.ended)

    def look_at_step(self, now_s: float) -> None:
        """As `look`, but seldom while nothing is under way."""
        if now_s >= self._next_look_s or not self.side.idle:
            self._next_look_s = now_s + IDLE_LOOK_S
            self.look()

    def look(self) -> None:
        if self._attachment is not None:
            self.side.heard(self._attachment.events())
        if self._worker is None:
            return
        for node in self._closed.take(self._worker.ends(), self._worker.node):
            log.info("transports_closed", node_role=self.role.value, incarnation=node)
            self.side.transports_closed(node)

    def unregister(self) -> None:
        if self._worker is not None:
            node = self._worker.node
            self._worker.close()
            self._closed.left(node)
            self._worker = None

    def restore(self) -> None:
        self._worker = self._worker or self._serve()

    def close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.unregister)
            if self._attachment is not None:
                stack.callback(self._attachment.close)


class WorkerRole:
    """For the worker's thread only. None of its methods waits, but `unregister` and `close`."""

    def __init__(self, instance: Instance, rank: Rank, guard: Guard) -> None:
        self._instance = instance
        self._rank = rank
        self._guard = guard
        self._halves: list[_Half] = []
        self._tensors: Mapping[str, torch.Tensor] = {}
        """Kept where they are while somebody may write to them."""

    @property
    def number(self) -> int:
        """Of this worker in its instance."""
        return self._rank.pp * self._instance.tp_size + self._rank.tp

    def register(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> RankReport:
        """Serve these tensors as soon as there are nodes, and return what the scheduler's process is to know of them.

        Raises UnsupportedError for tensors that cannot be transferred.
        """
        instance = self._instance
        cache = rank_cache(tensors, block_tokens=instance.block_tokens)
        self._tensors = dict(tensors)
        component = cache_component(
            cache.form, cache.layers, kv_heads=instance.kv_heads, latent=instance.latent, tp_size=instance.tp_size
        )
        regions = rank_regions(component, tensors, self._rank, tp_size=instance.tp_size)
        for role in instance.roles:
            runtime_dir = runtime_directory(role, instance.engine_id, instance.extra)
            serve = partial(AdoptedWorker, runtime_dir, self._rank, regions)
            self._halves.append(_Half(role, runtime_dir, serve, reports=self.number == 0))
        device = next(iter(tensors.values())).device
        return RankReport(
            cache=cache,
            device=f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu",
            host=socket.gethostname(),
            facts=dict(facts),
        )

    def unregister(self) -> None:
        """Stop serving the tensors: nothing reaches them any more until `restore`. Waits for that. Harmless when done already.

        Raises UnclosedError or DeadlineError when something may still reach them: they must not sleep, nor be freed.
        """
        self._end(half.unregister for half in self._halves)

    def restore(self) -> None:
        """Serve them again, where they were. Harmless while they are served."""
        for half in self._halves:
            half.restore()

    def start(self, said: Mapping[Role, StepOfRole]) -> None:
        """Take what the scheduler's process has begun."""
        for half in self._halves:
            if half.role in said:
                with self._guard.over("start"):
                    half.start(said[half.role])

    def results(self) -> Results:
        """Return what is over."""
        sent: frozenset[str] = frozenset()
        received: frozenset[str] = frozenset()
        now_s = time.monotonic()
        for half in self._halves:
            with self._guard.over("look"):
                half.look_at_step(now_s)
            over = half.side.results()
            sent, received = sent | over.sent, received | over.received
        self._guard.look()
        return Results(sent, received)

    def unfilled_blocks(self) -> set[int]:
        """See WorkerSide."""
        return set().union(*(half.side.unfilled_blocks() for half in self._halves))

    def closed_here(self) -> dict[Role, tuple[str, ...]]:
        """Return the incarnations of nodes that this rank moves nothing for any more, since the last call."""
        return {half.role: nodes for half in self._halves if (nodes := half.side.closed_here())}

    def close(self) -> None:
        """Leave the nodes; afterwards nothing of this process moves a byte. Raises as `unregister` does."""
        self._end(half.close for half in self._halves)

    def _end(self, endings: Iterable[Callable[[], None]]) -> None:
        """Call each, whatever becomes of the others. Tensors that may still be written to stay for as long as this process."""
        try:
            with ExitStack() as stack:
                for end in endings:
                    stack.callback(end)
        except BridgeError:
            _STAYING.append(self._tensors)
            raise

"""The connector in the process of vLLM's scheduler: the nodes of an instance, and the rooms at each of them.

An instance of both roles has two nodes over the same tensors. Each role hears of every request, and takes what concerns it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from kvbridge.core.errors import UnsupportedError
from kvbridge.core.ids import FrozenModel, Rank, Role
from kvbridge.engine.adapters.vllm.attachment import NodeAttachment
from kvbridge.engine.adapters.vllm.decode_rooms import DecodeRooms
from kvbridge.engine.adapters.vllm.guard import Guard
from kvbridge.engine.adapters.vllm.instance import Instance
from kvbridge.engine.adapters.vllm.node_config import NodePlan
from kvbridge.engine.adapters.vllm.node_process import START_S, open_node
from kvbridge.engine.adapters.vllm.prefill_rooms import BlockPins, PrefillRooms
from kvbridge.engine.adapters.vllm.requests import Request, StepMetadata
from kvbridge.engine.adapters.vllm.stats import TransferStats
from kvbridge.engine.adapters.vllm.tensors import InstanceCache, RankCache, instance_cache


class RankReport(FrozenModel):
    """What each worker tells the scheduler's process once its KV cache is there."""

    cache: RankCache
    device: str
    """`cpu`, or `cuda:N`."""
    host: str
    facts: dict[str, str]


class Scheduler:
    """For the scheduler's thread only. None of its methods waits, but `start` and `close`.

    Nodes are looked at when a request comes and at steps. What is said in between goes to the node that was there then, or to
    nobody: another one is attached to after the next look only.
    """

    def __init__(self, instance: Instance, stats: TransferStats, guard: Guard) -> None:
        self._instance = instance
        self._closing = ExitStack()
        self._guard = guard
        guard.lose = self.lost
        self.stats = stats
        self.prefill: PrefillRooms | None = None
        self.decode: DecodeRooms | None = None
        self.pins: BlockPins | None = None
        """Set before `start`, if at all."""

    @property
    def roles(self) -> tuple[PrefillRooms | DecodeRooms, ...]:
        """What there is of the two."""
        return tuple(rooms for rooms in (self.prefill, self.decode) if rooms is not None)

    # ------------------------------------------------------------------ start and end

    def start(self, reports: Mapping[Rank, RankReport]) -> None:
        """All workers have their KV caches: start the nodes, and wait until they serve rooms.

        Raises a BridgeError, in words for whoever starts vLLM, when they cannot.
        """
        cache = self._read_cache(reports)
        devices = {rank: report.device for rank, report in reports.items()}
        instance = self._instance
        with ExitStack() as stack:
            for role in instance.roles:
                node = open_node(NodePlan(role, instance.engine_id, cache, instance.tp_size, devices, instance.extra))
                stack.callback(node.close)
                attachment = NodeAttachment(role, node.runtime_dir)
                stack.callback(attachment.close)
                attachment.begin()
                of_role = (instance, node, attachment, self.stats, self._guard)
                if role is Role.PREFILL:
                    self.prefill = PrefillRooms(*of_role)
                    self.prefill.pins = self.pins
                else:
                    self.decode = DecodeRooms(*of_role)
            for rooms in self.roles:
                rooms.attachment.wait(START_S)
                rooms.look()
            self._closing = stack.pop_all()

    def _read_cache(self, reports: Mapping[Rank, RankReport]) -> InstanceCache:
        hosts = {report.host for report in reports.values()}
        if len(hosts) > 1:
            raise UnsupportedError(
                f"the workers of this vLLM run on several hosts ({', '.join(sorted(hosts))}), which kvbridge does not serve yet: "
                "keep tensor and pipeline parallelism on one host"
            )
        return instance_cache(
            {rank: report.cache for rank, report in reports.items()},
            name=str(self._instance.facts["model"]),
            kv_heads=self._instance.kv_heads,
            latent=self._instance.latent,
            facts={**self._instance.facts, **reports[Rank(pp=0, tp=0)].facts},
        )

    def close(self) -> None:
        """Leave the nodes and end them."""
        self._closing.close()

    # ------------------------------------------------------------------ requests

    def arrived(self, request: Request) -> None:
        """A request has come (`on_new_request`). What is wrong about its room is told, and it is a request like any other."""
        self._look_now()
        for rooms in self.roles:
            with self._guard.over("computed_here", request.id, lost=partial(self.lost, request.id)):
                rooms.arrived(request)

    def declined(self, request: Request) -> None:
        """A request has come that is not computed here (`on_new_request` of one that the API has refused)."""
        self._look_now()
        if self.decode is not None:
            with self._guard.over("not_withdrawn", request.id):
                self.decode.declined(request)

    def lost(self, request: str, reason: str) -> None:
        """A hook has failed in the middle of what it does for a request."""
        for rooms in self.roles:
            rooms.lost(request, reason)

    def finished(self, request: Request, blocks: Sequence[int], *, well: bool) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks are still needed, and the answer's `kv_transfer_params` (`request_finished`).

        The blocks of a load that is under way vLLM keeps by itself until the load is reported.
        """
        held, answer = False, None
        if self.decode is not None:
            with self._guard.over("finished", request.id, lost=partial(self.decode.lost, request.id)):
                self.decode.finished(request.id)
        if self.prefill is not None:
            with self._guard.over("finished", request.id, lost=partial(self.prefill.lost, request.id)):
                held, answer = self.prefill.finished(request, blocks, well=well)
        if held:
            self.stats.held(request.id, len(blocks))
        return held, answer

    # ------------------------------------------------------------------ steps

    def look(self) -> None:
        """Take what the nodes have said, at a step. One without work costs next to nothing, since all requests wait for it."""
        now_s = time.monotonic()
        for rooms in self.roles:
            with self._guard.over("look"):
                rooms.look_at_step(now_s)
        self._guard.look()

    def _look_now(self) -> None:
        for rooms in self.roles:
            with self._guard.over("look"):
                rooms.look()

    def step(self) -> dict[Role, StepMetadata]:
        """Return what the workers are to hear (`build_connector_meta`). `look` comes before it."""
        return {rooms.role: rooms.step() for rooms in self.roles if not rooms.idle}

    def closed(self, rank: int, role: Role, nodes: Iterable[str]) -> None:
        """A rank moves nothing any more for these incarnations of the node."""
        for rooms in self.roles:
            if rooms.role is role:
                rooms.closed(rank, nodes)

    def reported(self, received: Collection[str], sent: Iterable[str]) -> None:
        """Worker 0 has reported these (`update_connector_output`)."""
        self.stats.let_go(sent)
        if self.decode is not None:
            self.decode.reported(received)

"""The connector in vLLM's processes: the scheduler's, with the nodes and their rooms, and each worker's, with the tensors.

An instance of both roles has two nodes over the same tensors. Each role gets every request, and takes those that concern it.
Every worker reports every transfer, as vLLM expects by default: MultiConnector drops what a connector says of that.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from kvbridge.core.errors import BridgeError, UnsupportedError
from kvbridge.core.ids import FrozenModel, Rank, Role
from kvbridge.engine.kit import Guard
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.node import START_S, NodePlan, open_node
from kvbridge.engine.kit.tensors import (
    InstanceCache,
    RankCache,
    cache_component,
    instance_cache,
    rank_cache,
    rank_regions,
)
from kvbridge.engine.kit.transfers import ServedRole, StepMetadata
from kvbridge.engine.memory import AdoptedWorker
from kvbridge.engine.vllm import VLLM
from kvbridge.engine.vllm.decode_rooms import DecodeRooms
from kvbridge.engine.vllm.groups import NULL_BLOCK
from kvbridge.engine.vllm.pages import rank_pages
from kvbridge.engine.vllm.prefill_rooms import BlockPins, PrefillRooms
from kvbridge.engine.vllm.requests import Instance, Request
from kvbridge.engine.vllm.stats import TransferStats

_STAYING: list[Mapping[str, torch.Tensor]] = []
"""Tensors that a rank worker may still reach although it was to end. They stay until this process ends."""


class RankReport(FrozenModel):
    """A worker's report to the scheduler's process, made once, when the worker has its KV cache."""

    cache: RankCache
    kv_heads: int
    latent: bool
    """As `instance_cache` takes them (`Pages`)."""
    device: str
    """`cpu`, or `cuda:N`."""
    host: str
    facts: dict[str, str]


class Scheduler:
    """For the scheduler's thread only. No method but `start` and `close` waits.

    Nodes are looked at when a request comes and at steps. Calls in between go to the node of the last look, or to nobody.
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
        """Set before `start`; None if vLLM cannot pin blocks."""

    @property
    def roles(self) -> tuple[PrefillRooms | DecodeRooms, ...]:
        """Rooms of the roles that this instance has."""
        return tuple(rooms for rooms in (self.prefill, self.decode) if rooms is not None)

    def start(self, reports: Mapping[Rank, RankReport]) -> None:
        """Start the nodes, and wait until they serve rooms. All workers have their KV caches now.

        Raises a BridgeError, in words for the person who starts vLLM.
        """
        cache = self._read_cache(reports)
        devices = {rank: report.device for rank, report in reports.items()}
        instance = self._instance
        with ExitStack() as stack:
            for role in instance.roles:
                node = open_node(NodePlan(instance.place(role), cache, instance.tp_size, devices))
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
        first = reports.get(Rank(pp=0, tp=0))
        if first is None:
            raise UnsupportedError(
                "MultiConnector passes on the handshake of one connector, and that was another one: name KvbridgeConnector first "
                "in kv_connector_extra_config.connectors"
            )
        return instance_cache(
            {rank: report.cache for rank, report in reports.items()},
            name=str(self._instance.facts["model"]),
            kv_heads=first.kv_heads,
            latent=first.latent,
            facts={**self._instance.facts, **first.facts},
        )

    def close(self) -> None:
        self._closing.close()

    def arrived(self, request: Request) -> None:
        """A request has come (`on_new_request`). One with a wrong room is logged and computed here."""
        self._look()
        for rooms in self.roles:
            with self._guard.over("computed_here", request.id, lost=partial(self.lost, request.id)):
                rooms.arrived(request)

    def declined(self, request: Request) -> None:
        """A request has come that the API has refused (`on_new_request`): it is not computed here."""
        self._look()
        if self.decode is not None:
            with self._guard.over("not_withdrawn", request.id):
                self.decode.declined(request)

    def lost(self, request: str, reason: str) -> None:
        """A hook has failed in the middle of a request."""
        for rooms in self.roles:
            rooms.lost(request, reason)

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]], *, well: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks are still needed, and the answer's `kv_transfer_params` (`request_finished_all_groups`).

        vLLM itself keeps the blocks of a load until the load is reported.
        """
        held, answer = False, None
        if self.decode is not None:
            with self._guard.over("finished", request.id, lost=partial(self.decode.lost, request.id)):
                self.decode.finished(request.id)
        if self.prefill is not None:
            with self._guard.over("finished", request.id, lost=partial(self.prefill.lost, request.id)):
                held, answer = self.prefill.finished(request, blocks, well=well)
        if held:
            self.stats.held(request.id, sum(block != NULL_BLOCK for group in blocks for block in group))
        return held, answer

    def look(self) -> None:
        """Take the nodes' events at a step. A step without work costs next to nothing, because all requests wait for it."""
        self._look(at_step=True)
        self._guard.look()

    def _look(self, *, at_step: bool = False) -> None:
        for rooms in self.roles:
            with self._guard.over("look"):
                rooms.look(at_step=at_step)

    def step(self) -> dict[Role, StepMetadata]:
        """Return the news for the workers (`build_connector_meta`). Call `look` before it."""
        return {rooms.role: rooms.step() for rooms in self.roles if not rooms.idle}

    def closed(self, rank: int, role: Role, nodes: Iterable[str]) -> None:
        """A rank moves nothing any more for these incarnations of the node."""
        for rooms in self.roles:
            if rooms.role is role:
                rooms.closed(rank, nodes)

    def reported(self, received: Collection[str], sent: Iterable[str]) -> None:
        """All workers have reported these requests (`update_connector_output`)."""
        self.stats.let_go(sent)
        if self.decode is not None:
            self.decode.reported(received)


class Worker:
    """For the worker's thread only. No method but `unregister` and `close` waits."""

    def __init__(self, instance: Instance, rank: Rank, guard: Guard) -> None:
        self._instance = instance
        self._rank = rank
        self._guard = guard
        self.roles: list[ServedRole] = []
        self._tensors: Mapping[str, torch.Tensor] = {}
        """They stay where they are while a rank worker may write to them."""

    @property
    def number(self) -> int:
        return self._rank.pp * self._instance.tp_size + self._rank.tp

    def register(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, str]) -> RankReport:
        """Serve these tensors as soon as there are nodes. Return their description for the scheduler's process.

        Raises UnsupportedError for tensors that cannot be transferred.
        """
        instance, tp_size = self._instance, self._instance.tp_size
        pages = rank_pages(
            tensors, instance.groups, kv_heads=instance.kv_heads, latent=instance.latent, tp_size=tp_size
        )
        kv_heads, latent = pages.kv_heads, pages.latent
        cache = rank_cache(pages.tensors, block_tokens=instance.groups.page_tokens, product=VLLM)
        self._tensors = dict(tensors)
        component = cache_component(cache.form, cache.layers, kv_heads=kv_heads, latent=latent, tp_size=tp_size)
        regions = rank_regions(component, pages.tensors, self._rank, tp_size=tp_size)
        for role in instance.roles:
            runtime_dir = instance.place(role).runtime_dir
            attachment = NodeAttachment(role, runtime_dir)
            self.roles.append(ServedRole(role, partial(AdoptedWorker, runtime_dir, self._rank, regions), attachment))
            attachment.begin()
        device = next(iter(tensors.values())).device
        return RankReport(
            cache=cache,
            kv_heads=kv_heads,
            latent=latent,
            device=f"cuda:{device.index or 0}" if device.type == "cuda" else "cpu",
            host=socket.gethostname(),
            facts={**facts, **pages.facts},
        )

    def unregister(self) -> None:
        """Stop serving the tensors, and wait until nothing reaches them any more. Harmless when done already.

        Raises UnclosedError or DeadlineError when something may still reach them: vLLM must neither free them nor put them to
        sleep.
        """
        self._end(served.unregister for served in self.roles)

    def restore(self) -> None:
        """Serve the tensors again, at the same addresses. Harmless while they are served."""
        for served in self.roles:
            served.restore()

    def start(self, said: Mapping[Role, StepMetadata]) -> None:
        """Take the news of the scheduler's process."""
        for served in self.roles:
            if served.role in said:
                with self._guard.over("start"):
                    served.start(said[served.role])

    def results(self) -> tuple[set[str], set[str], set[str]]:
        """Return the requests since the last call that are sent, those whose load is over, and of the latter those that failed."""
        found: tuple[set[str], set[str], set[str]] = set(), set(), set()
        for served in self.roles:
            with self._guard.over("look"):
                served.look_at_step()
            for known, more in zip(found, served.results(), strict=True):
                known.update(more)
        self._guard.look()
        return found

    def closed_here(self) -> dict[Role, tuple[str, ...]]:
        """Return the incarnations of nodes for which this rank has ceased to move anything since the last call."""
        found = {served.role: tuple(served.closed) for served in self.roles if served.closed}
        for served in self.roles:
            served.closed.clear()
        return found

    def close(self) -> None:
        """Leave the nodes; afterwards nothing of this process moves a byte. Raises the errors of `unregister`."""
        self._end(served.close for served in self.roles)

    def _end(self, endings: Iterable[Callable[[], None]]) -> None:
        """Call all of them, also when some fail. Tensors that may still be written to stay until this process ends."""
        try:
            with ExitStack() as stack:
                for end in endings:
                    stack.callback(end)
        except BridgeError:
            _STAYING.append(self._tensors)
            raise

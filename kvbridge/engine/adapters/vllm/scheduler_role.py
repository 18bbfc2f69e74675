"""The connector in the process of vLLM's scheduler: the nodes of an instance, and the half of each that decides.

Owns: which roles this instance has, their nodes, and that a node which has come back is known as another. Must not know: vLLM.

An instance of both roles has two nodes over the same tensors. Each hears of every request, told only what concerns its role.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, UnsupportedError
from kvbridge.core.ids import FrozenModel, Rank, Role
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.adapters.vllm.attachment import NodeAttachment
from kvbridge.engine.adapters.vllm.guard import Guard
from kvbridge.engine.adapters.vllm.instance import Instance
from kvbridge.engine.adapters.vllm.node_config import NodePlan
from kvbridge.engine.adapters.vllm.node_process import START_S, Node, open_node
from kvbridge.engine.adapters.vllm.requests import LAST_EVENTS, BlockPins, Request, StepMetadata
from kvbridge.engine.adapters.vllm.scheduler_side import Place, SchedulerSide
from kvbridge.engine.adapters.vllm.stats import TransferStats
from kvbridge.engine.adapters.vllm.tensors import RankCache, instance_cache

IDLE_LOOK_S = 0.1
"""How often a node is looked at while nothing is under way. Each request that arrives looks first."""
FOR = {Role.PREFILL: "do_remote_prefill", Role.DECODE: "do_remote_decode"}
"""What of `kv_transfer_params` says that the other role is elsewhere, so that a node of this role has nothing to do with it."""


class RankReport(FrozenModel):
    """What each worker tells the scheduler's process once its KV cache is there."""

    cache: RankCache
    device: str
    """`cpu`, or `cuda:N`."""
    host: str
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class StepOfRole:
    """What the workers hear of one role at each step."""

    step: StepMetadata
    ended: tuple[RoomEvent, ...] = ()
    """Last events of rooms: worker 0 mostly knows, but it may have attached later than the scheduler's process."""


class _Half:
    """One role: its node, the attachment to that, and the half that decides."""

    def __init__(self, role: Role, instance: Instance, node: Node, stats: TransferStats, guard: Guard) -> None:
        self.role = role
        self._stats = stats
        self.node = node
        self.attachment = NodeAttachment(role, node.runtime_dir)
        place = Place(instance.block_tokens, instance.ranks, allowed_prefill=instance.allowed_prefill)
        self.side = SchedulerSide(place, self.attachment, guard)
        self._known = ""
        self._ended: list[RoomEvent] = []
        self._next_look_s = 0.0

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do here."""
        return self.side.idle and not (self._ended or self._stats.holds)

    def look_at_step(self, now_s: float) -> None:
        """As `look`, but seldom while nothing is under way: nobody waits for what the node may say then."""
        if now_s >= self._next_look_s or not self.idle:
            self._next_look_s = now_s + IDLE_LOOK_S
            self.look()

    def look(self) -> None:
        """Take what the node has said, and note when it is another."""
        events = self.attachment.events()
        self.side.heard(events)
        self._stats.heard(events)
        self._ended += [event for event in events if event.kind in LAST_EVENTS]
        node = self.attachment.node
        if node == self._known:
            return
        if self._known:
            self.side.node_lost()
        self._known = ""
        addresses = self._addresses() if node else None
        if addresses is not None:
            self.side.node_ready(node, addresses)
            self._known = node

    def _addresses(self) -> tuple[PeerAddress, ...] | None:
        """Where decode reaches the node; None while it does not say."""
        try:
            control = self.node.endpoint().control
        except BridgeError:
            return None
        return () if control is None else (control,)

    def told(self, request: Request) -> Request:
        """Return a request as this role is to see it."""
        if not request.params:
            return request
        return replace(request, params={**request.params, FOR[self.role]: False})

    def step(self) -> StepOfRole:
        ended, self._ended = self._ended, []
        return StepOfRole(self.side.step(), tuple(ended))


class SchedulerRole:
    """For the scheduler's thread only. None of its methods waits, but `start` and `close`.

    Nodes are looked at when a request comes and at steps. What is said in between goes to the node that was there then, or to
    nobody: another one is attached to after the next look only.
    """

    def __init__(self, instance: Instance, stats: TransferStats, guard: Guard) -> None:
        self._instance = instance
        self._halves: list[_Half] = []
        self._closing = ExitStack()
        self.stats = stats
        self._guard = guard
        guard.lose = self.lost
        self.pins: BlockPins | None = None
        """Set before `start`, if at all."""

    def start(self, reports: Mapping[Rank, RankReport]) -> None:
        """All workers have their KV caches: start the nodes, and wait until they serve rooms.

        Raises a BridgeError, in words for whoever starts vLLM, when they cannot.
        """
        instance = self._instance
        facts, hosts = {rank: report.facts for rank, report in reports.items()}, {r.host for r in reports.values()}
        if len(hosts) > 1:
            raise UnsupportedError(
                f"the workers of this vLLM run on several hosts ({', '.join(sorted(hosts))}), which kvbridge does not serve yet: "
                "keep tensor and pipeline parallelism on one host"
            )
        cache = instance_cache(
            {rank: report.cache for rank, report in reports.items()},
            name=str(instance.facts["model"]),
            kv_heads=instance.kv_heads,
            latent=instance.latent,
            facts={**instance.facts, **facts[Rank(pp=0, tp=0)]},
        )
        devices = {rank: report.device for rank, report in reports.items()}
        with ExitStack() as stack:
            for role in instance.roles:
                node = open_node(NodePlan(role, instance.engine_id, cache, instance.tp_size, devices, instance.extra))
                stack.callback(node.close)
                half = _Half(role, instance, node, self.stats, self._guard)
                if self.pins is not None:
                    half.side.use_pins(self.pins)
                stack.callback(half.attachment.close)
                self._halves.append(half)
            for half in self._halves:
                half.attachment.wait(START_S)
                half.look()
            self._closing = stack.pop_all()

    def look(self) -> None:
        """Take what the nodes have said, at a step. One without work costs next to nothing, since all requests wait for it."""
        now_s = time.monotonic()
        for half in self._halves:
            with self._guard.over("look"):
                half.look_at_step(now_s)
        self._guard.look()

    def _look_now(self) -> None:
        for half in self._halves:
            with self._guard.over("look"):
                half.look()

    def arrived(self, request: Request) -> None:
        """See SchedulerSide."""
        self._look_now()
        for half in self._halves:
            half.side.arrived(half.told(request))

    def declined(self, request: Request) -> None:
        """See SchedulerSide."""
        self._look_now()
        for half in self._halves:
            half.side.declined(half.told(request))

    def lost(self, request: str, reason: str) -> None:
        """See SchedulerSide."""
        for half in self._halves:
            half.side.lost(request, reason)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """See SchedulerSide."""
        return max(half.side.matched_tokens(half.told(request), computed_tokens) for half in self._halves)

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """See SchedulerSide."""
        for half in self._halves:
            half.side.allocated(half.told(request), blocks, external_tokens)

    def finished(self, request: Request, blocks: Sequence[int], *, well: bool) -> tuple[bool, dict[str, Any] | None]:
        """See SchedulerSide."""
        held, answer = False, None
        for half in self._halves:
            with self._guard.over("finished", request.id, lost=partial(half.side.lost, request.id)):
                its_held, its_answer = half.side.finished(half.told(request), blocks, well=well)
                held = held or its_held
                answer = answer if its_answer is None else dict(its_answer)
        if held:
            self.stats.held(request.id, len(blocks))
        return held, answer

    @property
    def computing(self) -> tuple[str, ...]:
        """See SchedulerSide."""
        return tuple(request for half in self._halves for request in half.side.computing)

    @property
    def has_pins(self) -> bool:
        """See SchedulerSide."""
        return any(half.side.has_pins for half in self._halves)

    def blocks_return(self, preempted: Collection[str]) -> bool:
        """See SchedulerSide."""
        return any(half.side.blocks_return(preempted) for half in self._halves)

    def preempted(self, requests: Collection[str]) -> None:
        """See SchedulerSide."""
        for half in self._halves:
            half.side.preempted(requests)

    def computed(self, request: str, tokens: int, in_flight_tokens: int, blocks: Sequence[int]) -> None:
        """See SchedulerSide."""
        for half in self._halves:
            half.side.computed(request, tokens, in_flight_tokens, blocks)

    def step(self) -> dict[Role, StepOfRole]:
        """Return what the workers are to hear. `look` comes before it."""
        return {half.role: half.step() for half in self._halves if not half.idle}

    def closed(self, rank: int, role: Role, nodes: Iterable[str]) -> None:
        """A rank has closed its transports of these incarnations."""
        for half in self._halves:
            if half.role is role:
                half.side.closed(rank, nodes)

    def reported(self, received: Iterable[str], sent: Iterable[str]) -> None:
        """See SchedulerSide."""
        self.stats.let_go(sent)
        loads = frozenset(received)
        for half in self._halves:
            half.side.reported(loads)

    def close(self) -> None:
        """Leave the nodes and end them."""
        self._closing.close()

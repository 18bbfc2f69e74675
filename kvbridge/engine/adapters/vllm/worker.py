"""The connector in one worker process of vLLM: its tensors served to the nodes, and which requests it reports.

Worker 0 of an instance reports for all; the others only say that they have closed their transports.
"""

from __future__ import annotations

import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import structlog
import torch

from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.session.states import WITHDRAWN
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.adapters.vllm.attachment import NodeAttachment
from kvbridge.engine.adapters.vllm.guard import Guard
from kvbridge.engine.adapters.vllm.instance import Instance
from kvbridge.engine.adapters.vllm.node_config import runtime_directory
from kvbridge.engine.adapters.vllm.requests import LAST_EVENTS, Held, Load, StepMetadata
from kvbridge.engine.adapters.vllm.rooms import IDLE_LOOK_S
from kvbridge.engine.adapters.vllm.scheduler import RankReport
from kvbridge.engine.adapters.vllm.tensors import cache_component, rank_cache, rank_regions
from kvbridge.engine.attach import AdoptedWorker

log = structlog.get_logger(__name__)

EARLY_EVENTS_KEPT = 4_096
"""Last events of rooms that no step has named yet. Most are named by the next step; those of requests that end before they have
blocks never are. The node refuses to fill blocks for a room that was over before, so the loss of an event costs nothing."""
_STAYING: list[Mapping[str, torch.Tensor]] = []
"""Tensors that a rank worker may still reach, though it was to end: nobody may free them before this process ends."""


class Results(NamedTuple):
    """What a worker reports at the end of a step: requests by id, each once."""

    sent: frozenset[str] = frozenset()
    received: frozenset[str] = frozenset()


class Reports:
    """Which requests a worker reports as sent or received, and which blocks as not filled. For the worker's thread only.

    vLLM's engine dies of a report too many and keeps blocks for ever for one too few. So a transfer is a record from the step at
    which the scheduler's half names it until it is reported, and no report comes from anything else. It is reported when nobody
    moves bytes of it any more: at the last event of its room, when the node would not have it, or when every rank has closed the
    transports that the node had. Blocks of a load that failed are named all together and in the same step: nothing of a room can be
    read before all of it is there.
    """

    def __init__(self) -> None:
        self._under_way: dict[int, Load | Held] = {}
        self._over: list[tuple[Load | Held, str]] = []
        """Transfers to be reported, and why they failed (empty: they did not)."""
        self._early: OrderedDict[tuple[int, int], RoomEvent] = OrderedDict()
        self._closed: set[str] = set()
        """Incarnations of the node that move nothing here or on any other rank."""
        self._unfilled: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._under_way or self._over)

    def start(self, step: StepMetadata) -> None:
        """Take what the scheduler's half has begun, and has heard (`start_load_kv`)."""
        for transfer in step.begun:
            self._under_way[transfer.room] = transfer
            self._look_back(transfer)
        for room, reason in step.refused:
            self._end(room, reason or "refused")
        self._closed.update(step.closed)
        for transfer in list(self._under_way.values()):
            if transfer.node in self._closed:
                self._end(transfer.room, "the node process has ended")
        self.heard(step.ended)

    def heard(self, events: Iterable[RoomEvent]) -> None:
        """Take events of the node. Those of rooms that no step has named are kept: decode may be done with a room before."""
        for event in events:
            if event.kind not in LAST_EVENTS:
                continue
            transfer = self._under_way.get(event.room)
            if transfer is not None and transfer.generation == event.generation:
                self._ended(event)
                continue
            self._early[event.room, event.generation] = event
            if len(self._early) > EARLY_EVENTS_KEPT:
                self._early.popitem(last=False)

    def _look_back(self, transfer: Load | Held) -> None:
        if (event := self._early.pop((transfer.room, transfer.generation), None)) is not None:
            self._ended(event)

    def _ended(self, event: RoomEvent) -> None:
        transfer = self._under_way[event.room]
        if event.code == WITHDRAWN and isinstance(transfer, Load):
            # The scheduler's half has heard it as well, and comes for the next generation, or says that it does not.
            following = self._under_way[event.room] = replace(transfer, generation=transfer.generation + 1)
            self._look_back(following)
            return
        well = event.kind in {"committed", "completed"}
        self._end(event.room, "" if well else f"{event.kind}: {event.reason}")

    def _end(self, room: int, reason: str) -> None:
        transfer = self._under_way.pop(room, None)
        if transfer is not None:
            self._over.append((transfer, reason))

    def results(self) -> Results:
        """Return what is over since the last call (`get_finished`); blocks that were not filled are asked for after it."""
        over, self._over = self._over, []
        for transfer, reason in over:
            if not reason:
                continue
            what = "load_failed" if isinstance(transfer, Load) else "hold_ended"
            log.warning(what, request=transfer.request, room=transfer.room, reason=reason)
            if isinstance(transfer, Load):
                self._unfilled.update(transfer.blocks)
        return Results(
            sent=frozenset(one.request for one, _ in over if isinstance(one, Held)),
            received=frozenset(one.request for one, _ in over if isinstance(one, Load)),
        )

    def unfilled_blocks(self) -> set[int]:
        """Return the blocks of the loads that failed (`get_block_ids_with_load_errors`)."""
        blocks, self._unfilled = self._unfilled, set()
        return blocks


class ServedRole:
    """The tensors of this rank served to the node of one role. `attachment`: worker 0's, which reports."""

    def __init__(
        self, role: Role, serve: Callable[[], AdoptedWorker], attachment: NodeAttachment | None = None
    ) -> None:
        self.role = role
        self.reports = Reports()
        self.closed: list[str] = []
        """Incarnations of the node that this rank moves nothing for any more, and will not again; to be told."""
        self._serve = serve
        self._worker: AdoptedWorker | None = serve()
        self._attachment = attachment
        self._served: set[str] = set()
        """Incarnations that a rank worker has ended of, and that are not known to have ended themselves."""
        self._next_look_s = 0.0

    def look_at_step(self, now_s: float) -> None:
        """Take what the node has said, and for which nodes nothing moves any more: seldom while nothing is under way."""
        if now_s < self._next_look_s and self.reports.idle:
            return
        self._next_look_s = now_s + IDLE_LOOK_S
        if self._attachment is not None:
            self.reports.heard(self._attachment.events())
        if self._worker is None:
            return
        ends, serves = self._worker.ends(), self._worker.node
        # Not one that lives: it says itself what has failed.
        self._served.update(end.node for end in ends if end.node)
        gone = {end.node for end in ends if end.node and end.node_gone}
        gone |= {node for node in self._served if serves and node != serves}
        self._served -= gone
        for node in sorted(gone):
            log.info("transports_closed", node_role=self.role.value, incarnation=node)
            self.closed.append(node)

    def unregister(self) -> None:
        """Let go of the tensors. Raises as `AdoptedWorker.close` does."""
        if self._worker is not None:
            node = self._worker.node
            self._worker.close()
            self._served.update({node} - {""})
            self._worker = None

    def restore(self) -> None:
        """Serve them again."""
        self._worker = self._worker or self._serve()

    def close(self) -> None:
        """Let go of the tensors, and leave the node."""
        with ExitStack() as stack:
            stack.callback(self.unregister)
            if self._attachment is not None:
                stack.callback(self._attachment.close)


class Worker:
    """For the worker's thread only. None of its methods waits, but `unregister` and `close`."""

    def __init__(self, instance: Instance, rank: Rank, guard: Guard) -> None:
        self._instance = instance
        self._rank = rank
        self._guard = guard
        self.roles: list[ServedRole] = []
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
            attachment = NodeAttachment(role, runtime_dir) if self.number == 0 else None
            self.roles.append(ServedRole(role, partial(AdoptedWorker, runtime_dir, self._rank, regions), attachment))
            if attachment is not None:
                attachment.begin()
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
        self._end(served.unregister for served in self.roles)

    def restore(self) -> None:
        """Serve them again, where they were. Harmless while they are served."""
        for served in self.roles:
            served.restore()

    def start(self, said: Mapping[Role, StepMetadata]) -> None:
        """Take what the scheduler's process has begun. Worker 0 reports for all."""
        for served in self.roles:
            if served.role in said and self.number == 0:
                with self._guard.over("start"):
                    served.reports.start(said[served.role])

    def results(self) -> Results:
        """Return what is over."""
        found, now_s = Results(), time.monotonic()
        for served in self.roles:
            with self._guard.over("look"):
                served.look_at_step(now_s)
            over = served.reports.results()
            found = Results(found.sent | over.sent, found.received | over.received)
        self._guard.look()
        return found

    def unfilled_blocks(self) -> set[int]:
        """Return the blocks of the loads that failed (`get_block_ids_with_load_errors`)."""
        return set().union(*(served.reports.unfilled_blocks() for served in self.roles))

    def closed_here(self) -> dict[Role, tuple[str, ...]]:
        """Return the incarnations of nodes that this rank moves nothing for any more, since the last call."""
        found = {served.role: tuple(served.closed) for served in self.roles if served.closed}
        for served in self.roles:
            served.closed.clear()
        return found

    def close(self) -> None:
        """Leave the nodes; afterwards nothing of this process moves a byte. Raises as `unregister` does."""
        self._end(served.close for served in self.roles)

    def _end(self, endings: Iterable[Callable[[], None]]) -> None:
        """Call each, whatever becomes of the others. Tensors that may still be written to stay for as long as this process."""
        try:
            with ExitStack() as stack:
                for end in endings:
                    stack.callback(end)
        except BridgeError:
            _STAYING.append(self._tensors)
            raise

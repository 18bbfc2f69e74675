"""Which requests a worker reports as sent or received, and which blocks as not filled.

Owns: the transfers of this instance that have begun and were not reported. Must not know: vLLM, sockets.

vLLM's engine dies of a report too many and keeps blocks for ever for one too few. So a transfer is a record from the step at which
the scheduler's half names it until it is reported, and no report comes from anything else. It is reported when nobody moves bytes
of it any more: at the last event of its room, when the node would not have it, or when every rank has closed the transports that
the node had. Blocks of a load that failed are named all together and in the same step: nothing of a room can be read before all of
it is there.

Worker 0 of an instance reports for all; the others only say that they have closed their transports.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

import structlog

from kvbridge.core.session.states import WITHDRAWN
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.adapters.vllm.requests import LAST_EVENTS, Held, Load, Results, StepMetadata

log = structlog.get_logger(__name__)

EARLY_EVENTS_KEPT = 4_096
"""Last events of rooms that no step has named yet. Most are named by the next step; those of requests that end before they have
blocks never are. The node refuses to fill blocks for a room that was over before, so the loss of an event costs nothing."""


class WorkerSide:
    """The half of a connector in a worker's process. For that worker's thread only."""

    def __init__(self, *, reports: bool) -> None:
        """`reports`: whether this is worker 0."""
        self._reports = reports
        self._under_way: dict[int, Load | Held] = {}
        self._over: list[tuple[Load | Held, str]] = []
        """Transfers to be reported, and why they failed (empty: they did not)."""
        self._early: OrderedDict[tuple[int, int], RoomEvent] = OrderedDict()
        self._closed: set[str] = set()
        """Incarnations of the node that move nothing here or on any other rank."""
        self._closed_here: list[str] = []
        self._unfilled: set[int] = set()

    @property
    def idle(self) -> bool:
        """Whether nothing is under way."""
        return not (self._under_way or self._over)

    def start(self, step: StepMetadata) -> None:
        """Take what the scheduler's half has begun (`start_load_kv`)."""
        if not self._reports:
            return
        begun: tuple[Load | Held, ...] = (*step.loads, *step.helds)
        for transfer in begun:
            self._under_way[transfer.room] = transfer
            self._look_back(transfer)
        for room, reason in step.refused:
            self._end(room, reason or "refused")
        self._closed.update(step.closed)
        for transfer in list(self._under_way.values()):
            if transfer.node in self._closed:
                self._end(transfer.room, "the node process has ended")

    def heard(self, events: Iterable[RoomEvent]) -> None:
        """Take events of the node. Those of rooms that no step has named are kept: decode may be done with a room before."""
        for event in events:
            if event.kind not in LAST_EVENTS or not self._reports:
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
            if isinstance(transfer, Load):
                log.warning("load_failed", request=transfer.request, room=transfer.room, reason=reason)
                self._unfilled.update(transfer.blocks)
            else:
                log.warning("hold_ended", request=transfer.request, room=transfer.room, reason=reason)
        return Results(
            sent=frozenset(one.request for one, _ in over if isinstance(one, Held)),
            received=frozenset(one.request for one, _ in over if isinstance(one, Load)),
        )

    def unfilled_blocks(self) -> set[int]:
        """Return the blocks of the loads that failed (`get_block_ids_with_load_errors`)."""
        blocks, self._unfilled = self._unfilled, set()
        return blocks

    def transports_closed(self, node: str) -> None:
        """This rank moves nothing for that incarnation of the node any more, and will not again."""
        self._closed_here.append(node)

    def closed_here(self) -> tuple[str, ...]:
        """Return the incarnations of the last calls, for the scheduler's half (`build_connector_worker_meta`)."""
        closed, self._closed_here = self._closed_here, []
        return tuple(closed)

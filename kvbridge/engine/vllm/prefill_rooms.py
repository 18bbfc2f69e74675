"""Prefill's rooms: the blocks of prompts that another engine decodes.

In plain order a room is held when its request has finished: no transfer is under way for a request that vLLM may preempt.

In paired order decode has the request too, and names the room. The room is held from the request's arrival on, so that decode finds
it. Blocks that earlier steps have filled are published and pinned: vLLM frees the blocks of a preempted request at once, and
transfers may still read them. When the request finishes, vLLM keeps its blocks until the worker reports the room's last event, and
the pins go.

Preemption ends the room. The node stops its transfers and fails it as `withdrawn`, its pins go with its last event, and the next
generation of the room is held at once. Decode fetches this generation into the blocks that it has, and reports nothing meanwhile.

A waiting request never holds pins, so pins cannot deadlock: they belong either to a running request, which lacks only blocks that
others have, or to a room that is ending, which needs no blocks. If preempted requests kept their pins, two of them could wait for
each other's blocks for ever. Rows that decode has received by then are sent once more. This is seldom: vLLM admits no request
whose prompt does not fit.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.core.session.tables import WITHDRAWN
from kvbridge.core.wire.engine_messages import Finish, Hold, Publish, RoomEvent
from kvbridge.engine.kit.transfers import Transfer
from kvbridge.engine.vllm.groups import RoomBlocks
from kvbridge.engine.vllm.requests import Instance, Request, Source, params_of, room_of
from kvbridge.engine.vllm.rooms import NO_NODE, RoomsOfRole, full_tables

log = structlog.get_logger(__name__)

PATIENCE_STEPS = 1_000
"""Steps for which running requests wait for the pins of an ending room, instead of being preempted as well."""


class BlockPins:
    """References to blocks. They keep vLLM from giving the blocks to another request."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        """Take the references back. Blocks without another reference are free then, the first ones last."""
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


@dataclass(slots=True)
class PairedRoom:
    """The room of one request, until it is over and the request has finished."""

    request: Request
    room: int
    order: RoomBlocks
    generation: int = 1
    node: str = ""
    """Incarnation that holds this generation; empty: none yet."""
    blocks: list[int] = field(default_factory=list)
    """Published blocks of this generation, from the room's first page on; pinned until the request has finished."""
    cached_tokens: int | None = None
    """Tokens that vLLM's cache held when it scheduled the request last."""
    finished: bool = False
    given_up: bool = False
    """Nothing more may be published."""
    over: bool = False

    @property
    def is_computing(self) -> bool:
        """Whether blocks are published as they are computed."""
        return not (self.finished or self.given_up or self.over)


@dataclass(slots=True)
class Ending:
    """Pinned blocks of a room that publishes nothing more."""

    node: str
    blocks: list[int]
    until_step: int
    """Other requests wait for the blocks until this step."""


class PrefillRooms(RoomsOfRole):
    """For the scheduler's thread only."""

    role = Role.PREFILL

    def __init__(self, instance: Instance, *parts: Any) -> None:
        super().__init__(instance, *parts)
        self._of: dict[str, PairedRoom] = {}
        self._rooms: dict[int, PairedRoom] = {}
        self._ending: dict[tuple[int, int], Ending] = {}
        self._steps = 0
        self.pins: BlockPins | None = None
        """None if vLLM cannot pin blocks: then rooms are published only when their request has finished."""

    @property
    def computing(self) -> tuple[str, ...]:
        """Requests that publish while they are computed. Call `computed` at each step that schedules them."""
        return tuple(one for one, paired in self._of.items() if paired.is_computing)

    @property
    def idle(self) -> bool:
        return super().idle and not (self._of or self._ending)

    @property
    def has_pins(self) -> bool:
        """Whether pinned blocks without a request wait for a last event, so that the engine must go on stepping."""
        return bool(self._ending)

    def blocks_return(self, preempted: Collection[str]) -> bool:
        """Whether to wait for blocks instead of preempting one more request: blocks without a request will become free.

        `preempted`: requests that vLLM has preempted, perhaps in this very step. Transfers of their pinned blocks are being
        stopped.
        """
        return any(one.until_step > self._steps for one in self._ending.values()) or any(
            paired.blocks for one in preempted if (paired := self._of.get(one)) is not None and not paired.finished
        )

    def _node_lost(self) -> None:
        """Set the rooms aside: transfers may read their blocks until every rank has closed its transports."""
        for paired in list(self._of.values()):
            if paired.node or paired.generation > 1:
                self._set_aside(paired)
                self._end(paired)

    def _all_closed(self, node: str) -> None:
        for key in [key for key, ending in self._ending.items() if ending.node == node]:
            self._unpin(self._ending.pop(key).blocks)

    def _is_unknown(self, refused: RoomEvent) -> bool:
        if refused.generation:
            self._return(refused)
        paired = self._rooms.get(refused.room)
        if paired is None or refused.generation not in {0, paired.generation}:
            return paired is None
        log.warning("not_paired", request=paired.request.id, room=paired.room, reason=refused.reason)
        if refused.generation:  # the hold was refused, so nobody reads the blocks that were named after it
            self._unpin_all(paired)
            self._end(paired)
            return True
        if not paired.given_up:
            self._end_publication(paired, refused.reason)
        return False

    def _end_publication(self, paired: PairedRoom, reason: str) -> None:
        paired.given_up = True
        self._give_up(paired.room, reason)

    def _over(self, event: RoomEvent) -> None:
        self._return(event)
        paired = self._rooms.get(event.room)
        if paired is None:
            return
        if event.generation == paired.generation:
            self._unpin_all(paired)
            self._end(paired)
        elif event.generation < paired.generation and event.code != WITHDRAWN:
            # The room ended before it could be withdrawn: decode does not fetch the next generation.
            self._give_up(paired.room, event.reason)
            self._set_aside(paired)
            self._end(paired)

    def _end(self, paired: PairedRoom) -> None:
        paired.over = True
        if paired.finished:
            self._forget(paired)

    def _forget(self, paired: PairedRoom) -> None:
        del self._of[paired.request.id], self._rooms[paired.room]

    def _unpin(self, blocks: Sequence[int]) -> None:
        if self.pins is not None and blocks:
            self.pins.unpin(blocks)

    def _return(self, event: RoomEvent) -> None:
        ending = self._ending.pop((event.room, event.generation), None)
        if ending is not None:
            self._unpin(ending.blocks)

    def _unpin_all(self, paired: PairedRoom) -> None:
        if not paired.finished:
            self._unpin(paired.blocks)
        paired.blocks = []

    def _set_aside(self, paired: PairedRoom) -> None:
        """Keep the pins of this generation until it is over."""
        if paired.blocks and not paired.finished:
            until = self._steps + PATIENCE_STEPS
            self._ending[paired.room, paired.generation] = Ending(paired.node, paired.blocks, until)
        paired.blocks = []

    def arrived(self, request: Request) -> None:
        """A request has come. When decode has it too, hold its room from now on.

        Raises InvalidInputError for a room that cannot be read or that another request has: the prompt is held in plain order.
        """
        room = room_of(request)
        if room is None or request.id in self._of:
            return
        self._require_new(room)
        self._of[request.id] = self._rooms[room] = paired = PairedRoom(request, room, self._groups.of(request.tokens))
        self._hold(paired)

    def _hold(self, paired: PairedRoom) -> bool:
        """Tell the node to hold the room, now or at a later step. Return whether it knows."""
        if paired.node or paired.over or paired.given_up:
            return bool(paired.node)
        told = self._say(
            Hold,
            paired.room,
            generation=paired.generation,
            prompt_tokens=len(paired.order) * self._page_tokens,
            prompt_digest=paired.request.prompt_digest,
            tables={},
        )
        paired.node = self.node if told else ""
        return told

    def computed(self, request: str, tokens: int, in_flight_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """A step continues a request: publish the blocks that earlier steps have filled.

        `tokens`: computed tokens: in vLLM's cache, or computed by steps before this one (`num_computed_tokens` before this step
        adds to it). `in_flight_tokens`: those of steps whose output was not read (`num_in_flight_tokens`). The other tokens are
        final, because every rank had to end a step for its output. `blocks`: all blocks of the request, for each group from the
        prompt's first on.
        """
        paired = self._of.get(request)
        if paired is None or not paired.is_computing or self.pins is None:
            return
        if paired.cached_tokens is None:
            paired.cached_tokens = tokens
        final = tokens - in_flight_tokens
        # Another request may compute cached tokens in the very step that schedules this one. They are there once tokens of this
        # request are.
        if final > paired.cached_tokens:
            upto = paired.order.within(min(final, paired.request.tokens))
            self._publish(paired, paired.order.pick(blocks, len(paired.blocks), upto))

    def _publish(self, paired: PairedRoom, further: Sequence[int]) -> None:
        known = len(paired.blocks)
        if not self._hold(paired) or not further:
            return
        upto = (known + len(further)) * self._page_tokens
        if self._say(Publish, paired.room, upto_token=upto, tables=full_tables(further, known)):
            paired.blocks.extend(further)
            if self.pins is not None and not paired.finished:
                self.pins.pin(further)

    def preempted(self, requests: Iterable[str]) -> None:
        """Requests were preempted since the last step: vLLM has freed their blocks, and perhaps scheduled them again."""
        for request in requests:
            paired = self._of.get(request)
            if paired is None or paired.finished:
                continue
            paired.cached_tokens = None
            if not paired.blocks:
                continue
            self._set_aside(paired)
            if not paired.given_up:
                reason = "the request was preempted, and its prompt is computed again"
                self._give_up(paired.room, reason, again=True)
                paired.generation, paired.node = paired.generation + 1, ""
                self._hold(paired)

    def lost(self, request: str, reason: str) -> None:
        paired = self._of.get(request)
        if paired is not None and not (paired.given_up or paired.over):
            self._end_publication(paired, reason)

    def _begin_step(self) -> None:
        self._steps += 1
        for paired in list(self._of.values()):
            if not paired.finished:
                self._hold(paired)

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]], *, well: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks are still needed, and the answer's `kv_transfer_params`.

        `blocks`: as for `computed`; only those of computed tokens. `well`: the request stopped or reached its length, and was not
        aborted.
        """
        paired = self._of.get(request.id)
        if paired is None:
            return self._finished_plain(request, blocks) if well and request.is_for_another else (False, None)
        held = self._finished_paired(paired, blocks, well=well)
        if held:
            self._begun.append(Transfer(request.id, paired.room, paired.node, paired.generation))
        place = self.addresses
        return held, params_of(Source(room=paired.room, prefill=place)) if well and place else None

    def _finished_plain(self, request: Request, groups: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        order = self._groups.of(request.tokens)
        blocks, tokens = order.pick(groups), len(order) * self._page_tokens
        if len(blocks) < len(order) or not self.node:
            found = f"vLLM has {len(blocks)} of the {len(order)} blocks that its prompt needs"
            log.warning("not_held", request=request.id, reason=found if self.node else NO_NODE)
            return False, None
        source = Source(
            room=self._draw_room(),
            prefill=self.addresses,
            held=True,
            prompt_tokens=tokens,
            prompt_digest=request.prompt_digest.hex(),
        )
        self._require_new(source.room)
        held = self._say(
            Hold,
            source.room,
            generation=1,
            prompt_tokens=tokens,
            prompt_digest=request.prompt_digest,
            tables=full_tables(blocks, 0),
            # The prompt is complete: a request may be held before another one that wrote a shared block of it.
            computed_tokens=tokens,
            published_tokens=tokens,
        )
        if held:
            self._begun.append(Transfer(request.id, source.room, self.node))
        return held, params_of(source) if held else None

    @staticmethod
    def _draw_room() -> int:
        return secrets.randbits(ROOM_BITS)

    def _finished_paired(self, paired: PairedRoom, groups: Sequence[Sequence[int]], *, well: bool) -> bool:
        """Publish the rest. Return whether the workers must report when nobody reads the blocks any more."""
        blocks, known = paired.order.pick(groups), len(paired.blocks)
        kept = list(blocks[:known]) == paired.blocks
        if kept:
            self._unpin(paired.blocks)  # vLLM keeps them now; `paired.blocks` still lists the published ones
        else:  # the request was preempted; `preempted` would have been told at the next step
            self._set_aside(paired)
        paired.finished = True
        if paired.over:
            self._forget(paired)
            return False
        if well and kept and not paired.given_up and len(blocks) == len(paired.order) and self._hold(paired):
            self._publish(paired, blocks[known:])
            self._say(Finish, paired.room)
            return True
        log.info("not_paired", request=paired.request.id, room=paired.room, reason="not held" if well else "aborted")
        self._give_up(paired.room, "its prompt is not complete" if well else "its request was aborted")
        if not paired.blocks:
            self._forget(paired)
        return bool(paired.blocks)

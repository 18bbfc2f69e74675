"""Prefill's rooms: the blocks of prompts that another engine decodes.

In plain order a room is held when its request has finished: nothing is under way for a request that vLLM may preempt.

In paired order decode has the request too, and names the room. The room is held from the request's arrival on, so that decode finds
it. Blocks that earlier steps have filled are published, and pinned with that: vLLM frees the blocks of a request that it preempts
at once, and transfers may read them. When the request finishes, vLLM keeps its blocks by itself until the worker's half reports the
room's last event, and the pins go.

Preemption ends the room: the node stops what is under way and fails it as `withdrawn`, its pins go with its last event, and the
next generation of the room is held at once. Decode's half comes for that one with the blocks that it has, and reports nothing
meanwhile. So no pin waits for a request that waits for blocks: pins are of a request that runs, which lacks nothing but blocks that
others have, or of a room that is ending, which lacks none. Were preempted requests to keep their pins, two of them could each wait
for blocks of the other, for ever. What decode has received by then is sent once more; that is seldom, since vLLM admits no request
whose prompt does not fit.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from kvbridge.core.ids import ROOM_BITS, Role
from kvbridge.core.session.states import WITHDRAWN
from kvbridge.core.wire.engine_messages import Finish, Hold, Publish, RoomEvent
from kvbridge.engine.adapters.vllm.instance import Instance
from kvbridge.engine.adapters.vllm.requests import (
    Held,
    Request,
    Source,
    full_tables,
    params_of,
    room_of,
    room_tokens,
)
from kvbridge.engine.adapters.vllm.rooms import NO_NODE, RoomsOfRole

log = structlog.get_logger(__name__)

PATIENCE_STEPS = 1_000
"""For so many steps running requests wait for the pins of a room that is ending, instead of being preempted as well."""


class BlockPins:
    """References to blocks, by which we keep some from being given to another request whoever frees them."""

    def __init__(self, pool: Any) -> None:  # noqa: ANN401 - vLLM's BlockPool
        self._pool = pool

    def pin(self, blocks: Sequence[int]) -> None:
        """Add one reference to each."""
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        """Take it back; those that nobody else has are free with it, the first ones last."""
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


@dataclass(slots=True)
class PairedRoom:
    """The room of one request, until it is over and the request has finished."""

    request: Request
    room: int
    generation: int = 1
    node: str = ""
    """The incarnation that was told to hold this generation; empty: none yet."""
    blocks: list[int] = field(default_factory=list)
    """Published of this generation, from the prompt's first on; pinned while the request has not finished."""
    cached_tokens: int | None = None
    """Of these the request needed no computing when it was scheduled last."""
    finished: bool = False
    given_up: bool = False
    """Nothing more is to be published."""
    over: bool = False

    @property
    def is_computing(self) -> bool:
        """Whether blocks are still to be published as they are computed."""
        return not (self.finished or self.given_up or self.over)


@dataclass(slots=True)
class Ending:
    """Pinned blocks of a room that nobody publishes in any more."""

    node: str
    blocks: list[int]
    until_step: int
    """So long others wait for them."""


class PrefillRooms(RoomsOfRole):
    """For the scheduler's thread only."""

    role = Role.PREFILL

    def __init__(self, instance: Instance, *parts: Any) -> None:  # noqa: ANN401 - those of every role
        super().__init__(instance, *parts)
        self._of: dict[str, PairedRoom] = {}
        self._rooms: dict[int, PairedRoom] = {}
        self._ending: dict[tuple[int, int], Ending] = {}
        self._steps = 0
        self.pins: BlockPins | None = None
        """Without them nothing is published before its request has finished."""

    @property
    def computing(self) -> tuple[str, ...]:
        """Requests whose rooms want to know how far they are: `computed` is told at each step that schedules them."""
        return tuple(one for one, paired in self._of.items() if paired.is_computing)

    @property
    def idle(self) -> bool:
        return super().idle and not (self._of or self._ending)

    @property
    def has_pins(self) -> bool:
        """Whether blocks that no request has wait for a last event: the engine has to go on stepping."""
        return bool(self._ending)

    def blocks_return(self, preempted: Collection[str]) -> bool:
        """Whether to wait for blocks instead of preempting one more request: some will be free that no request has any more.

        `preempted`: by vLLM, as far as is known now, perhaps in this very step. What reads their pinned blocks is being stopped.
        """
        return any(one.until_step > self._steps for one in self._ending.values()) or any(
            paired.blocks for one in preempted if (paired := self._of.get(one)) is not None and not paired.finished
        )

    # ------------------------------------------------------------------ the node

    def _node_lost(self) -> None:
        """What read blocks of these rooms may do so until every rank has said otherwise."""
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
        if refused.generation:  # the hold: nobody reads what was named behind it
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
            # It was over before it could be withdrawn: decode does not come for the next one.
            self._give_up(paired.room, event.reason)
            self._set_aside(paired)
            self._end(paired)

    def _end(self, paired: PairedRoom) -> None:
        paired.over = True
        if paired.finished:
            self._forget(paired)

    def _forget(self, paired: PairedRoom) -> None:
        del self._of[paired.request.id], self._rooms[paired.room]

    # ------------------------------------------------------------------ pins

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

    # ------------------------------------------------------------------ requests while they are computed

    def arrived(self, request: Request) -> None:
        """A request has come. Where decode has it too, its room is held from now on.

        Raises InvalidInputError for a room that cannot be read or that another request has: it is held in plain order.
        """
        room = room_of(request)
        if room is None or request.id in self._of:
            return
        self._require_new(room)
        self._of[request.id] = self._rooms[room] = paired = PairedRoom(request, room)
        self._hold(paired)

    def _hold(self, paired: PairedRoom) -> bool:
        """Have the node hold the room. Returns whether it was told; else it is at a later step."""
        if paired.node or paired.over or paired.given_up:
            return bool(paired.node)
        told = self._say(
            Hold,
            paired.room,
            generation=paired.generation,
            prompt_tokens=room_tokens(paired.request.prompt_tokens, self._block_tokens),
            prompt_digest=paired.request.prompt_digest,
            tables={},
        )
        paired.node = self.node if told else ""
        return told

    def computed(self, request: str, tokens: int, in_flight_tokens: int, blocks: Sequence[int]) -> None:
        """A step goes on with a request: blocks that earlier steps have filled are published.

        `tokens`: of it that are computed, or in vLLM's cache, or to be by steps before this one (`num_computed_tokens` before
        this step adds to it). `in_flight_tokens`: those of steps whose output was not read (`num_in_flight_tokens`); the others
        are final, as every rank had to end a step for its output. `blocks`: all of the request, from the prompt's first on.
        """
        paired = self._of.get(request)
        if paired is None or not paired.is_computing or self.pins is None:
            return
        if paired.cached_tokens is None:
            paired.cached_tokens = tokens
        final = tokens - in_flight_tokens
        # What was found in vLLM's cache another request may compute in the very step that schedules this one: once tokens of its
        # own are there, so are those.
        if final > paired.cached_tokens:
            self._publish(paired, blocks[: min(final, paired.request.prompt_tokens) // self._block_tokens])

    def _publish(self, paired: PairedRoom, blocks: Sequence[int]) -> None:
        """Publish what is not of the prompt's first blocks."""
        known = len(paired.blocks)
        further = blocks[known:]
        if not self._hold(paired) or not further:
            return
        upto = len(blocks) * self._block_tokens
        if self._say(Publish, paired.room, upto_token=upto, tables=full_tables(further, known)):
            paired.blocks.extend(further)
            if self.pins is not None and not paired.finished:
                self.pins.pin(further)

    def preempted(self, requests: Iterable[str]) -> None:
        """These were preempted since the last step, and perhaps scheduled again: vLLM has freed their blocks."""
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

    # ------------------------------------------------------------------ the end of a request

    def finished(self, request: Request, blocks: Sequence[int], *, well: bool) -> tuple[bool, dict[str, Any] | None]:
        """Return whether its blocks are still needed, and the answer's `kv_transfer_params`.

        `well`: it stopped or came to its length, and was not aborted.
        """
        paired = self._of.get(request.id)
        if paired is None:
            return self._finished_plain(request, blocks) if well and request.is_for_another else (False, None)
        held = self._finished_paired(paired, blocks, well=well)
        if held:
            self._begun.append(Held(request.id, paired.room, paired.node, paired.generation))
        place = self.addresses
        return held, params_of(Source(room=paired.room, prefill=place)) if well and place else None

    def _finished_plain(self, request: Request, blocks: Sequence[int]) -> tuple[bool, dict[str, Any] | None]:
        tokens = room_tokens(request.prompt_tokens, self._block_tokens)
        pages = tokens // self._block_tokens
        if len(blocks) < pages or not self.node:
            found = f"vLLM has computed {len(blocks)} of the {pages} blocks of its prompt"
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
            tables=full_tables(blocks[:pages], 0),
            # Nothing of it is written any more. Whoever shares a block may have been held before the request that wrote it.
            computed_tokens=tokens,
            published_tokens=tokens,
        )
        if held:
            self._begun.append(Held(request.id, source.room, self.node))
        return held, params_of(source) if held else None

    @staticmethod
    def _draw_room() -> int:
        return secrets.randbits(ROOM_BITS)

    def _finished_paired(self, paired: PairedRoom, blocks: Sequence[int], *, well: bool) -> bool:
        """Publish the rest. Returns whether the workers are to report when nobody reads the blocks any more."""
        pages = room_tokens(paired.request.prompt_tokens, self._block_tokens) // self._block_tokens
        kept = list(blocks[: len(paired.blocks)]) == paired.blocks
        if kept:
            self._unpin(paired.blocks)  # vLLM keeps them now; which of them are published is still to be known
        else:  # it was preempted, which `preempted` would have told at the next step
            self._set_aside(paired)
        paired.finished = True
        if paired.over:
            self._forget(paired)
            return False
        if well and kept and not paired.given_up and len(blocks) >= pages and self._hold(paired):
            self._publish(paired, blocks[:pages])
            self._say(Finish, paired.room)
            return True
        log.info("not_paired", request=paired.request.id, room=paired.room, reason="not held" if well else "aborted")
        self._give_up(paired.room, "its prompt is not all there" if well else "its request was aborted")
        if not paired.blocks:
            self._forget(paired)
        return bool(paired.blocks)

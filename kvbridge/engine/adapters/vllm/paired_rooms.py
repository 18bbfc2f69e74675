"""Prefill's rooms in paired order: decode has the request too, and blocks are published while later ones are computed.

Owns: how far each such room is, and which blocks are kept from other requests for it. Must not know: vLLM, sockets, decode.

The room is held from the request's arrival on, so that decode finds it. Blocks that earlier steps have filled are published, and
pinned with that: vLLM frees the blocks of a request that it preempts at once, and transfers may read them. When the request
finishes, vLLM keeps its blocks by itself until the worker's half reports the room's last event, and the pins go.

Preemption ends the room: the node stops what is under way and fails it as `withdrawn`, its pins go with its last event, and the
next generation of the room is held at once. Decode's half comes for that one with the blocks that it has, and reports nothing
meanwhile. So no pin waits for a request that waits for blocks: pins are of a request that runs, which lacks nothing but blocks that
others have, or of a room that is ending, which lacks none. Were preempted requests to keep their pins, two of them could each wait
for blocks of the other, for ever. What decode has received by then is sent once more; that is seldom, since vLLM admits no request
whose prompt does not fit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import structlog

from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.session.states import WITHDRAWN
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.adapters.vllm.node_line import NodeLine
from kvbridge.engine.adapters.vllm.prompts import room_tokens
from kvbridge.engine.adapters.vllm.requests import BlockPins, Held, Request, full_tables

log = structlog.get_logger(__name__)

PATIENCE_STEPS = 1_000
"""For so many steps running requests wait for the pins of a room that is ending, instead of being preempted as well."""


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
    rest: tuple[int, ...] | None = None
    """Once the request has finished well: blocks that are to be published. None before, and when all is said."""
    finished: bool = False
    given_up: bool = False
    """Nothing more is to be published."""
    over: bool = False


@dataclass(slots=True)
class Ending:
    """Pinned blocks of a room that nobody publishes in any more."""

    node: str
    blocks: list[int]
    until_step: int
    """So long others wait for them."""


class PairedRooms:
    """For the scheduler's thread only."""

    def __init__(self, node: NodeLine, block_tokens: int) -> None:
        self._node = node
        self._size = block_tokens
        self._of: dict[str, PairedRoom] = {}
        self._rooms: dict[int, PairedRoom] = {}
        self._ending: dict[tuple[int, int], Ending] = {}
        self._steps = 0
        self.pins: BlockPins | None = None
        """Without them nothing is published before its request has finished."""

    def __contains__(self, request: object) -> bool:
        return request in self._of

    @property
    def computing(self) -> tuple[str, ...]:
        """Requests whose rooms want to know how far they are."""
        return tuple(one for one, paired in self._of.items() if not (paired.finished or paired.given_up or paired.over))

    @property
    def idle(self) -> bool:
        """Whether there is no room, nor any that is ending."""
        return not (self._of or self._ending)

    @property
    def pinned(self) -> bool:
        """Whether blocks wait for the last event of a room without any request that has them."""
        return bool(self._ending)

    def blocks_return(self, preempted: Collection[str]) -> bool:
        """Whether blocks will be free soon that no request has any more. `preempted`: by vLLM, perhaps in this very step."""
        return any(one.until_step > self._steps for one in self._ending.values()) or any(
            paired.blocks for one in preempted if (paired := self._of.get(one)) is not None and not paired.finished
        )

    # ------------------------------------------------------------------ the node

    def node_lost(self) -> None:
        """The rooms that it had are over. What read their blocks may do so until every rank has said otherwise."""
        for paired in list(self._of.values()):
            if paired.node or paired.generation > 1:
                self._set_aside(paired)
                self._end(paired)

    def closed(self, node: str) -> None:
        """No rank moves anything any more for that incarnation of the node."""
        for key in [key for key, ending in self._ending.items() if ending.node == node]:
            self._unpin(self._ending.pop(key).blocks)

    def refused(self, event: RoomEvent) -> bool:
        """The node would not take what was said of a room. Returns whether its pages are known to nobody by that."""
        if event.generation:
            self._return(event)
        paired = self._rooms.get(event.room)
        if paired is None or event.generation not in {0, paired.generation}:
            return paired is None
        log.warning("not_paired", request=paired.request.id, room=paired.room, reason=event.reason)
        if event.generation:  # the hold: nobody reads what was named behind it
            self._unpin_all(paired)
            self._end(paired)
            return True
        self._give_up(paired, event.reason)
        return False

    def _give_up(self, paired: PairedRoom, reason: str) -> None:
        paired.given_up, paired.rest = True, None
        self._node.give_up(paired.room, reason)

    def ended(self, event: RoomEvent) -> None:
        """An attempt at a room is over, and nobody reads its blocks any more."""
        self._return(event)
        paired = self._rooms.get(event.room)
        if paired is None:
            return
        if event.generation == paired.generation:
            self._unpin_all(paired)
            self._end(paired)
        elif event.generation < paired.generation and event.code != WITHDRAWN:
            # It was over before it could be withdrawn: decode does not come for the next one.
            self._node.give_up(paired.room, event.reason)
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

    # ------------------------------------------------------------------ requests

    def arrived(self, request: Request, room: int) -> None:
        """A request has come that decode has too."""
        self._of[request.id] = self._rooms[room] = paired = PairedRoom(request, room)
        self._hold(paired)

    def _hold(self, paired: PairedRoom) -> bool:
        """Have the node hold the room. Returns whether it was told; else it is at a later step."""
        if paired.node or paired.over or paired.given_up:
            return bool(paired.node)
        try:
            self._node.require()
            if paired.room in self._node.unsent:  # the word that the generation before is over
                return False
            self._node.calls.hold(
                paired.room,
                generation=paired.generation,
                prompt_tokens=self._tokens(paired),
                prompt_digest=paired.request.prompt_digest,
                tables={},
                computed_tokens=0,
                published_tokens=0,
            )
        except InvalidInputError as error:  # it is no better at a later step
            self._give_up(paired, str(error))
            return False
        except BridgeError:
            return False
        paired.node = self._node.incarnation
        return True

    def _tokens(self, paired: PairedRoom) -> int:
        return room_tokens(paired.request.prompt_tokens, self._size)

    def computed(self, request: str, tokens: int, in_flight_tokens: int, blocks: Sequence[int]) -> None:
        """See SchedulerSide."""
        paired = self._of.get(request)
        if paired is None or paired.finished or paired.given_up or paired.over or self.pins is None:
            return
        if paired.cached_tokens is None:
            paired.cached_tokens = tokens
        final = tokens - in_flight_tokens
        # What was found in vLLM's cache another request may compute in the very step that schedules this one: once tokens of its
        # own are there, so are those.
        if final > paired.cached_tokens:
            self._publish(paired, blocks[: min(final, paired.request.prompt_tokens) // self._size])

    def _publish(self, paired: PairedRoom, blocks: Sequence[int]) -> bool:
        """Publish what is not of the prompt's first blocks. Returns whether the node was told of all."""
        known = len(paired.blocks)
        further = blocks[known:]
        if not self._hold(paired):
            return False
        if not further:
            return True
        try:
            self._node.calls.publish(paired.room, len(blocks) * self._size, tables=full_tables(further, known))
        except InvalidInputError as error:  # it is no better at a later step
            self._give_up(paired, str(error))
            return False
        except BridgeError:
            return False
        paired.blocks.extend(further)
        if self.pins is not None and not paired.finished:
            self.pins.pin(further)
        return True

    def preempted(self, requests: Iterable[str]) -> None:
        """The blocks of these are freed by vLLM, which will compute them from the start."""
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
                self._node.give_up(paired.room, reason, again=True)
                paired.generation, paired.node = paired.generation + 1, ""
                self._hold(paired)

    def finished(self, request: str, blocks: Sequence[int], *, well: bool) -> Held | None:
        """Return what the workers are to report when nobody reads the blocks any more; None: nobody does. See SchedulerSide."""
        paired = self._of[request]
        pages = self._tokens(paired) // self._size
        kept = list(blocks[: len(paired.blocks)]) == paired.blocks
        if kept:
            self._unpin(paired.blocks)  # vLLM keeps them now; which of them are published is still to be known
        else:  # it was preempted, which `preempted` would have told at the next step
            self._set_aside(paired)
        paired.finished = True
        if paired.over:
            self._forget(paired)
            return None
        if well and kept and not paired.given_up and len(blocks) >= pages and self._hold(paired):
            paired.rest = tuple(blocks[:pages])
            self._finish(paired)
            return Held(request, paired.room, paired.node, paired.generation)
        log.info("not_paired", request=request, room=paired.room, reason="aborted" if not well else "not held")
        self._node.give_up(paired.room, "its request was aborted" if not well else "its prompt is not all there")
        if not paired.blocks:
            self._forget(paired)
            return None
        return Held(request, paired.room, paired.node, paired.generation)

    def _finish(self, paired: PairedRoom) -> None:
        if paired.rest is None or not self._publish(paired, paired.rest):
            return
        try:
            self._node.calls.finish(paired.room)
        except BridgeError:
            return
        paired.rest = None

    def lost(self, request: str, reason: str) -> None:
        """See SchedulerSide."""
        paired = self._of.get(request)
        if paired is not None and not (paired.given_up or paired.over):
            self._give_up(paired, reason)

    def step(self) -> None:
        """Say what could not be said before."""
        self._steps += 1
        for paired in list(self._of.values()):
            if paired.rest is not None:
                self._finish(paired)
            elif not paired.finished:
                self._hold(paired)

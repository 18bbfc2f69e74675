"""What the connector answers vLLM's scheduler, and says to the node about each request.

Owns: which room a request has. Must not know: vLLM, sockets, how far rooms are (`fetches` for decode, `paired_rooms`), when a
transfer is over (`worker_side`).

Plain order: prefill computes a prompt, holds its blocks in a room and names the room in its answer; decode gets that with the
request, says at once that it will come, and names its blocks when vLLM has allocated them. So nothing is under way for a request
that vLLM may still preempt: prefill's blocks are read only after the request has finished, and decode's are written only while vLLM
waits for them. Paired order, where decode has the request at the same time and the request to prefill names the room
(`requests.room_of`): blocks are sent while later ones are computed (`paired_rooms`). Decode does the same in both.

Nothing here waits. What the node refuses comes as an event; a message that could not be sent is as good as refused.

Each method names its hook. `build_connector_meta` calls `heard`, `preempted`, `computed` for each of `computing`, and `step`.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import structlog

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.ids import ROOM_BITS
from kvbridge.core.session.states import WITHDRAWN
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.adapters.vllm.fetches import Fetches
from kvbridge.engine.adapters.vllm.guard import Guard
from kvbridge.engine.adapters.vllm.node_line import NodeLine, Withdrawal
from kvbridge.engine.adapters.vllm.paired_rooms import PairedRooms
from kvbridge.engine.adapters.vllm.prompts import room_tokens
from kvbridge.engine.adapters.vllm.requests import (
    LAST_EVENTS,
    BlockPins,
    Held,
    Request,
    RoomCalls,
    Source,
    StepMetadata,
    full_tables,
    params_of,
    room_of,
    source_of,
)

log = structlog.get_logger(__name__)

ROOMS_REMEMBERED = 65_536
"""Of rooms that requests have come with: another request that names one of them computes its prompt itself."""


@dataclass(frozen=True, slots=True)
class Place:
    """Who we are: the same on every step."""

    block_tokens: int
    ranks: int
    """Worker processes of this instance."""
    addresses: tuple[PeerAddress, ...] = ()
    """Where decode reaches our node; of a prefill instance."""
    allowed_prefill: frozenset[str] | None = None
    """Endpoints that requests may name; None: any, since only a node with our keys answers, or nobody else can reach us."""


class SchedulerSide:
    """The half of a connector in the process of vLLM's scheduler. For that thread only."""

    def __init__(
        self,
        place: Place,
        calls: RoomCalls,
        guard: Guard,
        *,
        draw_room: Callable[[], int] = lambda: secrets.randbits(ROOM_BITS),
    ) -> None:
        self._place = place
        self._guard = guard
        self._calls = calls
        self._draw_room = draw_room
        self._node = NodeLine(calls)
        self._fetches = Fetches(self._node, place.block_tokens)
        self._paired = PairedRooms(self._node, place.block_tokens)
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._helds: list[Held] = []
        self._refused: dict[int, str] = {}
        self._closed_by: dict[str, set[int]] = {}
        self._closed: list[str] = []

    # ------------------------------------------------------------------ the node

    def node_ready(self, node: str, addresses: tuple[PeerAddress, ...] | None = None) -> None:
        """An incarnation of our node takes calls. `addresses`: where decode reaches it, when they may be others than before."""
        self._node.incarnation = node
        if addresses is not None:
            self._place = replace(self._place, addresses=addresses)

    def node_lost(self) -> None:
        """It is gone. What it was doing is over when every rank says so."""
        self._node.lost()
        self._paired.node_lost()
        self._fetches.node_lost()

    def heard(self, events: Iterable[RoomEvent]) -> None:
        """Take the node's events: what it refuses of that which was said here, and which rooms are over."""
        for event in events:
            if event.kind == "refused":
                self._refusal(event)
            elif event.kind in LAST_EVENTS:
                self._paired.ended(event)
                if event.code == WITHDRAWN:
                    self._fetches.withdrawn(event)

    def _refusal(self, event: RoomEvent) -> None:
        if not self._fetches.refusal(event) and self._paired.refused(event):
            self._refused.setdefault(event.room, event.reason)

    def closed(self, rank: int, nodes: Iterable[str]) -> None:
        """A rank moves nothing any more for these incarnations of the node."""
        for node in nodes:
            ranks = self._closed_by.setdefault(node, set())
            ranks.add(rank)
            if len(ranks) == self._place.ranks:
                del self._closed_by[node]
                self._closed.append(node)
                if node == self._node.incarnation:
                    self.node_lost()
                self._paired.closed(node)

    # ------------------------------------------------------------------ requests that two engines have

    def arrived(self, request: Request) -> None:
        """A request has come (`on_new_request`).

        One whose prompt is computed elsewhere: prefill hears that we will come for it, and waits without a limit. One that is
        computed for another engine which has it already: its room is held from now on. A room that another request has, or one that
        cannot be read, means nothing: the first is computed here, the second held when it has finished, as in plain order.
        """
        if request.id in self._fetches or request.id in self._paired:
            return
        with self._guard.over("computed_here", request.id, lost=partial(self.lost, request.id)):
            source, room = source_of(request), room_of(request)
            if source is not None:
                self._require_allowed(source)
                self._require_new(source.room)
                self._fetches.arrived(request, source)
            elif room is not None:
                self._require_new(room)
                self._paired.arrived(request, room)

    def lost(self, request: str, reason: str) -> None:
        """A hook has failed in the middle of what it does for a request: what it has begun ends, and nothing more begins.

        A request that has no blocks for a load is computed here. vLLM waits for a load that has begun, and gets the last event of
        its room.
        """
        self._fetches.lost(request, reason)
        self._paired.lost(request, reason)

    def _require_new(self, room: int) -> None:
        if room in self._seen:
            raise InvalidInputError(f"another request has room {room}")
        self._seen[room] = None
        if len(self._seen) > ROOMS_REMEMBERED:
            self._seen.popitem(last=False)

    def declined(self, request: Request) -> None:
        """A request has come that is not computed here (`on_new_request` of one that the API has refused): prefill is told.

        As prefill's answer says itself what the room is of: such a request has another prompt. In paired order whoever has drawn
        the room has asked prefill too.
        """
        with self._guard.over("not_withdrawn", request.id):
            source = source_of(request)
            if source is None or not source.prompt_tokens or source.room in self._seen:
                return  # of a client that leaves the API says so too, after its request came
            self._require_allowed(source)
            self._require_new(source.room)
            self._node.withdraw(
                source.room, Withdrawal(source.prompt_tokens, bytes.fromhex(source.prompt_digest), source.prefill)
            )

    def _require_allowed(self, source: Source) -> None:
        allowed = self._place.allowed_prefill
        wrong = [one.endpoint for one in source.prefill if allowed is not None and one.endpoint not in allowed]
        if wrong:
            raise InvalidInputError(
                f"room {source.room} is said to be at {', '.join(wrong)}, which is not in allowed_prefill"
            )

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return how many tokens behind those in vLLM's cache will be loaded (`get_num_new_matched_tokens`), asynchronously.

        Asked any number of times. 0 once blocks were named, also after a load that failed and after preemption.
        """
        return self._fetches.matched_tokens(request, computed_tokens)

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """The request has blocks (`update_state_after_alloc`): all of them, from the prompt's first on.

        `external_tokens`: how many tokens we are to load. Called once more when they are there.
        """
        self._fetches.allocated(request, blocks, external_tokens)

    # ------------------------------------------------------------------ the end of a request

    def finished(self, request: Request, blocks: Sequence[int], *, well: bool) -> tuple[bool, Mapping[str, Any] | None]:
        """Return whether its blocks are still needed, and the answer's `kv_transfer_params` (`request_finished`).

        `well`: it stopped or came to its length, and was not aborted. The blocks of a load that is under way vLLM keeps by
        itself until the load is reported.
        """
        self._fetches.finished(request.id)
        if request.id in self._paired:
            held = self._paired.finished(request.id, blocks, well=well)
            if held is not None:
                self._helds.append(held)
            place = self._place.addresses
            answer = params_of(Source(room=room_of(request) or 0, prefill=place)) if well and place else None
            return held is not None, answer
        if not well or not request.is_for_another:
            return False, None
        return self._hold(request, blocks)

    def _hold(self, request: Request, blocks: Sequence[int]) -> tuple[bool, Mapping[str, Any] | None]:
        tokens = room_tokens(request.prompt_tokens, self._place.block_tokens)
        pages = tokens // self._place.block_tokens
        try:
            if len(blocks) < pages:
                raise InvalidInputError(f"vLLM has computed {len(blocks)} of the {pages} blocks of its prompt")
            self._node.require()  # then there are addresses, too
            source = Source(
                room=self._draw_room(),
                prefill=self._place.addresses,
                held=True,
                prompt_tokens=tokens,
                prompt_digest=request.prompt_digest.hex(),
            )
            self._require_new(source.room)
            self._calls.hold(
                source.room,
                prompt_tokens=tokens,
                prompt_digest=request.prompt_digest,
                tables=full_tables(blocks[:pages], 0),
                # Nothing of it is written any more. Whoever shares a block may have been held before the request that wrote it.
                computed_tokens=tokens,
                published_tokens=tokens,
            )
        except BridgeError as error:
            log.warning("not_held", request=request.id, reason=str(error))
            return False, None
        self._helds.append(Held(request.id, source.room, self._node.incarnation))
        return True, params_of(source)

    def reported(self, received: Collection[str]) -> None:
        """A worker has reported these loads (`update_connector_output`)."""
        self._fetches.reported(received)

    # ------------------------------------------------------------------ prompts that decode waits for while they are computed

    @property
    def computing(self) -> tuple[str, ...]:
        """Requests of which `computed` is to be told at each step that schedules them, in paired order."""
        return self._paired.computing

    @property
    def has_pins(self) -> bool:
        """Whether blocks that no request has wait for a last event: the engine has to go on stepping (`has_pending_push_work`)."""
        return self._paired.pinned

    def use_pins(self, pins: BlockPins) -> None:
        """Publish blocks before their request has finished, since they can be kept from others (`bind_gpu_block_pool`)."""
        self._paired.pins = pins

    def computed(self, request: str, tokens: int, in_flight_tokens: int, blocks: Sequence[int]) -> None:
        """A step goes on with a request (`build_connector_meta`): blocks that earlier steps have filled are published.

        `tokens`: of it that are computed, or in vLLM's cache, or to be by steps before this one (`num_computed_tokens` before
        this step adds to it). `in_flight_tokens`: those of steps whose output was not read (`num_in_flight_tokens`); the others
        are final, as every rank had to end a step for its output. `blocks`: all of the request, from the prompt's first on.
        """
        self._paired.computed(request, tokens, in_flight_tokens, blocks)

    def preempted(self, requests: Iterable[str]) -> None:
        """These were preempted since the last step (`preempted_req_ids`), and perhaps scheduled again."""
        self._paired.preempted(requests)

    def blocks_return(self, preempted: Collection[str]) -> bool:
        """Whether to wait for blocks instead of preempting one more request (`has_pending_block_frees`).

        `preempted`: by vLLM, as far as is known now. True while their blocks are pinned: what reads them is being stopped.
        """
        return self._paired.blocks_return(preempted)

    # ------------------------------------------------------------------ a step

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing is to be said, but for finished requests whose blocks are held."""
        said = self._helds or self._refused or self._closed or self._node.owes
        return not said and self._paired.idle and self._fetches.idle

    def step(self) -> StepMetadata:
        """Return what the workers have to know (`build_connector_meta`), and begin the next step."""
        with self._guard.over("send_again"):
            self._node.send_again()
        with self._guard.over("paired_rooms"):
            self._paired.step()
        loads, refused = self._fetches.take()
        told = StepMetadata(
            tuple(loads), tuple(self._helds), tuple((refused | self._refused).items()), tuple(self._closed)
        )
        self._helds, self._refused, self._closed = [], {}, []
        return told

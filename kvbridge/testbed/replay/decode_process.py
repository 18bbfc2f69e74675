"""The decode engine of a replay: claims rooms as they arrive, looks at every byte, holds them for a while, gives them back.

Owns: one engine process, and which rooms it holds until when. Must not know: what was ordered, when it was written.
"""

from __future__ import annotations

import heapq
import time

import torch
from pydantic import ValidationError

from kvbridge.core.errors import BridgeError, ConflictError, DeadlineError
from kvbridge.core.plan.operations import Section
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine import DecodeEngine, DecodeRoom
from kvbridge.engine.adapters import synthetic
from kvbridge.testbed.engines.messages import Attached, RoomEnded
from kvbridge.testbed.replay.job import (
    Arrived,
    Compared,
    Job,
    Note,
    Released,
    ReplayChannel,
    Serve,
    joined,
)
from kvbridge.tier.keys import Keys

IDLE_WAIT_S = 0.05
"""How long one look for events takes at most; the end of the orders is seen between two looks."""
ORDER_S = 20.0
"""A room's order is there before prefill has one; it is not on its way for longer."""


def serve(job: Job, channel: ReplayChannel) -> None:
    """Serve whatever arrives until the orders end."""
    torch.set_num_threads(1)  # the daemons need the other cores
    with DecodeEngine.attach(job.decode_runtime_dir) as engine:
        channel.report(Attached())
        Decoding(job, channel, engine).run()


class Decoding:
    """The engine's loop."""

    def __init__(self, job: Job, channel: ReplayChannel, engine: DecodeEngine) -> None:
        self._job = job
        self._channel = channel
        self._engine = engine
        self._orders: dict[int, Serve] = {}
        """By room, until it has ended."""
        self._held: list[tuple[float, int]] = []
        """A heap of (when to release, room)."""

    def run(self) -> None:
        """Until there are no more orders."""
        while not self._channel.ended:
            for event in self._engine.events(self._wait_s()):
                self._on_event(event)
            self._release_due()
            while (order := self._channel.next_order(0.0)) is not None:
                self._orders[order.room] = order

    def _wait_s(self) -> float:
        if not self._held:
            return IDLE_WAIT_S
        return min(IDLE_WAIT_S, max(0.0, self._held[0][0] - time.monotonic()))

    def _on_event(self, event: RoomEvent) -> None:
        match event.kind:
            case "committed":
                try:
                    self.take(event.room)
                except BridgeError as error:
                    self._channel.report(RoomEnded(room=event.room, reason=f"on decode: {error}"))
                self._release_due()
            case "aborted" | "failed":
                self._orders.pop(event.room, None)
                self._channel.report(RoomEnded.told(event, "decode"))
            case "cancel":
                self._give_up(event)
            case _:
                pass

    def take(self, room: int) -> None:
        """Claim a room, compare all of it with what belongs there, and hold it."""
        order = self._order(room)
        keys = order.keys(self._job, self._engine, tokens=order.prompt_tokens)
        claimed = self._engine.claim(room, page_hashes=keys)
        claimed_s = time.monotonic()
        note = _note(claimed)
        compared = self._check(claimed, order, keys)
        checked_s = time.monotonic()
        self._channel.report(
            Arrived(
                number=order.number,
                amounts=claimed.amounts,
                phases_s=claimed.phases_s,
                after_prefill_s=max(0.0, claimed_s - claimed.phases_s.get("commit_to_claim", 0.0) - note.finished_s),
                check_s=checked_s - claimed_s,
                computed_tokens=note.computed_tokens,
                prefix_tokens=claimed.prefix_tokens,
                computed_host_tokens=note.host_tokens,
                prefix_host_tokens=claimed.host_tokens,
                **dict(compared),
            )
        )
        release_s = checked_s + order.output_tokens * self._job.hold_s_per_token
        heapq.heappush(self._held, (release_s, room))

    def _order(self, room: int) -> Serve:
        """Return a room's order. Raises DeadlineError when there is none."""
        while room not in self._orders:
            order = self._channel.next_order(ORDER_S)
            if order is None:
                raise DeadlineError(f"room {room} arrived, and within {ORDER_S:g} s no order said what it is")
            self._orders[order.room] = order
        return self._orders[room]

    def _check(self, claimed: DecodeRoom, order: Serve, keys: Keys) -> Compared:
        """Look at all rows, those that were here already included."""
        found = {
            rank: synthetic.compare(
                views, room=claimed.room, tables=claimed.tables, tokens=order.prompt_tokens, keys=keys
            )
            for rank, views in self._engine.views.items()
        }
        return joined(found, number=order.number, room=claimed.room)

    def _release_due(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic():
            _, room = heapq.heappop(self._held)
            order = self._orders.pop(room)
            try:
                self._release(order)
            except BridgeError as error:
                self._channel.report(RoomEnded(room=room, reason=f"could not be released: {error}"))
            else:
                self._channel.report(Released(number=order.number, released_s=time.monotonic()))

    def _release(self, order: Serve) -> None:
        """Give a room back, with the rows of its answer where those are to stay."""
        if not (self._job.answers and self._job.prefixes):
            self._engine.release(order.room)
            return
        fed = order.fed_tokens
        keys = order.keys(self._job, self._engine, tokens=fed)
        tables = self._engine.extend(order.room, fed)
        page = self._engine.geometry.tokens_per_page
        # The page in which the prompt ends becomes whole, so it is written again, as whole pages are; windows stay as they are.
        answer = Section(prompt_tokens=fed + 1, start_token=order.prompt_tokens // page * page, stop_token=fed)
        for views in self._engine.views.values():
            synthetic.fill(views, room=order.room, tables=tables, section=answer, keys=keys)
        self._engine.release(order.room, valid_tokens=fed, page_hashes=keys)

    def _give_up(self, event: RoomEvent) -> None:
        """Let go of a room that the daemon wants to end; its pages are used again afterwards."""
        if any(room == event.room for _, room in self._held):
            del self._orders[event.room]
            self._held = [each for each in self._held if each[1] != event.room]
            heapq.heapify(self._held)
            self._engine.release(event.room)


def _note(claimed: DecodeRoom) -> Note:
    """Return what the prefill engine sent along: the same from each of its ranks, and about this very room."""
    distinct = set(claimed.metadata.values())
    if len(distinct) != 1:
        raise ConflictError(f"prefill ranks {sorted(claimed.metadata)} sent {len(distinct)} different notes")
    try:
        note = Note.model_validate_json(distinct.pop())
    except ValidationError as error:
        raise ConflictError(f"the prefill engine's note did not arrive as it was written: {error}") from error
    if (note.room, note.prompt_tokens) != (claimed.room, claimed.prompt_tokens):
        raise ConflictError(
            f"room {claimed.room} of {claimed.prompt_tokens} tokens came with the note of room {note.room} of "
            f"{note.prompt_tokens} tokens"
        )
    return note

"""The decode engine of a replay: claims rooms as they arrive, looks at every byte, holds them for a while, gives them back.

Owns: one engine process, and which rooms it holds until when. Must not know: what was ordered, when it was written.
"""

from __future__ import annotations

import heapq
import time

import torch
from pydantic import ValidationError

from kvbridge.core.errors import BridgeError, ConflictError
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine import DecodeEngine, DecodeRoom
from kvbridge.engine.adapters import synthetic
from kvbridge.testbed.engines.messages import Attached, RoomEnded
from kvbridge.testbed.replay.job import (
    MOST_WRONG_ROWS,
    Arrived,
    Job,
    Note,
    Released,
    ReplayChannel,
    WrongRow,
)

IDLE_WAIT_S = 0.05
"""How long one look for events takes at most; the end of the orders is seen between two looks."""


def serve(job: Job, channel: ReplayChannel) -> None:
    """Serve whatever arrives until the orders end (there are none for this engine)."""
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
        self._held: list[tuple[float, int, int]] = []
        """A heap of (when to release, room, number)."""

    def run(self) -> None:
        """Until there are no more orders."""
        while not self._channel.ended:
            for event in self._engine.events(self._wait_s()):
                self._on_event(event)
            self._release_due()
            self._channel.next_order(0.0)

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
                self._channel.report(RoomEnded.told(event, "decode"))
            case "cancel":
                self._give_up(event)
            case _:
                pass

    def take(self, room: int) -> None:
        """Claim a room, compare all of it with what belongs there, and hold it."""
        claimed = self._engine.claim(room)
        claimed_s = time.monotonic()
        note = _note(claimed)
        checked_bytes, wrong_bytes, wrong_rows = self._check(claimed, note)
        checked_s = time.monotonic()
        self._channel.report(
            Arrived(
                number=note.number,
                amounts=claimed.amounts,
                phases_s=claimed.phases_s,
                after_prefill_s=max(0.0, claimed_s - claimed.phases_s.get("commit_to_claim", 0.0) - note.finished_s),
                check_s=checked_s - claimed_s,
                checked_bytes=checked_bytes,
                wrong_bytes=wrong_bytes,
                wrong_rows=wrong_rows,
            )
        )
        release_s = checked_s + note.output_tokens * self._job.hold_s_per_token
        heapq.heappush(self._held, (release_s, room, note.number))

    def _check(self, claimed: DecodeRoom, note: Note) -> tuple[int, int, tuple[WrongRow, ...]]:
        """Return bytes that were looked at, wrong ones of them, and the first rows that hold some."""
        checked = wrong = 0
        rows: list[WrongRow] = []
        for rank, views in self._engine.views.items():
            found = synthetic.compare(views, room=claimed.room, tables=claimed.tables, tokens=note.prompt_tokens)
            checked += found.checked_bytes
            wrong += found.wrong_bytes
            rows += [
                WrongRow.model_validate(
                    {"number": note.number, "room": claimed.room, "rank": str(rank), **row.as_dict()}
                )
                for row in found.mismatches
            ]
        return checked, wrong, tuple(rows[:MOST_WRONG_ROWS])

    def _release_due(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic():
            _, room, number = heapq.heappop(self._held)
            try:
                self._engine.release(room)
            except BridgeError as error:
                self._channel.report(RoomEnded(room=room, reason=f"could not be released: {error}"))
            else:
                self._channel.report(Released(number=number, released_s=time.monotonic()))

    def _give_up(self, event: RoomEvent) -> None:
        """Let go of a room that the daemon wants to end; its pages are used again afterwards."""
        if any(room == event.room for _, room, _ in self._held):
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

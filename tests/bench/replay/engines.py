"""The two engines of a replay: prefill writes bytes that say where they belong, decode looks at all of them."""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvbridge.cli.trace import TraceRequest, prompt_tokens
from kvbridge.core.errors import BridgeError, ConflictError, DeadlineError
from kvbridge.core.ids import Rank, Tables
from kvbridge.core.plan.operations import Amounts, Section
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine import DecodeEngine, DecodeRoom, Engine, PrefillEngine
from kvbridge.tier.keys import NO_KEYS, Keys
from tests.bench.replay.processes import Attached, Channel, RoomEnded
from tests.helpers import synthetic

IDLE_WAIT_S = 0.05
"""How long one look for events takes at most; the end of the orders is seen between two looks."""
ORDER_S = 20.0
"""A room's order is there before prefill has one; it is not on its way for longer."""
MOST_WRONG_ROWS = 20
"""Rows that are named for one room; all wrong bytes are counted."""


@dataclass(frozen=True)
class Job:
    """The same for both engines."""

    prefill_runtime_dir: Path
    decode_runtime_dir: Path
    chunk_tokens: int
    hold_s_per_token: float
    """How long decode holds a room for each token of its output."""
    prefixes: bool
    """Whether rooms have page keys."""
    answers: bool
    """Whether decode writes answers, and names them with the release."""


@dataclass(frozen=True)
class Serve:
    """An order: compute a prompt into this room; decode: serve it."""

    number: int
    room: int
    facts: TraceRequest

    @property
    def fed_tokens(self) -> int:
        """The prompt's, and those of the answer that have rows: the last one has none."""
        return self.facts.input_length + max(0, self.facts.output_length - 1)

    def keys(self, job: Job, engine: Engine, *, tokens: int) -> Keys:
        """The page keys of the first `tokens` tokens, as an engine computes them; none when the job does without."""
        if not job.prefixes:
            return NO_KEYS
        return engine.page_keys(prompt_tokens(self.facts.model_copy(update={"input_length": tokens}), self.number))


@dataclass(frozen=True)
class Compared:
    """Bytes of a request that an engine has looked at; prefill looks at what its node held of a prompt."""

    number: int
    checked_bytes: int
    wrong_bytes: int
    wrong_rows: tuple[str, ...]

    @classmethod
    def of(cls, order: Serve, found: Mapping[Rank, synthetic.Comparison]) -> Compared:
        """Join what was found on each rank."""
        rows = [
            f"request {order.number} (room {order.room}): {row} on rank {rank}"
            for rank, each in found.items()
            for row in each.mismatches
        ]
        counts = ([each.checked_bytes for each in found.values()], [each.wrong_bytes for each in found.values()])
        return cls(order.number, *map(sum, counts), tuple(rows[:MOST_WRONG_ROWS]))


@dataclass(frozen=True)
class Finished:
    """Prefill: a whole prompt is computed and published. Times are of the machine's monotonic clock."""

    number: int
    begun_s: float
    finished_s: float


@dataclass(frozen=True)
class Arrived:
    """Decode: a room was claimed and every byte of it looked at."""

    number: int
    amounts: Amounts
    phases_s: dict[str, float]
    """What the two daemons say, and the engine."""
    found_tokens: dict[str, int]
    """Of the prompt, what each side held already, and what of it came back from host memory."""


@dataclass(frozen=True)
class Released:
    """Decode: a room was given back, at this time of the machine's monotonic clock."""

    number: int
    released_s: float


def prefill(job: Job, channel: Channel) -> None:
    """Serve the requests that are ordered, one after another, until there are no more orders."""
    torch.set_num_threads(1)  # the daemons need the other cores
    with PrefillEngine.attach(job.prefill_runtime_dir) as engine:
        channel.report(Attached())
        while (order := channel.next_order()) is not None:
            try:
                _prefill(job, channel, engine, order)
            except BridgeError as error:
                engine.abort(order.room, f"could not be written: {error}")
                channel.report(RoomEnded(order.room, f"on prefill: {error}"))
            engine.events()  # what happened to rooms is told by decode; unread, it would fill the connection


def _prefill(job: Job, channel: Channel, engine: PrefillEngine, order: Serve) -> None:
    tokens, room, begun_s = order.facts.input_length, order.room, time.monotonic()
    keys = order.keys(job, engine, tokens=tokens)
    begun = engine.begin(room, prompt_tokens=tokens, page_hashes=keys)
    computed = begun.computed_tokens
    if computed:
        found = {
            rank: synthetic.compare(views, room=room, tables=begun.restore, tokens=computed, keys=keys)
            for rank, views in engine.views.items()
        }
        channel.report(Compared.of(order, found))

    def fill(tables: Tables, section: Section) -> None:
        for views in engine.views.values():
            synthetic.fill(views, room=room, tables=tables, section=section, keys=keys)

    for held, tables in begun.checkpoints.items():
        fill(tables, Section(prompt_tokens=held, start_token=held, stop_token=held))
    for start in range(computed, tokens, job.chunk_tokens):
        stop = min(start + job.chunk_tokens, tokens)
        fill(begun.tables, Section(prompt_tokens=tokens, start_token=start, stop_token=stop))
        engine.publish(room, stop)
    finished_s = time.monotonic()
    channel.report(Finished(order.number, begun_s, finished_s))
    note = json.dumps([room, tokens, computed, begun.host_tokens, finished_s]).encode()
    engine.finish(room, metadata=note, checkpoints=tuple(begun.checkpoints))


def decode(job: Job, channel: Channel) -> None:
    """Serve whatever arrives until the orders end."""
    torch.set_num_threads(1)
    with DecodeEngine.attach(job.decode_runtime_dir) as engine:
        channel.report(Attached())
        _Decoding(job, channel, engine).run()


class _Decoding:
    """The decode engine's loop: claims rooms, looks at every byte, holds them for a while, gives them back."""

    def __init__(self, job: Job, channel: Channel, engine: DecodeEngine) -> None:
        self._job = job
        self._channel = channel
        self._engine = engine
        self._orders: dict[int, Serve] = {}
        """By room, until it has ended."""
        self._held: list[tuple[float, int]] = []
        """A heap of (when to release, room)."""

    def run(self) -> None:
        while not self._channel.ended:
            due_s = self._held[0][0] - time.monotonic() if self._held else IDLE_WAIT_S
            for event in self._engine.events(min(IDLE_WAIT_S, max(0.0, due_s))):
                self._on_event(event)
            self._release_due()
            while (order := self._channel.next_order(0.0)) is not None:
                self._orders[order.room] = order

    def _on_event(self, event: RoomEvent) -> None:
        match event.kind:
            case "committed":
                try:
                    self._take(event.room)
                except BridgeError as error:
                    self._channel.report(RoomEnded(event.room, f"on decode: {error}"))
                self._release_due()
            case "aborted" | "failed":
                self._orders.pop(event.room, None)
                self._channel.report(RoomEnded.told(event, "decode"))
            case "cancel" if any(room == event.room for _, room in self._held):
                del self._orders[event.room]
                self._held = [each for each in self._held if each[1] != event.room]
                heapq.heapify(self._held)
                self._engine.release(event.room)
            case _:
                pass

    def _take(self, room: int) -> None:
        """Claim a room, compare all of it with what belongs there, rows that were here already included, and hold it."""
        while room not in self._orders:
            if (known := self._channel.next_order(ORDER_S)) is None:
                raise DeadlineError(f"room {room} arrived, and within {ORDER_S:g} s no order said what it is")
            self._orders[known.room] = known
        order = self._orders[room]
        tokens = order.facts.input_length
        keys = order.keys(self._job, self._engine, tokens=tokens)
        claimed = self._engine.claim(room, page_hashes=keys)
        claimed_s = time.monotonic()
        computed, computed_on_host, finished_s = _note(claimed)
        found = {
            rank: synthetic.compare(views, room=room, tables=claimed.tables, tokens=tokens, keys=keys)
            for rank, views in self._engine.views.items()
        }
        checked_s = time.monotonic()
        self._channel.report(Compared.of(order, found))
        phases_s = claimed.phases_s | {
            "after_prefill": max(0.0, claimed_s - claimed.phases_s.get("commit_to_claim", 0.0) - finished_s),
            "check": checked_s - claimed_s,
        }
        held = {
            "prefill": computed,
            "decode": claimed.prefix_tokens,
            "prefill_host": computed_on_host,
            "decode_host": claimed.host_tokens,
        }
        self._channel.report(Arrived(order.number, claimed.amounts, phases_s, held))
        release_s = checked_s + order.facts.output_length * self._job.hold_s_per_token
        heapq.heappush(self._held, (release_s, room))

    def _release_due(self) -> None:
        while self._held and self._held[0][0] <= time.monotonic():
            _, room = heapq.heappop(self._held)
            order = self._orders.pop(room)
            try:
                self._release(order)
            except BridgeError as error:
                self._channel.report(RoomEnded(room, f"could not be released: {error}"))
            else:
                self._channel.report(Released(order.number, time.monotonic()))

    def _release(self, order: Serve) -> None:
        """Give a room back, with the rows of its answer where those are to stay."""
        if not (self._job.answers and self._job.prefixes):
            self._engine.release(order.room)
            return
        fed, page = order.fed_tokens, self._engine.geometry.tokens_per_page
        keys = order.keys(self._job, self._engine, tokens=fed)
        tables = self._engine.extend(order.room, fed)
        # The page in which the prompt ends becomes whole, so it is written again, as whole pages are; windows stay as they are.
        start = order.facts.input_length // page * page
        answer = Section(prompt_tokens=fed + 1, start_token=start, stop_token=fed)
        for views in self._engine.views.values():
            synthetic.fill(views, room=order.room, tables=tables, section=answer, keys=keys)
        self._engine.release(order.room, valid_tokens=fed, page_hashes=keys)


def _note(claimed: DecodeRoom) -> tuple[int, int, float]:
    """What the prefill engine sent along: the same from each of its ranks, and about this very room."""
    distinct = set(claimed.metadata.values())
    if len(distinct) != 1:
        raise ConflictError(f"prefill ranks {sorted(claimed.metadata)} sent {len(distinct)} different notes")
    room, tokens, computed, on_host, finished_s = json.loads(distinct.pop())
    if (room, tokens) != (claimed.room, claimed.prompt_tokens):
        raise ConflictError(
            f"room {claimed.room} of {claimed.prompt_tokens} tokens came with the note of room {room} of {tokens} tokens"
        )
    return computed, on_host, finished_s

"""The decode engine of the demo: claims requests as they arrive and generates for all of them in turn.

Owns: one engine process, and which requests it is generating for. Must not know: who computed the prompts, or when.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from kvbridge.core.errors import ConflictError
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine import DecodeEngine, DecodeRoom
from kvbridge.testbed.demo.generation import Begin, Generation, generations
from kvbridge.testbed.demo.job import (
    Claimed,
    Decoded,
    DemoChannel,
    FirstToken,
    Job,
    Serve,
    Stepped,
    Text,
    page_ids,
)
from kvbridge.testbed.demo.model import DemoModel, load_and_report, save_logits
from kvbridge.testbed.demo.trace import Trace
from kvbridge.testbed.demo.watch import CacheWatch
from kvbridge.testbed.engines.messages import Attached, RoomEnded
from kvbridge.tier.keys import NO_KEYS, Keys

IDLE_WAIT_S = 0.2


@dataclass
class _Request:
    """One request that tokens are being generated for."""

    order: Serve
    generation: Generation
    tokens: list[int]
    """Fed so far, and the next one to feed."""
    logits: list[torch.Tensor] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)

    def step(self, watch: CacheWatch) -> None:
        self.logits.append(self.generation.step(self.tokens[-1]))
        self.traces.append(watch.take())
        self.tokens.append(int(self.logits[-1].argmax()))


def serve(job: Job, channel: DemoChannel) -> None:
    """Serve the job's requests, whichever room they come in, then wait for the end."""
    loaded = load_and_report(job, channel)
    if channel.next_order() is None:
        return
    with DecodeEngine.attach(job.decode_runtime_dir) as engine, generations(job, loaded, engine) as begin:
        channel.report(Attached())
        _Decoding(job, channel, loaded, engine, begin).run()
        engine.events(IDLE_WAIT_S)  # on a GPU, releases are sent once it is through with the pages
        while channel.next_order() is not None:
            pass


class _Decoding:
    """The engine's loop: claim what has arrived, take a step for every request, release what is through."""

    def __init__(self, job: Job, channel: DemoChannel, loaded: DemoModel, engine: DecodeEngine, begin: Begin) -> None:
        self._job = job
        self._channel = channel
        self._loaded = loaded
        self._engine = engine
        self._begin = begin
        self._watch = CacheWatch(loaded.model)
        self._missing = set(range(1, job.requests + 1))
        self._orders: dict[int, Serve] = {}
        """By room; each comes before its room does."""
        self._active: list[_Request] = []

    def run(self) -> None:
        """Until every request of the job is through."""
        while self._missing:
            for event in self._engine.events(0.0 if self._active else IDLE_WAIT_S):
                self._on_event(event)
            for request in self._active:
                request.step(self._watch)
            if self._active:
                self._channel.report(Stepped(steps=len(self._active)))
            for request in [request for request in self._active if len(request.logits) == self._job.steps]:
                self._release(request)

    def _on_event(self, event: RoomEvent) -> None:
        if event.kind == "committed":
            self._active.append(self._claim(event.room))
        elif event.kind in {"aborted", "failed"}:
            self._channel.report(RoomEnded.told(event, "decode"))

    def _claim(self, room: int) -> _Request:
        """Claim a committed room and take its cache out of the pages."""
        while isinstance(known := self._channel.next_order(0.0), Serve):  # it was said before prefill could begin
            self._orders[known.room] = known
        order = self._orders.pop(room)
        claimed = self._engine.claim(room, page_hashes=self._keys(order, ()))
        claimed_s = time.monotonic()
        first = _first_token(claimed)
        if first.weights != self._loaded.weights:
            raise ConflictError(
                f"request {first.number} was computed by a model with weights {first.weights}, this process has "
                f"{self._loaded.weights}; two releases of torch or transformers?"
            )
        if first.number != order.number:
            raise ConflictError(f"room {room} was to bring request {order.number} and brought {first.number}")
        generation = self._begin(claimed)
        self._channel.report(
            Claimed(
                number=first.number,
                room=room,
                pages=page_ids(claimed.tables),
                prefix_tokens=claimed.prefix_tokens,
                host_tokens=claimed.host_tokens,
                amounts=claimed.amounts,
                phases_s=claimed.phases_s,
                claimed_s=claimed_s,
            )
        )
        return _Request(order, generation, [first.first_token])

    def _release(self, request: _Request) -> None:
        order, fed = request.order, tuple(request.tokens[: self._job.steps])
        self._active.remove(request)
        self._missing.discard(order.number)
        save_logits(self._job.logits_file("decode", order.number), torch.stack(request.logits))
        Trace.joined(request.traces).write(self._job.trace_file("decode", order.number))
        figures, rows = request.generation.end() or (None, None)
        keys = self._keys(order, fed)
        self._engine.release(order.room, valid_tokens=len(order.prompt) + len(fed), page_hashes=keys, sparse=rows)
        self._channel.report(Decoded(number=order.number, tokens=fed, sparse=figures))

    def _keys(self, order: Serve, answer: Text) -> Keys:
        """The page keys of a prompt and its answer, for a room that has any."""
        return self._engine.page_keys(order.prompt + answer) if order.page_keys else NO_KEYS


def _first_token(room: DecodeRoom) -> FirstToken:
    """Return what the prefill engine sent along: the same from each pipeline stage, since one engine serves them all."""
    distinct = set(room.metadata.values())
    if len(distinct) != 1:
        raise ConflictError(f"room {room.room}: prefill ranks {sorted(room.metadata)} sent different first tokens")
    return FirstToken.model_validate_json(distinct.pop())

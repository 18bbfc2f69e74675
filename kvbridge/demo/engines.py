"""The demo's processes with a model: the prefill engine, the decode engine, and the model alone that they are compared with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from kvbridge.core.errors import ConflictError
from kvbridge.core.geometry.components import Encoding
from kvbridge.demo.generation import Generation, generations
from kvbridge.demo.messages import Compute, Computed, Decoded, Job, Logits, Prefilled, Serve, page_ids
from kvbridge.demo.model import DemoModel
from kvbridge.demo.processes import Attached, Channel, RoomEnded
from kvbridge.demo.prompts import Text
from kvbridge.demo.reference import SelectedAttention
from kvbridge.engine import DecodeEngine, DecodeRoom, PrefillEngine
from kvbridge.engine.adapters.deepseek_v4 import (
    CacheCodec,
    Placement,
    PrefillPacker,
    reencoded,
    replace_entries,
    unpack,
)
from kvbridge.engine.adapters.sparse_deepseek_v4 import reencoding_cache
from kvbridge.engine.adapters.transformers import generate, prefill_chunks
from kvbridge.tier.keys import NO_KEYS, Keys

IDLE_WAIT_S = 0.2
NICENESS = 10
"""The model alone steps back for what is being timed."""


def prefill(job: Job, channel: Channel) -> None:
    """Compute every prompt that is ordered into the pages of its room, chunk by chunk."""
    loaded = DemoModel.load(job, channel)
    if channel.next_order() is None:
        return
    with PrefillEngine.attach(job.prefill_runtime_dir) as engine:
        codec = loaded.codec(engine.geometry)
        channel.report(Attached())
        while (order := channel.next_order()) is not None:
            _prefill(job, channel, loaded, engine=engine, codec=codec, order=order)
            for event in engine.events():
                if event.kind in {"aborted", "failed"}:
                    channel.report(RoomEnded.told(event, "prefill"))


def _prefill(
    job: Job, channel: Channel, loaded: DemoModel, *, engine: PrefillEngine, codec: CacheCodec, order: Serve
) -> None:
    keys = engine.page_keys(order.prompt) if order.page_keys else NO_KEYS
    begun = engine.begin(order.room, prompt_tokens=len(order.prompt), page_hashes=keys)
    computed, views = begun.computed_tokens, list(engine.views.values())
    packers = [
        PrefillPacker(
            codec,
            Placement(each, begun.tables),
            prompt_tokens=len(order.prompt),
            computed_tokens=computed,
            checkpoints=begun.checkpoints,
        )
        for each in views
    ]

    def publish(held: Any, upto: int) -> None:  # noqa: ANN401 - transformers is untyped
        for packer in packers:
            packer.advance(held)
        engine.publish(order.room, upto)

    cache = unpack(codec, [Placement(each, begun.restore) for each in views], tokens=computed) if computed else None
    result = prefill_chunks(loaded.model, order.prompt, chunk_tokens=job.chunk_tokens, on_chunk=publish, cache=cache)
    logits = _array(result.logits[None])
    pages = page_ids(begun.tables)
    channel.report(Prefilled(order.number, pages, computed, begun.host_tokens, time.monotonic(), logits))
    note = json.dumps([order.number, result.first_token, loaded.weights]).encode()
    engine.finish(order.room, metadata=note, checkpoints=packers[0].checkpointed)


def decode(job: Job, channel: Channel) -> None:
    """Serve the job's requests, whichever room they come in, then wait for the end."""
    loaded = DemoModel.load(job, channel)
    if channel.next_order() is None:
        return
    with DecodeEngine.attach(job.decode_runtime_dir) as engine, generations(job, loaded, engine) as begin:
        channel.report(Attached())
        _Decoding(job, channel, loaded, engine, begin).run()
        engine.events(IDLE_WAIT_S)  # on a GPU, releases are sent once it is through with the pages
        while channel.next_order() is not None:
            pass


@dataclass
class _Active:
    """One request that tokens are being generated for."""

    order: Serve
    claimed: DecodeRoom
    claimable_s: float
    generation: Generation
    tokens: list[int]
    """Fed so far, and the next one to feed."""
    logits: list[torch.Tensor] = field(default_factory=list)


class _Decoding:
    """The decode engine's loop: claim what has arrived, take a step for every request, release what is through."""

    def __init__(
        self,
        job: Job,
        channel: Channel,
        loaded: DemoModel,
        engine: DecodeEngine,
        begin: Callable[[DecodeRoom], Generation],
    ) -> None:
        self._job = job
        self._channel = channel
        self._loaded = loaded
        self._engine = engine
        self._begin = begin
        self._orders: dict[int, Serve] = {}
        """By room; each comes before its room does."""
        self._active: list[_Active] = []

    def run(self) -> None:
        """Until every request of the job is through."""
        missing = self._job.requests
        while missing:
            for event in self._engine.events(0.0 if self._active else IDLE_WAIT_S):
                if event.kind == "committed":
                    self._active.append(self._claim(event.room))
                elif event.kind in {"aborted", "failed"}:
                    self._channel.report(RoomEnded.told(event, "decode"))
            for each in self._active:
                each.logits.append(each.generation.step(each.tokens[-1]))
                each.tokens.append(int(each.logits[-1].argmax()))
            for each in [each for each in self._active if len(each.logits) == self._job.steps]:
                self._active.remove(each)
                self._release(each)
                missing -= 1

    def _claim(self, room: int) -> _Active:
        """Claim a committed room and take its cache out of the pages."""
        while room not in self._orders and (known := self._channel.next_order()) is not None:
            self._orders[known.room] = known
        order = self._orders.pop(room)
        claimed = self._engine.claim(room, page_hashes=self._keys(order, ()))
        claimable_s = time.monotonic() - claimed.phases_s.get("commit_to_claim", 0.0)
        notes = set(claimed.metadata.values())
        if len(notes) != 1:
            raise ConflictError(f"room {room}: prefill ranks {sorted(claimed.metadata)} sent different first tokens")
        number, first_token, weights = json.loads(notes.pop())
        if weights != self._loaded.weights:
            raise ConflictError(
                f"request {number} was computed by a model with weights {weights}, this process has {self._loaded.weights}; "
                "two releases of torch or transformers?"
            )
        if number != order.number:
            raise ConflictError(f"room {room} was to bring request {order.number} and brought {number}")
        return _Active(order, claimed, claimable_s, self._begin(claimed), [first_token])

    def _release(self, each: _Active) -> None:
        order, claimed, fed = each.order, each.claimed, tuple(each.tokens[: self._job.steps])
        figures, rows = each.generation.end() or (None, None)
        keys = self._keys(order, fed)
        self._engine.release(order.room, valid_tokens=len(order.prompt) + len(fed), page_hashes=keys, sparse=rows)
        self._channel.report(
            Decoded(
                number=order.number,
                pages=page_ids(claimed.tables),
                prefix_tokens=claimed.prefix_tokens,
                host_tokens=claimed.host_tokens,
                amounts=claimed.amounts,
                claimable_s=each.claimable_s,
                tokens=fed,
                logits=_array(torch.stack(each.logits)),
                sparse=figures,
            )
        )

    def _keys(self, order: Serve, answer: Text) -> Keys:
        """Return the page keys of a prompt and its answer, for a room that has any."""
        return self._engine.page_keys(order.prompt + answer) if order.page_keys else NO_KEYS


def alone(job: Job, channel: Channel) -> None:
    """Compute every prompt that is ordered and generate, in one process and without kvbridge."""
    os.nice(NICENESS)
    model = _Alone(job, DemoModel.load(job, channel))
    while (order := channel.next_order()) is not None:
        channel.report(model.compute(order))


class _Alone:
    """The model, and what is left of the requests before."""

    def __init__(self, job: Job, loaded: DemoModel) -> None:
        self._job = job
        self._loaded = loaded
        self._after: dict[int, Any] = {}
        """The cache of each request after its answer."""

    def compute(self, order: Compute) -> Computed:
        """Compute one request; a cache that loses something as rows is encoded and decoded once."""
        job, model = self._job, self._loaded.model
        result = prefill_chunks(model, order.prompt, chunk_tokens=job.chunk_tokens)
        as_it_is = job.encoding is Encoding.NATIVE and job.sparse is None and not order.kept_tokens
        cache = result.cache if as_it_is else self._as_kept(result.cache, order)
        attention = SelectedAttention(model)
        with attention if job.sparse else nullcontext():
            ours = generate(model, cache, first_token=result.first_token, steps=job.steps)
        self._after[order.number] = cache
        logits = _array(torch.cat([result.logits[None], ours.logits]))
        return Computed(order.number, logits, attention.share_of_rounding if job.sparse else None)

    def _as_kept(self, cache: Any, order: Compute) -> Any:  # noqa: ANN401 - transformers is untyped
        """Return the cache as decode gets it out of rows: sparse decode's, and with the entries that it had kept."""
        codec = self._loaded.codec()
        into = reencoding_cache(self._loaded.model.config, codec) if self._job.sparse else None
        kept = reencoded(codec, cache, into=into)
        if order.kept_tokens:
            replace_entries(codec, kept, self._after[order.previous], tokens=order.kept_tokens)
        return kept


def _array(logits: torch.Tensor) -> Logits:
    found: Logits = logits.float().cpu().numpy()
    return found

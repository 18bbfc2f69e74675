"""Conversations with a real model over a running cluster: both engines, and the model alone, in the test's own process.

All of them compute with one model, so the same operations give the same bits, whatever the processor. They do what engines do: get
rooms, restore from checkpoints, write pages, read pages. Nothing here knows what the daemons ought to hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.demo.reference import SelectedAttention
from kvbridge.engine import DecodeRoom, PrefillRoom
from kvbridge.engine.adapters.deepseek_v4 import (
    CacheCodec,
    Placement,
    PrefillPacker,
    append,
    reencoded,
    replace_entries,
    unpack,
)
from kvbridge.engine.adapters.sparse_deepseek_v4 import SparseDecoder
from kvbridge.engine.adapters.transformers import Prefill, generate, load_model, prefill_chunks
from kvbridge.sparse import SparseCache
from kvbridge.tier.keys import Keys
from tests.helpers.cluster import eventually
from tests.helpers.conversation import named
from tests.helpers.live_rooms import LiveCluster, busy_pages, ends
from tests.helpers.sparse_model import C4, host_region
from tests.helpers.tiny_model import load_config

PAGE = 256
CLAIM_S, QUIET_S = 60.0, 10.0
HOT_ROWS = 64
MOST_TOKENS = 4096
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What was answered to a prompt."""

    fed: Tokens
    logits: torch.Tensor
    """fp32 [1 + steps, vocabulary]: of the prompt's last token, and after each token that was fed."""
    cache: Any = None
    """The model alone: its cache in the end."""


@dataclass(frozen=True)
class Turn:
    """One request over the bridge."""

    answer: Answer
    prefix_tokens: int
    computed_tokens: int
    host_tokens: tuple[int, int] = (0, 0)
    """Of `computed_tokens` and of `prefix_tokens`, what came back from host memory."""


class ModelAlone:
    """The tiny model, and what it answers by itself to a whole prompt, computed from its start. Remembers its answers."""

    def __init__(self) -> None:
        self.facts = load_config()
        self.model = load_model(self.facts)
        self._answers: dict[tuple[Tokens, int, bool], Answer] = {}

    def prefill(self, prompt: Tokens) -> Prefill:
        """Cut at the ends of pages, as the engines are."""
        return prefill_chunks(self.model, prompt, chunk_tokens=PAGE)

    def answer(self, prompt: Tokens, steps: int, *, sparse: bool) -> Answer:
        known = (prompt, steps, sparse)
        if known not in self._answers:
            cold = self.prefill(prompt)
            self._answers[known] = self._generate(cold, cold.cache, steps, sparse=sparse)
        return self._answers[known]

    def answer_from_kept(
        self, codec: CacheCodec, prompt: Tokens, former: Answer, kept_tokens: int, *, sparse: bool
    ) -> Answer:
        """The same over the rows of `kept_tokens` tokens that a former answer has left."""
        cold = self.prefill(prompt)
        cache = reencoded(codec, cold.cache)
        replace_entries(codec, cache, former.cache, tokens=kept_tokens)
        return self._generate(cold, cache, len(former.fed), sparse=sparse)

    def _generate(self, prefill: Prefill, cache: Any, steps: int, *, sparse: bool) -> Answer:
        with SelectedAttention(self.model) if sparse else nullcontext():
            made = generate(self.model, cache, first_token=prefill.first_token, steps=steps)
        return Answer(made.tokens, torch.cat([prefill.logits[None], made.logits]), cache)


class TurnEngines:
    """A prefill engine and a decode engine that serve one request at a time."""

    keeps_answers = False
    """What the decode node is told to do (`tier.generated`)."""

    def __init__(self, live: LiveCluster, alone: ModelAlone, store: SparseCache, decoder: SparseDecoder) -> None:
        self.live, self.alone, self.codec = live, alone, CacheCodec(live.sender.geometry, alone.model.config)
        self._store, self._decoder = store, decoder

    def turn(self, prompt: Tokens, steps: int, *, sparse: bool = False) -> Turn:
        """Take a request through both engines; prefill has let go of its pages in the end."""
        live, keys = self.live, self.live.sender.page_keys(prompt)
        room = int(live.ticket(len(prompt), max_new_tokens=steps, **named(keys))["room"])
        first, begun = self._prefill(room, prompt, keys)
        claimed = live.reader.wait_claim(room, CLAIM_S, page_hashes=keys)
        fed, logits = self._decode(claimed, first, steps, prompt=prompt, sparse=sparse)
        ends(live.prefill, room, "completed")
        eventually("let go of by both", lambda: not any(map(busy_pages, live.nodes)))
        answer, host_tokens = (
            Answer(fed, torch.stack([first.logits, *logits])),
            (begun.host_tokens, claimed.host_tokens),
        )
        return Turn(answer, claimed.prefix_tokens, begun.computed_tokens, host_tokens)

    def _prefill(self, room: int, prompt: Tokens, keys: Keys) -> tuple[Prefill, PrefillRoom]:
        engine, reader = self.live.sender, self.live.reader
        assert reader, "attached before the commit is told"
        begun = engine.begin(room, prompt_tokens=len(prompt), page_hashes=keys)
        computed, views = begun.computed_tokens, list(engine.views.values())
        packers = [
            PrefillPacker(
                self.codec,
                Placement(each, begun.tables),
                prompt_tokens=len(prompt),
                computed_tokens=computed,
                checkpoints=begun.checkpoints,
            )
            for each in views
        ]
        restored = [Placement(each, begun.restore) for each in views]

        def publish(cache: Any, upto: int) -> None:
            for packer in packers:
                packer.advance(cache)
            engine.publish(room, upto)

        cache = unpack(self.codec, restored, tokens=computed) if computed else None
        made = prefill_chunks(self.alone.model, prompt, chunk_tokens=PAGE, on_chunk=publish, cache=cache)
        engine.finish(room, checkpoints=packers[0].checkpointed)
        return made, begun

    def _decode(
        self, claimed: DecodeRoom, first: Prefill, steps: int, *, prompt: Tokens, sparse: bool
    ) -> tuple[Tokens, list[torch.Tensor]]:
        engine, length = self.live.reader, len(prompt)
        places, rows = [Placement(each, claimed.tables) for each in engine.views.values()], None
        if sparse:
            slot = self._store.requests.free_slot()
            request = self._decoder.admit(slot, places, tokens=length, shared_tokens=claimed.prefix_tokens)
            token, fed, logits = first.first_token, [], []
            for _ in range(steps):
                fed.append(token)
                logits.append(self._decoder.step(request, token=token))
                token = int(logits[-1].argmax())
            for place in places:
                self._decoder.append(request, placement=place, from_token=length)
            released = self._decoder.release(request)
            released.wait(QUIET_S)
            rows = released.rows()
        else:
            cache = unpack(self.codec, places, tokens=length)
            made = generate(self.alone.model, cache, first_token=first.first_token, steps=steps)
            fed, logits = list(made.tokens), list(made.logits)
            for place in places:
                append(self.codec, cache, placement=place, from_token=length)
        stated = prompt + tuple(fed)
        engine.release(claimed.room, valid_tokens=len(stated), page_hashes=engine.page_keys(stated), sparse=rows)
        return tuple(fed), logits


@contextmanager
def turn_engines(live: LiveCluster, alone: ModelAlone) -> Iterator[TurnEngines]:
    """Engines for a cluster that serves the model alone's configuration; left before the cluster's engines detach."""
    codec = CacheCodec(live.reader.geometry, alone.model.config)
    component, views = codec.geometry.component(C4), list(live.reader.views.values())
    settings = SparseSettings(
        max_requests=1, hot_rows=HOT_ROWS, top_k=int(alone.model.config.index_topk), max_tokens=MOST_TOKENS
    )
    # The ranks of a node share its host pool, and each names all of it.
    regions = {layer: host_region(each, layer) for each in views for layer in each.layers(C4)}
    with (
        closing(SparseCache(settings, component, list(regions.values()), torch.device("cpu"))) as store,
        closing(SparseDecoder(alone.model, codec, store)) as decoder,
    ):
        yield TurnEngines(live, alone, store, decoder)

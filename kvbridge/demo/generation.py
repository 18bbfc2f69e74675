"""The two ways in which the demo's decode engine generates: with whole caches, or sparsely with a hot buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeAlias

import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace
from kvbridge.demo.messages import Job, SparseFigures
from kvbridge.demo.model import DemoModel
from kvbridge.engine import DecodeEngine, DecodeRoom
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, Placement, append, unpack
from kvbridge.engine.adapters.sparse_deepseek_v4 import SparseDecoder
from kvbridge.engine.adapters.transformers import decode_step
from kvbridge.sparse import SparseCache, SparseRows

EXTEND_TOKENS = 64
QUIET_S = 10.0


class WholeCache:
    """One request that is decoded with a whole cache, taken out of its pages."""

    def __init__(self, loaded: DemoModel, codec: CacheCodec, placements: list[Placement], tokens: int) -> None:
        self._model = loaded.model
        self._codec = codec
        self._placements = placements
        self._prompt_tokens = tokens
        self._cache = unpack(codec, placements, tokens=tokens)

    def step(self, token: int) -> torch.Tensor:
        """Feed a token; return the fp32 logits [vocabulary] of the next."""
        return decode_step(self._model, self._cache, token=token)

    def end(self) -> None:
        """Write the rows of the answer into the pages."""
        for placement in self._placements:
            append(self._codec, self._cache, placement=placement, from_token=self._prompt_tokens)


class SparseGeneration:
    """One request in a slot of the hot buffer. It asks for pages as it grows, as an engine does that knows no end."""

    def __init__(self, decoder: SparseDecoder, engine: DecodeEngine, claimed: DecodeRoom, *, most_tokens: int) -> None:
        self._store = decoder.store
        self._decoder = decoder
        self._engine = engine
        self._room = claimed.room
        self._most_tokens = most_tokens
        self._placements = _placements(engine, claimed)
        self._prompt_tokens = self._paged_tokens = claimed.prompt_tokens
        self._selected = 0
        slot, shared = self._store.requests.free_slot(), claimed.prefix_tokens
        self._request = decoder.admit(slot, self._placements, tokens=claimed.prompt_tokens, shared_tokens=shared)

    def step(self, token: int) -> torch.Tensor:
        """Feed a token; return the fp32 logits [vocabulary] of the next."""
        if self._request.tokens == self._paged_tokens:
            self._paged_tokens = min(self._paged_tokens + EXTEND_TOKENS, self._most_tokens)
            tables = self._engine.extend(self._room, self._paged_tokens)
            self._placements = [Placement(views, tables) for views in self._engine.views.values()]
            self._decoder.extend(self._request, tables)
        logits = self._decoder.step(self._request, token=token)
        self._selected += min(self._store.settings.top_k, self._rows()) * len(self._store.layers)
        return logits

    def end(self) -> tuple[SparseFigures, SparseRows]:
        """Let go of the pages; return what sparse decode did, for the demo and for the node."""
        counts = self._store.counts(self._request.request_slot)
        figures = SparseFigures(self._selected, counts.hits, counts.loaded, self._rows())
        for placement in self._placements:
            self._decoder.append(self._request, placement=placement, from_token=self._prompt_tokens)
        released = self._decoder.release(self._request)
        released.wait(QUIET_S)
        return figures, released.rows()

    def _rows(self) -> int:
        """Complete rows of the request in one layer."""
        return self._request.tokens // self._store.component.tokens_per_row


Generation: TypeAlias = WholeCache | SparseGeneration


@contextmanager
def generations(job: Job, loaded: DemoModel, engine: DecodeEngine) -> Iterator[Callable[[DecodeRoom], Generation]]:
    """Yield the function that takes a claimed request over from its pages. To be left before the engine is closed."""
    codec = loaded.codec(engine.geometry)
    if job.sparse is None:
        yield lambda claimed: WholeCache(loaded, codec, _placements(engine, claimed), claimed.prompt_tokens)
        return
    component = codec.geometry.component(ComponentKind.C4_KV)
    regions = [
        views.region(component.kind, layer, space=IndexSpace.HOST).region
        for views in engine.views.values()
        for layer in views.layers(component.kind)
    ]
    with (
        closing(SparseCache(job.sparse, component, regions, loaded.device)) as store,
        closing(SparseDecoder(loaded.model, codec, store)) as decoder,
    ):
        yield lambda claimed: SparseGeneration(decoder, engine, claimed, most_tokens=claimed.prompt_tokens + job.steps)


def _placements(engine: DecodeEngine, claimed: DecodeRoom) -> list[Placement]:
    return [Placement(views, claimed.tables) for views in engine.views.values()]

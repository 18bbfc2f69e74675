"""The two ways in which the demo's decode engine generates: with whole caches, or sparsely with a hot buffer.

Owns: what a claimed room becomes in either way, and what sparse decode did for it. Must not know: when requests come or end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace
from kvbridge.engine import DecodeEngine, DecodeRoom
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, Placement, append, unpack
from kvbridge.engine.adapters.sparse_deepseek_v4 import SparseDecoder
from kvbridge.engine.adapters.transformers import decode_step
from kvbridge.sparse import SparseCache, SparseRows
from kvbridge.testbed.demo.job import Job, SparseFigures
from kvbridge.testbed.demo.model import DemoModel

EXTEND_TOKENS = 64
QUIET_S = 10.0


class Generation(Protocol):
    """One request that tokens are being generated for."""

    def step(self, token: int) -> torch.Tensor:
        """Feed a token; return the fp32 logits [vocabulary] of the next."""

    def end(self) -> tuple[SparseFigures, SparseRows] | None:
        """Let go of the room's pages; return what sparse decode did, for the demo and for the node."""


Begin = Callable[[DecodeRoom], Generation]
"""Takes a claimed request over from its pages."""


@contextmanager
def generations(job: Job, loaded: DemoModel, engine: DecodeEngine) -> Iterator[Begin]:
    """Yield what begins generations as the job asks for them. To be left before the engine is closed."""
    codec = loaded.codec(engine.geometry)
    if job.sparse is None:
        yield lambda claimed: _WholeCache(loaded, codec, _placements(engine, claimed), claimed.prompt_tokens)
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
        yield lambda claimed: _Sparse(decoder, engine, claimed, most_tokens=claimed.prompt_tokens + job.steps)


class _WholeCache:
    def __init__(self, loaded: DemoModel, codec: CacheCodec, placements: list[Placement], tokens: int) -> None:
        self._model = loaded.model
        self._codec = codec
        self._placements = placements
        self._prompt_tokens = tokens
        self._cache = unpack(codec, placements, tokens=tokens)

    def step(self, token: int) -> torch.Tensor:
        return decode_step(self._model, self._cache, token=token)

    def end(self) -> None:
        for placement in self._placements:
            append(self._codec, self._cache, placement=placement, from_token=self._prompt_tokens)


class _Sparse:
    """One request in a slot of the hot buffer. It asks for pages as it grows, as an engine does that knows no end."""

    def __init__(self, decoder: SparseDecoder, engine: DecodeEngine, claimed: DecodeRoom, *, most_tokens: int) -> None:
        self._store = store = decoder.store
        self._decoder = decoder
        self._engine = engine
        self._room = claimed.room
        self._most_tokens = most_tokens
        slot = store.requests.free_slot()
        self._placements = _placements(engine, claimed)
        self._prompt_tokens = claimed.prompt_tokens
        self._request = decoder.admit(
            slot, self._placements, tokens=claimed.prompt_tokens, shared_tokens=claimed.prefix_tokens
        )
        self._paged_tokens = claimed.prompt_tokens
        self._complete_pages = self._pages()
        self._selected = 0

    def step(self, token: int) -> torch.Tensor:
        if self._request.tokens == self._paged_tokens:
            self._paged_tokens = min(self._paged_tokens + EXTEND_TOKENS, self._most_tokens)
            tables = self._engine.extend(self._room, self._paged_tokens)
            self._placements = [Placement(views, tables) for views in self._engine.views.values()]
            self._decoder.extend(self._request, tables)
        logits = self._decoder.step(self._request, token=token)
        store = self._store
        self._selected += min(store.settings.top_k, self._rows()) * len(store.layers)
        return logits

    def end(self) -> tuple[SparseFigures, SparseRows]:
        store = self._store
        counts = store.counts(self._request.request_slot)
        pages = self._pages() - self._complete_pages
        figures = SparseFigures(
            selected=self._selected,
            in_ring=self._selected - counts.hits - counts.loaded,
            in_hot_slots=counts.hits,
            loaded=counts.loaded,
            evicted=counts.evicted,
            backed_up=pages * store.component.slots_per_page * len(store.layers),
            rows=self._rows(),
        )
        for placement in self._placements:
            self._decoder.append(self._request, placement=placement, from_token=self._prompt_tokens)
        released = self._decoder.release(self._request)
        released.wait(QUIET_S)
        return figures, released.rows()

    def _rows(self) -> int:
        """Complete rows of the request in one layer."""
        return self._request.tokens // self._store.component.tokens_per_row

    def _pages(self) -> int:
        return self._rows() // self._store.component.slots_per_page


def _placements(engine: DecodeEngine, claimed: DecodeRoom) -> list[Placement]:
    return [Placement(views, claimed.tables) for views in engine.views.values()]

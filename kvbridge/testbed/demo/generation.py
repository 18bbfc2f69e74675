"""The two ways in which the demo's decode engine generates: with whole caches, or sparsely with a hot buffer.

Owns: what a claimed room becomes in either way, and what sparse decode did for it. Must not know: when requests come or end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, closing
from types import TracebackType
from typing import Any, Self

import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.hot_buffer import SparseSettings
from kvbridge.core.ids import IndexSpace
from kvbridge.engine import DecodeEngine, DecodeRoom
from kvbridge.engine.adapters.deepseek_v4 import CacheCodec, Placement, unpack
from kvbridge.engine.adapters.sparse_deepseek_v4 import SparseDecoder
from kvbridge.engine.adapters.transformers import decode_step
from kvbridge.sparse import SparseCache
from kvbridge.testbed.demo.job import Job, SparseFigures
from kvbridge.testbed.demo.model import DemoModel

EXTEND_TOKENS = 64
QUIET_S = 10.0


class Generation(ABC):
    """One request that tokens are being generated for."""

    @abstractmethod
    def step(self, token: int) -> torch.Tensor:
        """Feed a token; return the fp32 logits [vocabulary] of the next."""

    @abstractmethod
    def end(self) -> SparseFigures | None:
        """Let go of the room's pages; return what sparse decode did."""


class Generations(AbstractContextManager["Generations"], ABC):
    """Makes a generation of each claimed room. Use as a context, inside that of the engine."""

    @abstractmethod
    def begin(self, claimed: DecodeRoom) -> Generation:
        """Take a request over from its pages."""


def generations(job: Job, loaded: DemoModel, engine: DecodeEngine) -> Generations:
    """Return what the job asks for."""
    codec = loaded.codec(engine.geometry)
    if job.sparse is None:
        return _WholeCaches(loaded, codec, engine)
    return _SparseGenerations(job.sparse, loaded, codec, engine, most_steps=job.steps)


# ---------------------------------------------------------------------------------------------- whole caches


class _WholeCaches(Generations):
    def __init__(self, loaded: DemoModel, codec: CacheCodec, engine: DecodeEngine) -> None:
        self._loaded = loaded
        self._codec = codec
        self._engine = engine

    def begin(self, claimed: DecodeRoom) -> Generation:
        cache = unpack(self._codec, _placements(self._engine, claimed), tokens=claimed.prompt_tokens)
        return _WholeCache(self._loaded.model, cache)

    def __exit__(self, *_: object) -> None:
        return


class _WholeCache(Generation):
    def __init__(self, model: Any, cache: Any) -> None:  # noqa: ANN401 - transformers is untyped
        self._model = model
        self._cache = cache

    def step(self, token: int) -> torch.Tensor:
        return decode_step(self._model, self._cache, token=token)

    def end(self) -> SparseFigures | None:
        return None


# ---------------------------------------------------------------------------------------------- sparse


class _SparseGenerations(Generations):
    def __init__(
        self, settings: SparseSettings, loaded: DemoModel, codec: CacheCodec, engine: DecodeEngine, *, most_steps: int
    ) -> None:
        self._engine = engine
        self._most_steps = most_steps
        component = codec.geometry.component(ComponentKind.C4_KV)
        regions = [
            views.region(component.kind, layer, space=IndexSpace.HOST).region
            for views in engine.views.values()
            for layer in views.layers(component.kind)
        ]
        self.store = SparseCache(settings, component, regions, loaded.device)
        self.decoder = SparseDecoder(loaded.model, codec, self.store)

    def begin(self, claimed: DecodeRoom) -> Generation:
        return _Sparse(self, self._engine, claimed, most_tokens=claimed.prompt_tokens + self._most_steps)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with closing(self.store):
            self.decoder.close()


class _Sparse(Generation):
    """One request in a slot of the hot buffer. It asks for pages as it grows, as an engine does that knows no end."""

    def __init__(
        self, shared: _SparseGenerations, engine: DecodeEngine, claimed: DecodeRoom, *, most_tokens: int
    ) -> None:
        self._shared = shared
        self._engine = engine
        self._room = claimed.room
        self._most_tokens = most_tokens
        slot = shared.store.requests.free_slot()
        self._request = shared.decoder.admit(slot, _placements(engine, claimed), tokens=claimed.prompt_tokens)
        self._paged_tokens = claimed.prompt_tokens
        self._complete_pages = self._pages()
        self._selected = 0

    def step(self, token: int) -> torch.Tensor:
        if self._request.tokens == self._paged_tokens:
            self._paged_tokens = min(self._paged_tokens + EXTEND_TOKENS, self._most_tokens)
            self._shared.decoder.extend(self._request, self._engine.extend(self._room, self._paged_tokens))
        logits = self._shared.decoder.step(self._request, token=token)
        store = self._shared.store
        self._selected += min(store.settings.top_k, self._rows()) * len(store.layers)
        return logits

    def end(self) -> SparseFigures | None:
        store = self._shared.store
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
        self._shared.decoder.release(self._request).wait(QUIET_S)
        return figures

    def _rows(self) -> int:
        """Complete rows of the request in one layer."""
        return self._request.tokens // self._shared.store.component.tokens_per_row

    def _pages(self) -> int:
        return self._rows() // self._shared.store.component.slots_per_page


def _placements(engine: DecodeEngine, claimed: DecodeRoom) -> list[Placement]:
    return [Placement(views, claimed.tables) for views in engine.views.values()]

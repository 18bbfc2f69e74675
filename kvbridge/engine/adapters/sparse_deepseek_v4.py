"""Hugging Face's DeepSeek-V4 decoding sparsely: its C4 layers hold no entries, they fetch the selected rows.

The model's own code runs unchanged. Its C4 layers do three things in a forward pass: they hand the new entry to the cache and
get all entries, they let the indexer select some, and they give the attention all entries with a bias that shuts out what was
not selected. Here the cache (`SparseLayer`) takes the new entry to the hot buffer and returns room for the selected ones; a
hook on the indexer, which runs after it, fetches them into this room and renumbers the selection to places in it. So the
attention sees the selected entries only, in the order in which the indexer gave them.

The result differs from the dense model's by the rounding of sums over other numbers of terms. Sorting the entries by row does
not bring it closer (both were measured: 2e-6 in fp32), so they are not sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache

from kvbridge.core.closing import Closing
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace
from kvbridge.engine.adapters.deepseek_v4 import SPARSE, CacheCodec, Placement, unpack
from kvbridge.engine.adapters.transformers import CACHE_ARGUMENT, Model, decode_step
from kvbridge.engine.encodings import RowCodec
from kvbridge.sparse import SparseCache

_ENTRIES = "compressor"
"""The cache's own name for the entries that attention reads; the indexer's keys stay in the cache."""
_NO_ROW = -1


class SparseLayer(DeepseekV4CSACache):  # type: ignore[no-untyped-call]  # transformers is half typed
    """The cache of a C4 layer without its entries: window, indexer keys and buffers are here, entries are in `store`."""

    _layer_type: str | None = None  # type: ignore[assignment]  # with a type it would take the library's own class's place
    entries_elsewhere = frozenset({ComponentKind.C4_KV})

    def __init__(self, config: Any, store: SparseCache, layer: int, codec: RowCodec) -> None:  # noqa: ANN401
        super().__init__(config)
        self._store = store
        self._layer = layer
        self._codec = codec
        self._top_k = int(config.index_topk)
        self._room: torch.Tensor | None = None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Take the entry that became complete, or none: [1, 0 or 1, width]. Return room for the selected ones."""
        if name != _ENTRIES:
            everything: torch.Tensor = super().update_compressor_states(name, compressed)
            return everything
        batch, count, width = compressed.shape
        if batch != 1 or count > 1:
            raise InvalidInputError(
                f"sparse decode takes one token of one request at a time, got {count} new entries in a batch of {batch}"
            )
        self.entry_count[name] += count
        if count:
            self._store.append(self._layer, self._codec.encode(compressed[0]))
        self._room = compressed.new_zeros((1, min(self._top_k, self.entry_count[name]), width))
        return self._room

    def select(self, top_k: torch.Tensor) -> torch.Tensor:
        """Fetch the rows that the indexer selected, [1, 1, k], into the room; return their places there, -1 for no row."""
        room, self._room = self._room, None
        if room is None or top_k.shape != (1, 1, room.shape[1]):
            raise ConflictError(
                f"the indexer selected rows of shape {tuple(top_k.shape)} before room was made for as many; this release of "
                "transformers computes in another order than sparse decode knows"
            )
        if count := room.shape[1]:
            store = self._store
            selected = torch.full((1, store.settings.top_k), _NO_ROW, dtype=torch.int32, device=store.device)
            selected[0, :count] = top_k[0, 0]
            places = store.swap_in(self._layer, selected)[0, :count]
            room[0] = self._codec.decode(store.rows(self._layer, places))
        return torch.where(top_k < 0, top_k, torch.arange(count, device=top_k.device))


class ReencodingLayer(DeepseekV4CSACache):  # type: ignore[no-untyped-call]  # transformers is half typed
    """A dense C4 layer whose new entries lose what they would lose as rows: quantised sparse decode is compared with it."""

    _layer_type: str | None = None  # type: ignore[assignment]  # as above

    def __init__(self, config: Any, codec: RowCodec) -> None:  # noqa: ANN401 - transformers is untyped
        super().__init__(config)
        self._codec = codec

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Take new entries [1, n, width]; return all."""
        if name == _ENTRIES and compressed.shape[1]:
            compressed = self._codec.decode(self._codec.encode(compressed[0]))[None]
        everything: torch.Tensor = super().update_compressor_states(name, compressed)
        return everything


def reencoding_cache(config: Any, codec: CacheCodec) -> DynamicCache:  # noqa: ANN401 - transformers is untyped
    """Return an empty cache of whole entries that are kept as `codec` encodes them."""
    entries = codec.row_codec(ComponentKind.C4_KV)
    return _cache_with(config, lambda _: ReencodingLayer(config, entries))


@dataclass
class SparseRequest:
    """One request that is decoded sparsely."""

    request_slot: int
    cache: DynamicCache
    tokens: int
    """In the cache."""


class SparseDecoder(Closing):
    """A model and the hot buffer that its requests share; for one thread. Dense caches pass through the model's hooks untouched.

    `store` has one layer for each C4 layer of the model. A request's other rows live where `codec` puts them. `append` of
    `deepseek_v4` writes them into pages; C4 rows go to the host pool by themselves. To end a request, release its slot in `store`.
    """

    def __init__(self, model: Model, codec: CacheCodec, store: SparseCache) -> None:
        """Raises InvalidInputError when the hot buffer was made for another model."""
        self._model = model
        self._codec = codec
        self.store = store
        component = codec.geometry.component(ComponentKind.C4_KV)
        if store.layers != component.layers or store.settings.top_k < model.config.index_topk:
            raise InvalidInputError(
                f"{store!r} holds layers {store.layers} and up to {store.settings.top_k} selected rows; the model has C4 layers "
                f"{component.layers} and selects {model.config.index_topk}"
            )
        self._tokens_per_row = component.tokens_per_row
        self._hooks = [
            module.register_forward_hook(_select, with_kwargs=True)
            for name, module in model.named_modules()
            if name.endswith(".compressor.indexer")
        ]

    def admit(self, request_slot: int, placement: Placement, *, tokens: int, shared_tokens: int = 0) -> SparseRequest:
        """Begin a request of `tokens` tokens from its pages; it takes the first token of its answer next.

        `shared_tokens`: as many of them this node held already (`held_by_decode` of the room). Raises what `SparseCache.admit` and
        `unpack` raise.
        """
        table = placement.tables.get(IndexSpace.HOST)
        if table is None:
            raise InvalidInputError("the request has no pages in the host pool; sparse decode needs c4_kv there")
        config, codec = self._model.config, self._codec.row_codec(ComponentKind.C4_KV)
        into = _cache_with(config, lambda layer: SparseLayer(config, self.store, layer, codec))
        cache = unpack(self._codec, placement, tokens=tokens, into=into)
        shared_pages = shared_tokens // self._codec.geometry.tokens_per_page
        self.store.admit(
            request_slot, table.require(IndexSpace.HOST), tokens // self._tokens_per_row, shared_pages=shared_pages
        )
        return SparseRequest(request_slot, cache, tokens)

    def step(self, request: SparseRequest, *, token: int) -> torch.Tensor:
        """Feed one token; return the fp32 logits [vocabulary] of the next.

        Raises InvalidInputError when the request has no host page for the row that this token completes; then nothing has changed,
        and `SparseCache.extend` helps. After any other error the request is to be released.
        """
        self.store.begin_step([(request.request_slot, (request.tokens + 1) // self._tokens_per_row)])
        try:
            return decode_step(self._model, request.cache, token=token)
        finally:
            self.store.end_step()
            request.tokens += 1

    def close(self) -> None:
        """Leave the model as it was; the hot buffer is its owner's to close."""
        for hook in self._hooks:
            hook.remove()


def _cache_with(config: Any, sparse_layer: Callable[[int], DeepseekV4CSACache]) -> DynamicCache:  # noqa: ANN401
    cache = DynamicCache(config=config)
    for layer, kind in enumerate(config.layer_types):
        if kind == SPARSE:
            cache.layers[layer] = sparse_layer(layer)
    return cache


def _select(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], top_k: torch.Tensor) -> Any:  # noqa: ANN401
    """Take the cache and the layer's number from the indexer's last arguments. None leaves its result as it is."""
    cache = named.get(CACHE_ARGUMENT, arguments[3] if len(arguments) > 3 else None)
    layer = named.get("layer_idx", arguments[4] if len(arguments) > 4 else None)
    held = cache.layers[layer] if cache is not None else None
    return held.select(top_k) if isinstance(held, SparseLayer) else None

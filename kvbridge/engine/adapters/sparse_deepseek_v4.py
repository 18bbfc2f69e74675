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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache

from kvbridge.core.closing import Closing
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.ids import IndexSpace, PageIdArray, Tables
from kvbridge.engine.adapters.deepseek_v4 import SPARSE, CacheCodec, Placement, append, unpack
from kvbridge.engine.adapters.transformers import CACHE_ARGUMENT, decode_step
from kvbridge.engine.encodings import RowCodec
from kvbridge.sparse import ReleasedRequest, SparseCache

_ENTRIES = "compressor"
"""What the model's cache calls the entries that attention reads; the indexer's keys stay in the cache."""
_NO_ROW = -1
_ON_HOST = frozenset({ComponentKind.C4_KV})


class SparseLayer(DeepseekV4CSACache):  # type: ignore[no-untyped-call]  # transformers is half typed
    """The cache of a C4 layer without its entries: window, indexer keys and buffers are here, entries are in `rows`."""

    _layer_type: str | None = None  # type: ignore[assignment]  # with a type it would take the library's own class's place

    def __init__(self, config: Any, rows: HotRows) -> None:  # noqa: ANN401 - transformers is untyped
        super().__init__(config)
        self._rows = rows
        self._top_k = int(config.index_topk)
        self._room: torch.Tensor | None = None

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Called by the model with the entry that became complete, or none: [1, 0 or 1, width]. Returns room for the selected."""
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
            self._rows.append(compressed[0])
        self._room = compressed.new_zeros((1, min(self._top_k, self.entry_count[name]), width))
        return self._room

    def select(self, top_k: torch.Tensor) -> torch.Tensor:
        """Fetch what the indexer selected, [1, 1, k], into the room; return its places there, -1 for what is none."""
        room, self._room = self._room, None
        if room is None or top_k.shape != (1, 1, room.shape[1]):
            raise ConflictError(
                f"the indexer selected rows of shape {tuple(top_k.shape)} before room was made for as many; this release of "
                "transformers computes in another order than sparse decode knows"
            )
        if room.shape[1]:
            room[0] = self._rows.fetch(top_k[0, 0])
        places = torch.arange(room.shape[1], device=top_k.device)
        return torch.where(top_k < 0, top_k, places)


class ReencodingLayer(DeepseekV4CSACache):  # type: ignore[no-untyped-call]  # transformers is half typed
    """A dense C4 layer whose new entries lose what they would lose as rows: what quantised sparse decode is compared with."""

    _layer_type: str | None = None  # type: ignore[assignment]  # as above

    def __init__(self, config: Any, codec: RowCodec) -> None:  # noqa: ANN401 - transformers is untyped
        super().__init__(config)
        self._codec = codec

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """Called by the model with new entries [1, n, width]; returns all."""
        if name == _ENTRIES and compressed.shape[1]:
            compressed = self._codec.decode(self._codec.encode(compressed[0]))[None]
        everything: torch.Tensor = super().update_compressor_states(name, compressed)
        return everything


class IndexerHooks:
    """Make a model's indexers select from the sparse layers of a cache. Dense caches pass through untouched."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Raises InvalidInputError for a model without C4 layers."""
        self._handles = [
            module.register_forward_hook(_select, with_kwargs=True)
            for name, module in model.named_modules()
            if name.endswith(".compressor.indexer")
        ]
        if not self._handles:
            raise InvalidInputError(
                f"the model has no layer of type '{SPARSE}', so there is nothing to decode sparsely"
            )

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()


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
    """A model and the hot buffer that its requests share; for one thread. Use as a context, or `close` it.

    `store` has one layer for each C4 layer of the model. Everything else of a request's cache lives where `codec` puts it.
    """

    def __init__(self, model: Any, codec: CacheCodec, store: SparseCache) -> None:  # noqa: ANN401 - transformers is untyped
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
        entries = codec.row_codec(component.kind)
        self._rows = {layer: HotRows(store, layer, entries) for layer in component.layers}
        self._hooks = IndexerHooks(model)

    def admit(
        self, request_slot: int, placements: Sequence[Placement], *, tokens: int, shared_tokens: int = 0
    ) -> SparseRequest:
        """Take over a request of `tokens` tokens whose C4 rows are in the host pages of `placements`, the rest in others.

        `shared_tokens`: the pages of so many, from its start, others read as well; nothing is written there.
        """
        config = self._model.config
        into = _cache_with(config, lambda layer: SparseLayer(config, self._rows[layer]))
        cache = unpack(self._codec, placements, tokens=tokens, into=into, elsewhere=_ON_HOST)
        shared_pages = shared_tokens // self._codec.geometry.tokens_per_page
        rows = tokens // self._tokens_per_row
        self.store.admit(request_slot, _host_page_ids(placements[0].tables), rows, shared_pages=shared_pages)
        return SparseRequest(request_slot, cache, tokens)

    def extend(self, request: SparseRequest, tables: Tables) -> None:
        """Say that a request has more host pages than before; the former ones come first."""
        self.store.extend(request.request_slot, _host_page_ids(tables))

    def step(self, request: SparseRequest, *, token: int) -> torch.Tensor:
        """Feed one token; return the fp32 logits [vocabulary] of the next.

        Raises InvalidInputError when the request has no host page for the one that this token completes; then nothing has
        changed. After any other error the request is to be released.
        """
        rows = (request.tokens + 1) // self._tokens_per_row
        self.store.begin_step([(request.request_slot, rows)])
        try:
            return decode_step(self._model, request.cache, token=token)
        finally:
            self.store.end_step()
            request.tokens += 1

    def release(self, request: SparseRequest) -> ReleasedRequest:
        """Let another request have the slot; give its host pages back once the result is reached."""
        return self.store.release(request.request_slot)

    def append(self, request: SparseRequest, *, placement: Placement, from_token: int) -> None:
        """Bring the growing pages on the device up to date, as `deepseek_v4.append`; C4 rows go to the host pool by themselves."""
        append(self._codec, request.cache, placement=placement, from_token=from_token, elsewhere=_ON_HOST)

    def close(self) -> None:
        """Leave the model as it was; the hot buffer is its owner's to close."""
        self._hooks.remove()


class HotRows:
    """The C4 rows of one layer of the request whose turn it is, as entries: encodes what is appended, decodes what is fetched."""

    def __init__(self, store: SparseCache, layer: int, codec: RowCodec) -> None:
        self._store = store
        self._layer = layer
        self._codec = codec
        self._selected = torch.full((1, store.settings.top_k), _NO_ROW, dtype=torch.int32, device=store.device)
        self._found = torch.empty_like(self._selected)

    def append(self, entries: torch.Tensor) -> None:
        """Take the entry that this step completed: [1, width]."""
        self._store.append(self._layer, self._codec.encode(entries))

    def fetch(self, top_k: torch.Tensor) -> torch.Tensor:
        """Return the entries of rows `top_k`, integers [k]: [k, width]; zeros for -1."""
        count = len(top_k)
        self._selected[0, :count] = top_k
        self._selected[0, count:] = _NO_ROW
        found = self._store.swap_in(self._layer, self._selected, self._found)
        return self._codec.decode(self._store.rows(self._layer, found[0, :count]))


def _cache_with(config: Any, sparse_layer: Callable[[int], DeepseekV4CSACache]) -> DynamicCache:  # noqa: ANN401
    cache = DynamicCache(config=config)
    for layer, kind in enumerate(config.layer_types):
        if kind == SPARSE:
            cache.layers[layer] = sparse_layer(layer)
    return cache


def _host_page_ids(tables: Tables) -> PageIdArray:
    table = tables.get(IndexSpace.HOST)
    if table is None:
        raise InvalidInputError("the request has no pages in the host pool; sparse decode needs c4_kv there")
    return table.require(IndexSpace.HOST)


def _select(_: torch.nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], top_k: torch.Tensor) -> Any:  # noqa: ANN401
    """The hook: the indexer's arguments end with the cache and the layer's number. None leaves the result as it is."""
    cache = named.get(CACHE_ARGUMENT, arguments[3] if len(arguments) > 3 else None)
    layer = named.get("layer_idx", arguments[4] if len(arguments) > 4 else None)
    held = cache.layers[layer] if cache is not None else None
    return held.select(top_k) if isinstance(held, SparseLayer) else None

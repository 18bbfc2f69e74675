"""Hugging Face's DeepSeek-V4 cache as rows of components, and back.

The cache of one request of L tokens, and the component of each part:

- `keys`: the last `sliding_window - 1` keys, `swa_kv`. The component's window is one row longer. The model never reads that oldest
  row again; it is written as zeros.
- `compressed_kv`: one entry for each `compress_rate` complete tokens: `c4_kv`, `c4_indexer`, `c128_kv`.
- `buffer_kv` and `buffer_gate`: the L % rate tokens that wait for their block, and in sparse layers `overlap_kv` and
  `overlap_gate`: the Ca half of the last complete block. Both are rows of the states: [kv | gate] in heavy layers,
  [kv Ca | kv Cb | gate Ca | gate Cb] in sparse ones. The model keeps no Cb half of an overlap row: it is zeros. An
  overlap row's gate includes the position bias already, a buffered row's does not; each goes back to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import DeepseekV4Config, DynamicCache

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry, RowInterval
from kvbridge.core.ids import Tables
from kvbridge.core.plan.operations import Section
from kvbridge.engine.encodings import RowCodec, row_codec
from kvbridge.engine.views import PoolViews, section_rows

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"

_ENTRIES = {
    ComponentKind.C4_KV: "compressor",
    ComponentKind.C4_INDEXER: "indexer",
    ComponentKind.C128_KV: "compressor",
}
"""The cache's own name for each component that grows."""
_STATE_OF = {
    ComponentKind.C4_KV: ComponentKind.C4_STATE,
    ComponentKind.C4_INDEXER: ComponentKind.C4_INDEXER_STATE,
    ComponentKind.C128_KV: ComponentKind.C128_STATE,
}
_STATES = {_STATE_OF[kind]: name for kind, name in _ENTRIES.items()}
_KINDS = {
    SLIDING: (ComponentKind.SWA_KV,),
    SPARSE: (
        ComponentKind.SWA_KV,
        ComponentKind.C4_KV,
        ComponentKind.C4_INDEXER,
        ComponentKind.C4_STATE,
        ComponentKind.C4_INDEXER_STATE,
    ),
    HEAVY: (ComponentKind.SWA_KV, ComponentKind.C128_KV, ComponentKind.C128_STATE),
}
_RATES = ((ComponentKind.C4_KV, SPARSE), (ComponentKind.C128_KV, HEAVY))

CPU = torch.device("cpu")
NO_CHECKPOINTS: Mapping[int, Tables] = MappingProxyType({})

CacheLayer = Any
"""DeepseekV4CSACache, DeepseekV4HCACache or DynamicSlidingWindowLayer: which one follows from the layer's type."""

ReadRows = Callable[[Component, int, int, int], torch.Tensor]
"""(component, layer, start row, stop row) -> uint8 [stop - start, row_bytes]."""


class CacheCodec:
    """Turns a model's cache into rows and back. One for a model; keeps nothing of a request.

    Native rows keep every bit, with one exception: a bf16 model whose position bias is fp32 has fp32 overlap gates, which only
    fp32 states (those of fp8_v4) keep whole.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        config: DeepseekV4Config,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> None:
        """The model computes in `dtype` on `device`; caches that are made here live there.

        Raises InvalidInputError when geometry and model do not fit.
        """
        self.geometry = geometry
        self.dtype = dtype
        self.device = device
        self._config = config
        self.kinds = [_KINDS[kind] for kind in config.layer_types or ()]
        """The components of each layer."""
        _check_fit(geometry, config, self.kinds)
        self._codecs = {component.kind: self._codec(component) for component in geometry.components}

    def encode(self, cache: DynamicCache, component: Component, layer: int, *, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of one layer, uint8 [stop - start, row_bytes]."""
        held: CacheLayer = cache.layers[layer]
        name = _ENTRIES.get(component.kind)
        if component.kind is ComponentKind.SWA_KV:
            values = _window_values(held, start, stop)
        elif name is not None:
            values = held.compressed_kv[name][0, start:stop]
        else:
            values = _state_values(held, component, start, stop)
        if len(values) != stop - start:
            raise ConflictError(
                f"{component.kind} layer {layer}: a cache of {held.cumulative_length} tokens does not hold all of rows "
                f"[{start}, {stop})"
            )
        return self._codecs[component.kind].encode(values)

    def decode(self, tokens: int, read: ReadRows, *, into: DynamicCache | None = None) -> DynamicCache:
        """Return a cache of `tokens` tokens made of the rows that `read` returns; its tensors are its own.

        `into` is an empty cache to fill; left out, a new one of the model's own layers.
        """
        if tokens < 1:
            raise InvalidInputError(f"a cache of {tokens} tokens has nothing to continue from")
        cache = DynamicCache(config=self._config) if into is None else into
        held: CacheLayer
        for layer, held in enumerate(cache.layers):
            start = max(0, tokens - self._config.sliding_window + 1)
            keys = self._values(ComponentKind.SWA_KV, layer, read, start=start, stop=tokens)[None, None]
            held.lazy_initialization(keys, keys)
            held.keys = held.values = keys  # one tensor in this model
            held.cumulative_length = tokens
            for kind in self.kinds[layer]:
                if kind in _ENTRIES:
                    self._decode_entries(held, kind, layer, tokens=tokens, read=read)
        return cache

    def row_codec(self, kind: ComponentKind) -> RowCodec:
        """Return what turns rows of one component into numbers and back."""
        return self._codecs[kind]

    def _codec(self, component: Component) -> RowCodec:
        config = self._config
        dim = config.index_head_dim if "indexer" in component.kind else config.head_dim
        if component.kind in _STATES:
            # What is stored in fp32 stays so until it is back in its place: an overlap gate of a bf16 model is fp32.
            dtype = torch.float32 if component.encoding is Encoding.FP32 else self.dtype
            return row_codec(component, width=2 * dim * (component.overlap + 1), dtype=dtype)
        return row_codec(component, width=dim, dtype=self.dtype, rope=config.qk_rope_head_dim)

    def _values(self, kind: ComponentKind, layer: int, read: ReadRows, *, start: int, stop: int) -> torch.Tensor:
        return self._codecs[kind].decode(read(self.geometry.component(kind), layer, start, stop)).to(self.device)

    def _decode_entries(
        self, held: CacheLayer, kind: ComponentKind, layer: int, *, tokens: int, read: ReadRows
    ) -> None:
        """Set the entries of one kind, and what waits to become the next one."""
        name = _ENTRIES[kind]
        held.entry_count[name] = tokens // self.geometry.component(kind).tokens_per_row
        if kind not in elsewhere(held):
            held.compressed_kv[name] = self._values(kind, layer, read, start=0, stop=held.entry_count[name])[None]
        state = self.geometry.component(_STATE_OF[kind])
        live = state.live_rows(tokens)
        rows = self._values(state.kind, layer, read, start=live.start, stop=live.stop)
        overlap_rows = tokens // state.block * state.block - live.start
        kv, gate = rows.chunk(2, dim=1)
        held.buffer_kv[name] = kv[overlap_rows:].to(self.dtype).clone()[None]
        held.buffer_gate[name] = gate[overlap_rows:].to(self.dtype).clone()[None]
        if overlap_rows:
            ca = kv.shape[1] // 2
            held.overlap_kv[name] = kv[:overlap_rows, :ca].to(self.dtype).clone()[None]
            held.overlap_gate[name] = gate[:overlap_rows, :ca].clone()[None]


@dataclass(frozen=True, slots=True)
class Placement:
    """One request's pages: the pools of every rank here, and the request's tables."""

    views: Collection[PoolViews]
    tables: Tables

    def read(self, component: Component, layer: int, start: int, stop: int) -> torch.Tensor:
        """Return rows of the first rank that holds them. Raises InvalidInputError when no rank does."""
        for views in self.views:
            if layer in views.layers(component.kind):
                return views.read_rows(component.kind, layer, tables=self.tables, start_row=start, stop_row=stop)
        raise InvalidInputError(f"no rank here holds {component.kind} layer {layer}; pass the views of every stage")

    def write(self, codec: CacheCodec, cache: DynamicCache, component: Component, rows: RowInterval) -> None:
        """Write rows of one component into the pages of every layer that is here, unless the cache has them elsewhere."""
        for views in self.views if rows.stop > rows.start else ():
            for layer in views.layers(component.kind):
                if component.kind not in elsewhere(cache.layers[layer]):
                    encoded = codec.encode(cache, component, layer, start=rows.start, stop=rows.stop)
                    views.write_rows(component.kind, layer, tables=self.tables, start_row=rows.start, rows=encoded)


def append(codec: CacheCodec, cache: DynamicCache, placement: Placement, *, from_token: int) -> None:
    """Write the entries that were completed after `from_token` tokens into the growing pages; the tables must cover them.

    Decode so completes the pages of an answer that others may share. The cache holds the tokens that were *fed*, one less than were
    produced. Decode shares no windows and states: they are not written.
    """
    for component in codec.geometry.components:
        if component.liveness is Liveness.GROWING:
            placement.write(codec, cache, component, component.live_rows(cache.get_seq_length(), from_token))


def unpack(codec: CacheCodec, placement: Placement, *, tokens: int, into: DynamicCache | None = None) -> DynamicCache:
    """Return a fresh cache of `tokens` tokens from pages; decoding continues from it, and no part of it refers to page memory.

    A prefill continues from a prefix in the same way, with tables whose windows are a checkpoint of exactly `tokens` tokens.
    `into` is as in `CacheCodec.decode`. Raises InvalidInputError when no rank holds a layer.
    """
    return codec.decode(tokens, placement.read, into=into)


def reencoded(codec: CacheCodec, cache: DynamicCache, *, into: DynamicCache | None = None) -> DynamicCache:
    """Return what decode would see of `cache`: the same cache after encoding and decoding, without pages."""

    def read(component: Component, layer: int, start: int, stop: int) -> torch.Tensor:
        return codec.encode(cache, component, layer, start=start, stop=stop)

    return codec.decode(cache.get_seq_length(), read, into=into)


def replace_entries(codec: CacheCodec, cache: DynamicCache, by: DynamicCache, *, tokens: int) -> None:
    """Take the entries of the first `tokens` tokens from another cache; windows and states stay.

    A decode node that kept rows of an answer does the same. It computed them one token at a time, prefill computes by chunks.
    """
    for layer, kinds in enumerate(codec.kinds):
        held: CacheLayer = cache.layers[layer]
        other: CacheLayer = by.layers[layer]
        for kind in kinds:
            if kind in _ENTRIES:
                rows, name = tokens // codec.geometry.component(kind).tokens_per_row, _ENTRIES[kind]
                entries = [other.compressed_kv[name][:, :rows], held.compressed_kv[name][:, rows:]]
                held.compressed_kv[name] = torch.cat(entries, dim=1)


class PrefillPacker:
    """Writes a request's pages as its prompt is computed, chunk by chunk.

    Call `advance` after each chunk: it writes the rows that became final. The last chunk brings the windows and states.
    """

    def __init__(
        self,
        codec: CacheCodec,
        placement: Placement,
        *,
        prompt_tokens: int,
        computed_tokens: int = 0,
        checkpoints: Mapping[int, Tables] = NO_CHECKPOINTS,
    ) -> None:
        """The cache starts at `computed_tokens`, a page's end; the pages before it are shared and not written.

        `checkpoints`: the tables for windows and states, by the tokens at which they are wanted. Each is written when the cache
        holds exactly so many tokens after a chunk. Raises InvalidInputError for a start that is no page's end.
        """
        page = codec.geometry.tokens_per_page
        if computed_tokens % page:
            raise InvalidInputError(
                f"a prefix of {computed_tokens} tokens ends inside a page of {page}; its pages are shared"
            )
        self._codec = codec
        self._placement = placement
        self._prompt_tokens = prompt_tokens
        self._packed_tokens = computed_tokens
        self._wanted = checkpoints
        self.checkpointed: list[int] = []
        """The checkpoints that were written."""

    def advance(self, cache: DynamicCache) -> None:
        """Write what the cache has beyond the last call. Raises ConflictError when it went backwards or too far."""
        tokens = cache.get_seq_length()
        if not self._packed_tokens <= tokens <= self._prompt_tokens:
            raise ConflictError(
                f"the cache holds {tokens} tokens; {self._packed_tokens} of {self._prompt_tokens} are packed"
            )
        section = Section(prompt_tokens=self._prompt_tokens, start_token=self._packed_tokens, stop_token=tokens)
        for component in self._codec.geometry.components:
            self._placement.write(self._codec, cache, component, section_rows(component, section))
        self._packed_tokens = tokens
        if tokens in self._wanted:
            checkpoint = Placement(self._placement.views, self._wanted[tokens])
            for component in self._codec.geometry.components:
                if component.liveness is not Liveness.GROWING:
                    checkpoint.write(self._codec, cache, component, component.live_rows(tokens))
            self.checkpointed.append(tokens)


def elsewhere(held: CacheLayer) -> Collection[ComponentKind]:
    """Return the components whose entries a layer of a cache does not hold itself."""
    kinds: Collection[ComponentKind] = getattr(held, "entries_elsewhere", ())
    return kinds


def _window_values(held: CacheLayer, start: int, stop: int) -> torch.Tensor:
    keys: torch.Tensor = held.keys[0, 0]
    oldest = held.cumulative_length - len(keys)
    kept = keys[max(0, start - oldest) : max(0, stop - oldest)]
    if start == oldest - 1 and stop > start:
        # The component's window is one longer than the cache's: see the module's docstring.
        return torch.cat([keys.new_zeros((1, keys.shape[1])), kept])
    return kept


def _state_values(held: CacheLayer, component: Component, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of the overlap rows and the buffered rows after them."""
    name = _STATES[component.kind]
    kv, gate = held.buffer_kv[name][0], held.buffer_gate[name][0]
    first = held.cumulative_length - len(kv)
    if component.overlap and held.overlap_kv[name] is not None:
        overlap_kv, overlap_gate = held.overlap_kv[name][0], held.overlap_gate[name][0]
        kv = torch.cat([torch.nn.functional.pad(overlap_kv, (0, overlap_kv.shape[1])), kv])
        gate = torch.cat([torch.nn.functional.pad(overlap_gate, (0, overlap_gate.shape[1])), gate])
        first -= len(overlap_kv)
    wide = torch.promote_types(kv.dtype, gate.dtype)
    return torch.cat([kv.to(wide), gate.to(wide)], dim=1)[start - first : stop - first]


def _check_fit(geometry: ModelGeometry, config: DeepseekV4Config, kinds: list[tuple[ComponentKind, ...]]) -> None:
    wanted = {kind: [layer for layer, held in enumerate(kinds) if kind in held] for kind in ComponentKind}
    expected = {kind: layers for kind, layers in wanted.items() if layers}
    found = {component.kind: list(component.layers) for component in geometry.components}
    if found != expected:
        raise InvalidInputError(
            f"geometry '{geometry.name}' has components {found}, the model's layer_types need {expected}"
        )
    window = geometry.component(ComponentKind.SWA_KV).window
    if window != config.sliding_window or window < 2:
        raise InvalidInputError(
            f"geometry '{geometry.name}' has a window of {window}, the model's sliding_window is "
            f"{config.sliding_window} (at least 2)"
        )
    for kind, rate in _RATES:
        if kind in found and geometry.component(kind).tokens_per_row != (config.compress_rates or {})[rate]:
            raise InvalidInputError(
                f"{kind}: the geometry compresses {geometry.component(kind).tokens_per_row} tokens into a row, the "
                f"model {config.compress_rates}"
            )

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

SWA, C4, INDEXER, C128 = ComponentKind.SWA_KV, ComponentKind.C4_KV, ComponentKind.C4_INDEXER, ComponentKind.C128_KV
_ENTRIES = {C4: "compressor", INDEXER: "indexer", C128: "compressor"}
"""The cache's own name for each component that grows."""
_STATE_OF = {C4: ComponentKind.C4_STATE, INDEXER: ComponentKind.C4_INDEXER_STATE, C128: ComponentKind.C128_STATE}
_STATES = {_STATE_OF[kind]: name for kind, name in _ENTRIES.items()}
SPARSE = "compressed_sparse_attention"
_GROWING = {"sliding_attention": (), SPARSE: (C4, INDEXER), "heavily_compressed_attention": (C128,)}
"""The components with entries of each type of layer; all have windows as well, and the state of each of these."""

NO_CHECKPOINTS: Mapping[int, Tables] = MappingProxyType({})

CacheLayer = Any
"""DeepseekV4CSACache, DeepseekV4HCACache or DynamicSlidingWindowLayer, by the layer's type."""

ReadRows = Callable[[Component, int, int, int], torch.Tensor]
"""(component, layer, start row, stop row) -> uint8 [stop - start, row_bytes]."""


class CacheCodec:
    """Turns a model's cache into rows and back. One for a model; keeps nothing of a request.

    Native rows keep every bit, with one exception: a bf16 model whose position bias is fp32 has fp32 overlap gates, which only
    fp32 states (those of fp8_v4) keep whole.
    """

    def __init__(self, geometry: ModelGeometry, model: Any) -> None:  # noqa: ANN401 - transformers is untyped
        """Caches that are made here live on the model's device. Raises InvalidInputError when geometry and model do not fit."""
        self.geometry = geometry
        self.device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._config: DeepseekV4Config = model.config
        _check_fit(geometry, self._config)
        self._codecs = {component.kind: self._codec(component) for component in geometry.components}

    def encode(self, cache: DynamicCache, component: Component, layer: int, *, start: int, stop: int) -> torch.Tensor:
        """Return rows [start, stop) of one layer, uint8 [stop - start, row_bytes]."""
        held: CacheLayer = cache.layers[layer]
        if component.kind is SWA:
            values = _window_values(held, start, stop)
        elif component.kind in _ENTRIES:
            values = held.compressed_kv[_ENTRIES[component.kind]][0, start:stop]
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

        A prefill continues from a prefix in the same way as decode from a prompt, with tables whose windows are a checkpoint of
        exactly `tokens` tokens. `into` is an empty cache to fill; without it, a new one of the model's own layers.
        """
        if tokens < 1:
            raise InvalidInputError(f"a cache of {tokens} tokens has nothing to continue from")
        cache = DynamicCache(config=self._config) if into is None else into
        for layer, kind in enumerate(self._config.layer_types or ()):
            held: CacheLayer = cache.layers[layer]
            start = max(0, tokens - self._config.sliding_window + 1)
            keys = self._values(SWA, layer, read, start, tokens)[None, None]
            held.lazy_initialization(keys, keys)
            held.keys = held.values = keys  # one tensor in this model
            held.cumulative_length = tokens
            for growing in _GROWING[kind]:
                self._decode_entries(held, growing, layer, tokens, read)
        return cache

    def row_codec(self, kind: ComponentKind) -> RowCodec:
        """Return the codec of one component's rows."""
        return self._codecs[kind]

    def _codec(self, component: Component) -> RowCodec:
        config = self._config
        dim = config.index_head_dim if "indexer" in component.kind else config.head_dim
        if component.kind in _STATES:
            # Rows that are stored in fp32 stay so until they are back in place: an overlap gate of a bf16 model is fp32.
            dtype = torch.float32 if component.encoding is Encoding.FP32 else self._dtype
            return row_codec(component, width=2 * dim * (component.overlap + 1), dtype=dtype)
        return row_codec(component, width=dim, dtype=self._dtype, rope=config.qk_rope_head_dim)

    def _values(self, kind: ComponentKind, layer: int, read: ReadRows, start: int, stop: int) -> torch.Tensor:
        return self._codecs[kind].decode(read(self.geometry.component(kind), layer, start, stop)).to(self.device)

    def _decode_entries(self, held: CacheLayer, kind: ComponentKind, layer: int, tokens: int, read: ReadRows) -> None:
        """Set the entries of one kind, and the state that waits to become the next one."""
        name = _ENTRIES[kind]
        held.entry_count[name] = tokens // self.geometry.component(kind).tokens_per_row
        if kind not in getattr(held, "entries_elsewhere", ()):  # sparse decode has them in host pages
            held.compressed_kv[name] = self._values(kind, layer, read, 0, held.entry_count[name])[None]
        state = self.geometry.component(_STATE_OF[kind])
        live = state.live_rows(tokens)
        overlap_rows = tokens // state.block * state.block - live.start
        kv, gate = self._values(state.kind, layer, read, live.start, live.stop).chunk(2, dim=1)
        held.buffer_kv[name] = kv[overlap_rows:].to(self._dtype).clone()[None]
        held.buffer_gate[name] = gate[overlap_rows:].to(self._dtype).clone()[None]
        if overlap_rows:
            ca = kv.shape[1] // 2
            held.overlap_kv[name] = kv[:overlap_rows, :ca].to(self._dtype).clone()[None]
            held.overlap_gate[name] = gate[:overlap_rows, :ca].clone()[None]


def reencoded(codec: CacheCodec, cache: DynamicCache, *, into: DynamicCache | None = None) -> DynamicCache:
    """Return `cache` as decode would see it: the same cache after encoding and decoding, without pages."""

    def read(component: Component, layer: int, start: int, stop: int) -> torch.Tensor:
        return codec.encode(cache, component, layer, start=start, stop=stop)

    return codec.decode(cache.get_seq_length(), read, into=into)


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
        """Write rows of one component into the pages of every layer that is here."""
        for views in self.views if rows.stop > rows.start else ():
            for layer in views.layers(component.kind):
                encoded = codec.encode(cache, component, layer, start=rows.start, stop=rows.stop)
                views.write_rows(component.kind, layer, tables=self.tables, start_row=rows.start, rows=encoded)


class PrefillPacker:
    """Writes a request's pages as its prompt is computed, chunk by chunk. The last chunk brings the windows and states."""

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
        self._codec, self._placement, self._prompt_tokens = codec, placement, prompt_tokens
        self._packed_tokens, self._wanted = computed_tokens, checkpoints
        self.checkpointed: list[int] = []
        """The checkpoints that were written."""

    def advance(self, cache: DynamicCache) -> None:
        """Write the rows that are new since the last call. Raises ConflictError when the cache went backwards or too far."""
        tokens, prompt_tokens, start = cache.get_seq_length(), self._prompt_tokens, self._packed_tokens
        if not start <= tokens <= prompt_tokens:
            raise ConflictError(f"the cache holds {tokens} tokens; {start} of {prompt_tokens} are packed")
        section = Section(prompt_tokens=prompt_tokens, start_token=start, stop_token=tokens)
        wanted = self._wanted.get(tokens)
        for component in self._codec.geometry.components:
            self._placement.write(self._codec, cache, component, section_rows(component, section))
            if wanted is not None and component.liveness is not Liveness.GROWING:
                checkpoint = Placement(self._placement.views, wanted)
                checkpoint.write(self._codec, cache, component, component.live_rows(tokens))
        self._packed_tokens = tokens
        if wanted is not None:
            self.checkpointed.append(tokens)


def _window_values(held: CacheLayer, start: int, stop: int) -> torch.Tensor:
    keys: torch.Tensor = held.keys[0, 0]
    oldest = held.cumulative_length - len(keys)
    kept = keys[max(0, start - oldest) : max(0, stop - oldest)]
    if start == oldest - 1 and stop > start:  # the component's window is one row longer than the cache's
        return torch.cat([keys.new_zeros((1, keys.shape[1])), kept])
    return kept


def _state_values(held: CacheLayer, component: Component, start: int, stop: int) -> torch.Tensor:
    """Return rows [start, stop) of the overlap rows and the buffered rows behind them."""
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


def _check_fit(geometry: ModelGeometry, config: DeepseekV4Config) -> None:
    expected: dict[ComponentKind, list[int]] = {}
    for layer, layer_type in enumerate(config.layer_types or ()):
        growing = _GROWING[layer_type]
        for kind in (SWA, *growing, *(_STATE_OF[each] for each in growing)):
            expected.setdefault(kind, []).append(layer)
    found = {component.kind: list(component.layers) for component in geometry.components}
    if found != expected:
        raise InvalidInputError(
            f"geometry '{geometry.name}' has components {found}, the model's layer_types need {expected}"
        )
    window = geometry.component(SWA).window
    if window != config.sliding_window or window < 2:
        raise InvalidInputError(
            f"geometry '{geometry.name}' has a window of {window}, the model's sliding_window is "
            f"{config.sliding_window} (at least 2)"
        )
    for component in geometry.components:
        rates = [rate for rate, kinds in _GROWING.items() if component.kind in kinds]
        if rates and component.tokens_per_row != (config.compress_rates or {})[rates[0]]:
            raise InvalidInputError(
                f"{component.kind}: the geometry compresses {component.tokens_per_row} tokens into a row, the model "
                f"{config.compress_rates}"
            )

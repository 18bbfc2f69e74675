"""Hugging Face's DeepSeek-V4 cache as rows of components, and back.

The cache of one request of L tokens, and the component of each part:

- `keys`: the last `sliding_window - 1` keys, `swa_kv`. The component's window is one row longer: the model never reads this oldest
  row again, and it is written as zeros.
- `compressed_kv`: one entry for each `compress_rate` complete tokens: `c4_kv`, `c4_indexer`, `c128_kv`.
- `buffer_kv` and `buffer_gate`: the L % rate tokens that wait for their block, and in sparse layers `overlap_kv` and
  `overlap_gate`: the Ca half of the last complete block. Both are rows of the states: [kv | gate] in heavy layers,
  [kv Ca | kv Cb | gate Ca | gate Cb] in sparse ones. The model keeps no Cb half of an overlap row: it is zeros. An
  overlap row's gate includes the position bias already, a buffered row's does not; each goes back to its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from transformers import DeepseekV4Config, DynamicCache

from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, ModelGeometry
from kvbridge.engine.encodings import RowCodec, row_codec
from kvbridge.engine.views import Part

SWA, C4, INDEXER, C128 = ComponentKind.SWA_KV, ComponentKind.C4_KV, ComponentKind.C4_INDEXER, ComponentKind.C128_KV
_ENTRIES = {C4: "compressor", INDEXER: "indexer", C128: "compressor"}
"""The cache's own name for each growing component."""
_STATE_OF = {C4: ComponentKind.C4_STATE, INDEXER: ComponentKind.C4_INDEXER_STATE, C128: ComponentKind.C128_STATE}
_STATES = {_STATE_OF[kind]: name for kind, name in _ENTRIES.items()}
SPARSE = "compressed_sparse_attention"
_GROWING = {"sliding_attention": (), SPARSE: (C4, INDEXER), "heavily_compressed_attention": (C128,)}
"""Components with entries in each type of layer. All layers have windows as well, and the state of each of these components."""

CacheLayer = Any
"""DeepseekV4CSACache, DeepseekV4HCACache or DynamicSlidingWindowLayer, by the layer's type."""

ReadRows = Callable[[Component, int, int, int], torch.Tensor]
"""(component, layer, start row, stop row) -> uint8 [stop - start, row_bytes]."""


class CacheCodec:
    """Turns the caches of a model into rows and back. Keeps nothing of a request.

    Native rows keep every bit, with one exception: a bf16 model whose position bias is fp32 has fp32 overlap gates, which only fp32
    states (those of fp8_v4) keep whole.
    """

    def __init__(self, geometry: ModelGeometry, model: Any) -> None:  # noqa: ANN401 - transformers is untyped
        """Caches from here are on the model's device. Raises InvalidInputError when geometry and model do not fit."""
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

    def write(self, cache: DynamicCache, parts: Iterable[Part]) -> None:
        """Write the rows of `parts` from a cache into their pages. Raises ConflictError when the cache lacks some."""
        for part in parts:
            component, rows = self.geometry.component(part.kind), part.rows
            part.write(self.encode(cache, component, part.layer, start=rows.start, stop=rows.stop))

    def decode(self, tokens: int, read: ReadRows, *, into: DynamicCache | None = None) -> DynamicCache:
        """Return a cache of `tokens` tokens made of the rows that `read` returns; its tensors are its own.

        Prefill continues from a prefix as decode does from a prompt: the windows and states are then a checkpoint of exactly
        `tokens` tokens. `into`: an empty cache to fill (default: a new one of the model's own layers).
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
            # Rows stored in fp32 stay fp32 until they are back in place: an overlap gate of a bf16 model is fp32.
            dtype = torch.float32 if component.encoding is Encoding.FP32 else self._dtype
            return row_codec(component, width=2 * dim * (component.overlap + 1), dtype=dtype)
        return row_codec(component, width=dim, dtype=self._dtype, rope=config.qk_rope_head_dim)

    def _values(self, kind: ComponentKind, layer: int, read: ReadRows, start: int, stop: int) -> torch.Tensor:
        return self._codecs[kind].decode(read(self.geometry.component(kind), layer, start, stop)).to(self.device)

    def _decode_entries(self, held: CacheLayer, kind: ComponentKind, layer: int, tokens: int, read: ReadRows) -> None:
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
    """Return `cache` as decode sees it: after encoding and decoding, without pages."""

    def read(component: Component, layer: int, start: int, stop: int) -> torch.Tensor:
        return codec.encode(cache, component, layer, start=start, stop=stop)

    return codec.decode(cache.get_seq_length(), read, into=into)


def read_parts(parts: Iterable[Part]) -> ReadRows:
    """Return a reader of the rows of `parts`, which raises InvalidInputError for rows of other layers."""
    held = {(part.kind, part.layer): part for part in parts}

    def read(component: Component, layer: int, start: int, stop: int) -> torch.Tensor:
        if start == stop:
            return torch.empty((0, component.row_bytes), dtype=torch.uint8)
        part = held.get((component.kind, layer))
        if part is None:
            raise InvalidInputError(f"no rank here holds {component.kind} layer {layer}; pass the parts of every stage")
        return replace(part, rows=slice(start, stop)).read()

    return read


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

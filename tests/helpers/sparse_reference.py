"""The model alone, in the arithmetic of sparse decode: whole caches, and attention over the selected entries only.

`kvbridge.demo.engines` says why logits are compared bit by bit and why one sum is taken in the order of sparse decode.

Why that is the dense model still. In every C4 layer of every step both sums are computed, of the same query and entries, and
must agree within what rounding explains. Say the query is q [d], the entries with weight are x_1 to x_n (in this model keys and
values are the same), c is the scale and z the sink:

    s_j = c * sum_i q_i x_ji        p_j = exp(s_j) / (exp(z) + sum_j exp(s_j))        o = sum_j p_j x_j

u is the unit roundoff (2**-24 in fp32), g(m) = m u / (1 - m u). A computed sum of m products is off by at most g(m) times the sum
of their sizes, in any order, with or without fused operations; adding zeros costs nothing. Hence, with m the largest score:

    score           D_j = g(d + 2) * c * sum_i |q_i x_ji|                                d products, the scale as it is stored
    exponential     E_j = D_j + u * (|s_j - m| + D_j + max D) + 8 u                      relative: subtract m, then exp to 4 ulp
    weight          T_j = E_j + max E + g(n + 1) + g(2)                                  relative: the sum below, the division
    result          B   = sum_j p_j |x_j| * (T_j + g(n)) / (1 - T_j - g(n))              n products; the denominator: 2nd order

Either sum is within B of the exact o, so they are within 2 B of one another. Nothing underflows: q and x_j are normalised, so no
score is larger than sqrt(d).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, eager_attention_forward

from kvbridge.core.errors import ConflictError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.engine.adapters.deepseek_v4 import SPARSE, CacheCodec

_NAME = "kvbridge_selected"
EXP_ULP = 4
"""No exponential of a library that torch uses is off by more units in the last place."""


class SelectedAttention:
    """While it is entered, a model's C4 layers attend to the selected entries only when they are fed one token.

    For one model and one thread.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._layers = {
            module: _Layer(name)
            for name, module in model.named_modules()
            if hasattr(getattr(module, "compressor", None), "indexer")
        }
        self._handles: list[Any] = []

    @property
    def share_of_rounding(self) -> float:
        """The largest difference from the dense model's attention so far, as a share of what rounding explains."""
        return max((layer.share for layer in self._layers.values()), default=0.0)

    def __enter__(self) -> Self:
        for attention, layer in self._layers.items():
            attention.selected = layer
            self._handles.append(attention.compressor.register_forward_hook(layer.on_entries))
            self._handles.append(attention.compressor.indexer.register_forward_hook(layer.on_selection))
        self._model.set_attn_implementation(_NAME)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation("eager")
        for attention in self._layers:
            del attention.selected
        for handle in self._handles:
            handle.remove()


@dataclass
class _Layer:
    """The rows that one C4 layer selected in the step that is being computed, and how well the two sums have agreed."""

    name: str
    entries: int = 0
    rows: torch.Tensor | None = None
    """int64 [k]"""
    share: float = 0.0

    def on_entries(self, _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        self.entries = output[0].shape[2]

    def on_selection(self, _: torch.nn.Module, __: Any, top_k: torch.Tensor) -> None:
        self.rows = top_k[0, 0]

    def compare(self, dense: torch.Tensor, selected: torch.Tensor, bound: torch.Tensor) -> None:
        """Take in one step: both results [heads, d], and how far each may be from the exact one. Raises ConflictError."""
        apart = (dense.double() - selected.double()).abs()
        share = float((apart / (2 * bound)).max())
        if not share <= 1:
            raise ConflictError(
                f"{self.name}: attention to the selected ones of {self.entries} entries is up to {float(apart.max()):.3g} from the "
                f"dense model's, {share:.3g} times what rounding explains; this release of transformers attends to something else"
            )
        self.share = max(self.share, share)


def rounding_bound(query: torch.Tensor, entries: torch.Tensor, scaling: float, sinks: torch.Tensor) -> torch.Tensor:
    """Return B of the module's docstring for query [heads, d], entries [n, d] and sinks [heads]: fp64 [heads, d].

    u is that of the query's dtype.
    """
    u = torch.finfo(query.dtype).eps / 2

    def g(roundings: int) -> float:
        return roundings * u / (1 - roundings * u)

    q, x, sink = query.double(), entries.double(), sinks.double()[:, None]
    count, width = x.shape
    score = scaling * q @ x.T
    highest = torch.maximum(score.amax(dim=1, keepdim=True), sink)
    in_score = g(width + 2) * scaling * q.abs() @ x.abs().T
    largest = in_score.amax(dim=1, keepdim=True)
    in_exponential = in_score + u * ((score - highest).abs() + in_score + largest) + 2 * EXP_ULP * u
    in_weight = in_exponential + in_exponential.amax(dim=1, keepdim=True) + g(count + 1) + g(2)
    relative = in_weight + g(count)
    weight = torch.softmax(torch.cat([score, sink], dim=1), dim=1)[:, :-1]
    return (weight * relative / (1 - relative)) @ x.abs()


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **more: Any,
) -> Any:
    """As transformers calls it: query [1, heads, tokens, d], key and value [1, 1, n, d] -> [1, tokens, heads, d] and weights."""
    dense = eager_attention_forward(module, query, key, value, attention_mask, scaling, **more)
    layer: _Layer | None = getattr(module, "selected", None)
    if layer is None or layer.rows is None or query.shape[2] != 1:
        return dense
    window = key.shape[2] - layer.entries
    places = torch.cat([torch.arange(window, device=key.device), window + layer.rows])
    if not torch.equal((attention_mask[0, 0, 0] == 0).nonzero()[:, 0], places.sort().values):
        raise ConflictError(f"{layer.name}: the model attends to others than its window and what its indexer selected")
    entries = key[:, :, places]
    selected = eager_attention_forward(
        module, query, entries, value[:, :, places], attention_mask[..., places], scaling, **more
    )
    bound = rounding_bound(query[0, :, 0], entries[0, 0], scaling, module.sinks)
    layer.compare(dense[0][0, 0], selected[0][0, 0], bound)
    return selected


class ReencodingLayer(DeepseekV4CSACache):
    """A dense C4 layer whose new entries lose what they would lose as rows."""

    _layer_type = None  # with a type it would replace the library's own class

    def __init__(self, config, codec) -> None:
        super().__init__(config)
        self._codec = codec

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        if name == "compressor" and compressed.shape[1]:
            compressed = self._codec.decode(self._codec.encode(compressed[0]))[None]
        return super().update_compressor_states(name, compressed)


def reencoding_cache(config: Any, codec: CacheCodec) -> DynamicCache:
    """An empty cache of whole entries that are kept as `codec` encodes them."""
    cache = DynamicCache(config=config)
    for layer, kind in enumerate(config.layer_types):
        if kind == SPARSE:
            cache.layers[layer] = ReencodingLayer(config, codec.row_codec(ComponentKind.C4_KV))
    return cache


AttentionInterface.register(_NAME, _attend)
AttentionMaskInterface.register(_NAME, eager_mask)

"""The model alone, in the arithmetic of sparse decode: whole caches, and attention over the selected entries only.

`kvbridge.demo.engines` says why logits are compared bit by bit and why one sum is taken in the order of sparse decode. The sum is
the dense model's but for rounding: the dense model sums over all entries with a bias of -inf, so with the weight zero, for all but
its window and the entries that its indexer selected. Every step checks that its bias is open at exactly these places.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, eager_attention_forward

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.engine.adapters.deepseek_v4 import SPARSE, CacheCodec

_NAME = "kvbridge_selected"


class SelectedAttention:
    """While it is entered, a model's C4 layers attend to the selected entries only when they are fed one token."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._attentions = [part for part in model.modules() if hasattr(getattr(part, "compressor", None), "indexer")]
        self.steps = 0
        """How many sums were taken over the selected entries."""

    def __enter__(self) -> Self:
        indexers = [attention.compressor.indexer for attention in self._attentions]
        self._handles = [
            indexer.register_forward_hook(partial(_note_selection, attention))
            for attention, indexer in zip(self._attentions, indexers, strict=True)
        ]
        for attention in self._attentions:
            attention.counting = self
        self._model.set_attn_implementation(_NAME)
        return self

    def __exit__(self, *_: object) -> None:
        self._model.set_attn_implementation("eager")
        for handle in self._handles:
            handle.remove()
        for attention in self._attentions:
            vars(attention).pop("selected", None)
            del attention.counting


def _note_selection(attention: Any, _: Any, __: Any, top_k: torch.Tensor) -> None:
    vars(attention)["selected"] = top_k[0, 0]


def _attend(module, query, key, value, attention_mask, scaling, **more):
    """As transformers calls it: query [1, heads, tokens, d], key and value [1, 1, n, d] -> [1, tokens, heads, d] and weights."""
    selected = vars(module).get("selected")
    if selected is not None and query.shape[2] == 1:
        attended = (attention_mask[0, 0, 0] == 0).nonzero()[:, 0]
        window = len(attended) - len(selected)
        places = torch.cat([torch.arange(window, device=key.device), window + selected])
        assert torch.equal(attended, places.sort().values), "the model attends to others than that"
        key, value, attention_mask = key[:, :, places], value[:, :, places], attention_mask[..., places]
        module.counting.steps += 1
    return eager_attention_forward(module, query, key, value, attention_mask, scaling, **more)


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


U = torch.finfo(torch.float32).eps / 2


@contextmanager
def foreign_processor(model: torch.nn.Module, seed: int) -> Iterator[None]:
    """Within, `model` rounds otherwise; another seed is another processor."""

    def on_product(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        (given,) = inputs
        products = module.weight.shape[1]
        # A grouped product has more inputs than its weight is wide; their largest is as good a bound.
        sizes = (
            given.abs() @ module.weight.abs().T if given.shape[-1] == products and output.ndim == given.ndim else None
        )
        if sizes is None or sizes.shape != output.shape:
            sizes = products * given.abs().amax() * module.weight.abs().amax()
        return _moved(output, sizes * products * U, seed)

    def on_scores(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        query, keys, hidden = inputs
        sizes = (query.abs() @ keys.abs().transpose(-1, -2).unsqueeze(1)) * module.softmax_scale
        weights = module.weights_proj.weight.abs() @ hidden.abs().transpose(-1, -2) * module.weights_scaling
        terms = query.shape[-1] + query.shape[-2] + 2
        return _moved(output, (sizes * weights.transpose(-1, -2).unsqueeze(-1)).sum(dim=2) * terms * U, seed)

    handles = []
    for name, module in model.named_modules():
        if name.endswith("indexer.scorer"):
            handles.append(module.register_forward_hook(on_scores))
        elif isinstance(module, torch.nn.Linear):
            handles.append(module.register_forward_hook(on_product))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _moved(result: torch.Tensor, most: torch.Tensor, seed: int) -> torch.Tensor:
    bits = result.contiguous().view(torch.int32).to(torch.int64)
    mixed = (bits + seed) * 0x1E3779B97F4A7C15 % (1 << 61)
    return result + (mixed.double() / (1 << 60) - 1).float() * most

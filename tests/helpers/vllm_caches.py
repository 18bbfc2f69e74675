"""KV caches as vLLM registers them: one tensor for each layer, in memory in the order of an attention backend."""

from __future__ import annotations

import torch

BLOCKS, TOKENS = 7, 4


def name_of(layer: int) -> str:
    """What vLLM calls the cache of a layer."""
    return f"model.layers.{layer}.self_attn.attn"


def caches(
    layers: range, heads: int, content: int, order: str = "LBHNC", dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Tensors [blocks, heads, tokens, content] of a rank's layers, in memory in the given order; all that they hold differs."""
    sizes = {"L": len(layers), "B": BLOCKS, "H": heads, "N": TOKENS, "C": content}
    memory = torch.empty([sizes[axis] for axis in order], dtype=dtype)
    memory.view(torch.uint8).random_(0, 256)
    logical = memory.permute([order.index(axis) for axis in "LBHNC"])
    return {name_of(layer): logical[place] for place, layer in enumerate(layers)}

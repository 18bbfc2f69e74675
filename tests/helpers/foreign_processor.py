"""A model that computes as another processor might: the same operations, rounded otherwise.

Every matrix product and every score of an indexer is moved by up to the worst that any order of summation can do to it: g(m)
times the sum of the sizes of its m products. By how much and where to follows from the
result's own bits and a seed, as a processor's rounding follows from its operands: the same numbers always give the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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

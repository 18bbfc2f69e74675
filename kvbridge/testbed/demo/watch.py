"""Takes the trace of a model: checksums of what each layer holds and reads in a decode step, component by component.

Owns: watching a model. Must not know: files, what is concluded from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.engine.adapters.deepseek_v4 import HEAVY, SPARSE
from kvbridge.engine.adapters.transformers import CACHE_ARGUMENT
from kvbridge.testbed.demo.trace import Trace

_STATES = {
    SPARSE: {"compressor": ComponentKind.C4_STATE, "indexer": ComponentKind.C4_INDEXER_STATE},
    HEAVY: {"compressor": ComponentKind.C128_STATE},
}
"""By the layer's type and the cache's own name for it."""


class CacheWatch:
    """Notes a model's decode steps. For one request at a time; `close` ends it.

    Made after whatever else hooks the model's indexers: it looks at the entries that their selection then stands for.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers is untyped
        self._kinds: list[str] = model.config.layer_types
        self._handles = []
        for layer in model.model.layers:
            attention = layer.self_attn
            self._handles.append(attention.register_forward_hook(self._on_layer, with_kwargs=True))
            if self._kinds[attention.layer_idx] == SPARSE:
                self._handles.append(attention.compressor.indexer.register_forward_hook(self._on_selection))
                self._handles.append(attention.compressor.register_forward_hook(self._on_entries))
        self._selected = torch.empty(0)
        self._read = torch.empty(0)
        self._steps: list[list[int]] = []
        self._components: list[str] = []

    def take(self) -> Trace:
        """Return what was noted since the last time, and forget it."""
        steps, self._steps = self._steps, []
        return Trace(tuple(self._components), np.array(steps, np.uint32).reshape(len(steps), len(self._components)))

    def close(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _on_selection(self, _: torch.nn.Module, __: Any, top_k: torch.Tensor) -> None:  # noqa: ANN401
        self._selected = top_k[0, 0]

    def _on_entries(self, _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor | None]) -> None:  # noqa: ANN401
        self._read = output[0][0, 0, self._selected]

    def _on_layer(self, attention: Any, _: Any, kwargs: dict[str, Any], output: tuple[torch.Tensor, Any]) -> None:  # noqa: ANN401
        if output[0].shape[1] != 1:
            return
        if attention.layer_idx == 0:
            self._components = []
            self._steps.append([])
        held = kwargs[CACHE_ARGUMENT].layers[attention.layer_idx]
        for kind, tensors in self._held(held, self._kinds[attention.layer_idx]):
            self._steps[-1].append(_sum(tensors))
            self._components.append(f"{kind} of layer {attention.layer_idx}")

    def _held(self, held: Any, kind: str) -> Iterator[tuple[ComponentKind, list[torch.Tensor]]]:  # noqa: ANN401
        """Yield a layer's components as the cache has them, in the order in which they decide what comes next."""
        yield ComponentKind.SWA_KV, [held.keys]
        for name, state in _STATES.get(kind, {}).items():
            parts = [held.buffer_kv, held.buffer_gate]
            if kind == SPARSE:
                parts += [held.overlap_kv, held.overlap_gate]
            yield state, [part[name] for part in parts if part[name] is not None]
        if kind == HEAVY:
            yield ComponentKind.C128_KV, [held.compressed_kv["compressor"]]
        elif kind == SPARSE:
            yield ComponentKind.C4_INDEXER, [held.compressed_kv["indexer"]]
            yield ComponentKind.C4_KV, [self._read]


def _sum(tensors: Iterable[torch.Tensor]) -> int:
    total = 0
    for tensor in tensors:
        if tensor.numel():
            total = zlib.crc32(tensor.contiguous().cpu().view(torch.uint8).numpy().data, total)
    return total

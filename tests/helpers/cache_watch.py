"""What every layer of a model held and read in each decode step, as checksums: where two runs first differ."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.demo.messages import Logits
from kvbridge.demo.report import compare
from kvbridge.engine.adapters.deepseek_v4 import HEAVY, SPARSE
from kvbridge.engine.adapters.transformers import CACHE_ARGUMENT

_STATES = {
    SPARSE: {"compressor": ComponentKind.C4_STATE, "indexer": ComponentKind.C4_INDEXER_STATE},
    HEAVY: {"compressor": ComponentKind.C128_STATE},
}
"""By the layer's type and the cache's own name for it."""


class Difference(NamedTuple):
    """Where two traces first differ."""

    step: int
    """From 0."""
    component: str


class Trace(NamedTuple):
    """One request's decode steps."""

    components: tuple[str, ...]
    """As a person reads them ("c4_kv of layer 2"), in the order in which a step computes them."""
    sums: npt.NDArray[np.uint32]
    """[steps, components]: CRC-32 of the numbers, as the model reads them."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the steps of several, one after another."""
        return cls(parts[0].components, np.concatenate([part.sums for part in parts]))

    def first_difference(self, other: Trace) -> Difference | None:
        """Return the first step that differs and its first component; None: all are the same.

        What comes later follows from that one. Raises InvalidInputError when the two have other components or steps.
        """
        if self.components != other.components or self.sums.shape != other.sums.shape:
            raise InvalidInputError(
                f"{len(self.sums)} steps of {len(self.components)} components cannot be compared with {len(other.sums)} steps of "
                f"{len(other.components)}; one process did not see all steps"
            )
        found = np.argwhere(self.sums != other.sums)
        return Difference(int(found[0, 0]), self.components[found[0, 1]]) if len(found) else None


@dataclass(frozen=True)
class Verdict:
    """Two runs of one request: their logits, and what each step read for them."""

    positions: int
    first_difference: int | None
    """The first position with another logit, or at which a layer held or read other numbers; 0 is the prompt's."""
    component: str | None
    """What the two held or read differently there, first of all; None: nothing that the trace sees."""

    @property
    def equal(self) -> bool:
        return self.first_difference is None


def compare_traced(ours: Logits, alone: Logits, traces: tuple[Trace, Trace]) -> Verdict:
    """Position 0 is the prompt's; the steps of the traces are the positions after it."""
    found, read = compare(1, ours, alone), traces[0].first_difference(traces[1])
    positions = [at for at in (found.first_difference, None if read is None else 1 + read.step) if at is not None]
    first = min(positions, default=None)
    component = read.component if read is not None and first == 1 + read.step else None
    return Verdict(found.positions, first, component)


class CacheWatch:
    """Notes a model's decode steps. For one request at a time; `close` ends it.

    Made after whatever else hooks the model's indexers: it looks at the entries that their selection then stands for.
    """

    def __init__(self, model: Any) -> None:
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

    def _on_selection(self, _: torch.nn.Module, __: Any, top_k: torch.Tensor) -> None:
        self._selected = top_k[0, 0]

    def _on_entries(self, _: torch.nn.Module, __: Any, output: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        self._read = output[0][0, 0, self._selected]

    def _on_layer(self, attention: Any, _: Any, kwargs: dict[str, Any], output: tuple[torch.Tensor, Any]) -> None:
        if output[0].shape[1] != 1:
            return
        if attention.layer_idx == 0:
            self._components = []
            self._steps.append([])
        held = kwargs[CACHE_ARGUMENT].layers[attention.layer_idx]
        for kind, tensors in self._held(held, self._kinds[attention.layer_idx]):
            self._steps[-1].append(_sum(tensors))
            self._components.append(f"{kind} of layer {attention.layer_idx}")

    def _held(self, held: Any, kind: str) -> Iterator[tuple[ComponentKind, list[torch.Tensor]]]:
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

"""Which rows the indexers of Hugging Face's DeepSeek-V4 select, step by step.

Owns: watching a model. Must not know: pages, hot buffers, what is concluded from it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_NO_ROW = -1


class Selections(NamedTuple):
    """What one request selected in consecutive decode steps."""

    rows: npt.NDArray[np.int32]
    """[steps, C4 layers, k], ascending, -1 last where there are fewer rows than k."""
    scores: npt.NDArray[np.float32]
    """[steps, C4 layers, k + 1], falling: of the selected rows, then the best one that was not; -inf where there are fewer."""


class SelectionWatch:
    """Notes what every indexer of a model selects when one token is fed. For one request at a time; `remove` ends it."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = dict(model.named_modules())
        indexers = [name for name in modules if name.endswith(".compressor.indexer")]
        self._layers = len(indexers)
        self._top_k = max((int(getattr(modules[name], "index_topk")) for name in indexers), default=0)  # noqa: B009
        # First in the row: another hook may replace the selection by something else.
        self._handles = [modules[name].register_forward_hook(self._on_rows, prepend=True) for name in indexers]
        self._handles += [modules[f"{name}.scorer"].register_forward_hook(self._on_scores) for name in indexers]
        self._rows: list[torch.Tensor] = []
        self._scores: list[torch.Tensor] = []

    def take(self) -> Selections:
        """Return what was noted since the last time, and forget it."""
        steps = len(self._rows) // max(1, self._layers)
        rows = torch.stack(self._rows) if self._rows else torch.empty(0, dtype=torch.int32)
        scores = torch.stack(self._scores) if self._scores else torch.empty(0)
        self._rows, self._scores = [], []
        return Selections(
            rows.cpu().numpy().reshape(steps, self._layers, self._top_k),
            scores.cpu().numpy().reshape(steps, self._layers, self._top_k + 1),
        )

    def remove(self) -> None:
        """Leave the model as it was."""
        for handle in self._handles:
            handle.remove()

    def _on_rows(self, _: torch.nn.Module, __: Any, top_k: torch.Tensor) -> None:  # noqa: ANN401
        if top_k.shape[1] == 1:
            rows = torch.full((self._top_k,), _NO_ROW, dtype=torch.int32, device=top_k.device)
            selected = top_k[0, 0].to(torch.int32)
            rows[: len(selected)] = selected.sort().values
            self._rows.append(rows)

    def _on_scores(self, _: torch.nn.Module, __: Any, scores: torch.Tensor) -> None:  # noqa: ANN401
        if scores.shape[1] == 1:
            best = torch.full((self._top_k + 1,), -torch.inf, device=scores.device)
            found = scores[0, 0].topk(min(len(best), scores.shape[2])).values
            best[: len(found)] = found
            self._scores.append(best)


def joined(parts: list[Selections]) -> Selections:
    """Return the steps of several, one after another."""
    return Selections(np.concatenate([part.rows for part in parts]), np.concatenate([part.scores for part in parts]))

"""What the indexers of a batch select, step after step: at a chosen rate of missing rows, or as it was recorded.

Owns: the choice, as whole-tensor operations on the device of the step. Must not know: caches, time.

A rate: row numbers are a sequence that goes through all rows of a request in a mixed order. A step selects 512 neighbours of the
sequence, the next one begins so many further on: that many rows are new, and were last used when the sequence came by before; all
others were selected in the step before. A recording (`tests.helpers.selections`, of 64 rows a step): each row stands for 8, mixed
over the request; requests and layers begin at different steps of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.helpers.selections import load_selections

MIXER = 0x9E3779B1
"""Odd, so that multiplying by it is one to one among the powers of two that rows are counted in."""
REPEATS = 8
"""Rows for each recorded one."""


@dataclass(frozen=True)
class Batch:
    """For whom is selected."""

    layers: int
    requests: int
    rows: int
    """Of each request; a power of two."""
    top_k: int
    where: torch.device


class SelectionsAtARate:
    """`new_rows` of each selection were not in the one before."""

    warm_up_steps = 3

    def __init__(self, batch: Batch, new_rows: int) -> None:
        assert batch.rows & (batch.rows - 1) == 0
        self._batch, self._new_rows = batch, new_rows
        own = torch.arange(batch.layers * batch.requests, device=batch.where, dtype=torch.int64)
        self._starts = (own * 7919).reshape(batch.layers, batch.requests, 1)

    def step(self, number: int) -> torch.Tensor:
        """Rows, int32 [layers, requests, top_k]."""
        ordinals = torch.arange(self._batch.top_k, device=self._batch.where) + number * self._new_rows
        return mixed(self._starts + ordinals, self._batch.rows)


class RecordedSelections:
    """A recording, made as long and as wide as the batch."""

    warm_up_steps = 64

    def __init__(self, batch: Batch, prompt_tokens: int) -> None:
        found = load_selections(prompt_tokens)
        assert found.top_k.shape[2] * REPEATS == batch.top_k
        assert int(found.rows[-1]) * REPEATS <= batch.rows, "the request is shorter than the recording"
        self._batch = batch
        self._top_k = torch.from_numpy(found.top_k.astype("int64")).to(batch.where)
        own = torch.arange(batch.layers * batch.requests, device=batch.where).reshape(batch.layers, batch.requests)
        self._layers = own % self._top_k.shape[1]
        self._starts = own * 31 % len(self._top_k)
        self._repeats = torch.arange(REPEATS, device=batch.where)

    def step(self, number: int) -> torch.Tensor:
        """Rows, int32 [layers, requests, top_k]."""
        # Forwards and backwards again, so that the end is followed by what has just been selected.
        length = len(self._top_k)
        at = (self._starts + number) % (2 * length - 2)
        at = torch.where(at < length, at, 2 * length - 2 - at)
        recorded = self._top_k[at, self._layers]
        rows = recorded[..., None] * REPEATS + self._repeats
        return mixed(rows.flatten(2), self._batch.rows)


def mixed(ordinals: torch.Tensor, rows: int) -> torch.Tensor:
    """Each number below `rows`, a power of two, as another one, and each from another: int32."""
    return (ordinals * MIXER % rows).to(torch.int32).contiguous()

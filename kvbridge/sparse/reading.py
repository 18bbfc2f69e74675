"""What can be read out of a hot buffer beside its pages.

Owns: rows by their physical numbers in plain torch, and what a request's steps came to. Must not know: order, requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbridge.core.errors import ConflictError
from kvbridge.core.geometry.components import Component
from kvbridge.core.wire.engine_messages import SparseRows
from kvbridge.sparse.streams import PendingCopies


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """What became of the rows that a request's steps selected, over all layers. Ring rows are not among them."""

    hits: int
    """Rows that were in a hot slot, each step's distinct ones."""
    loaded: int
    """Rows that were loaded from the host, preloaded ones not counted."""
    preloaded: int
    """Rows that admission put into hot slots."""
    resident: int
    """Rows in hot slots now."""

    @property
    def evicted(self) -> int:
        """Rows that gave way to others."""
        return self.preloaded + self.loaded - self.resident


class ReleasedRequest:
    """A request that has ended, while copies between its hot rows and its host pages may still be under way."""

    def __init__(self, pending: PendingCopies, known: SparseRows, tallies: torch.Tensor) -> None:
        """`tallies`: int32 [layers, TALLIES] on the host, there when `pending` is reached; `known`: what the host knows itself."""
        self._pending = pending
        self._known = known
        self._tallies = tallies

    def reached(self) -> bool:
        """Whether all of them have ended, so that its host pages may be given back; never waits."""
        return self._pending.reached()

    def wait(self, timeout_s: float) -> None:
        """Wait until then. Raises DeadlineError after `timeout_s`: the pages must then not be given back."""
        self._pending.wait(timeout_s)

    def rows(self) -> SparseRows:
        """What was done for the request, for `DecodeEngine.release`. Raises ConflictError before all copies have ended."""
        if not self.reached():
            raise ConflictError("what was done for a request is known when its copies have ended: wait for that first")
        _, hits, loaded, _ = self._tallies.sum(dim=0).tolist()
        return self._known.model_copy(update={"hit": hits, "loaded": loaded})


def gather_rows(pages: torch.Tensor, component: Component, physical_rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of rows of a layer, parts together: uint8 [*physical_rows.shape, row_bytes], zeros for -1.

    `pages`: uint8 [pages, page_bytes] of the layer.
    """
    slots = component.slots_per_page
    wanted = physical_rows.clamp(min=0).long()
    page, slot = wanted // slots, wanted % slots
    parts = []
    for number, part_bytes in enumerate(component.row_parts_bytes):
        shape, strides = (pages.shape[0], slots, part_bytes), (pages.stride(0), part_bytes, 1)
        offset = pages.storage_offset() + component.part_offset(number)
        parts.append(torch.as_strided(pages, shape, strides, offset)[page, slot])
    return torch.cat(parts, dim=-1).masked_fill_((physical_rows < 0).unsqueeze(-1), 0)

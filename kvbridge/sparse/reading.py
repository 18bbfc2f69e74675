"""What can be read out of a hot buffer beside its pages.

Owns: rows by their physical numbers in plain torch, and what a request's steps came to. Must not know: order, requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvbridge.core.geometry.components import Component


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

"""Reading a hot buffer: rows by their physical numbers, what a request's steps came to, and whether the tables agree."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvbridge.core.errors import ConflictError, DeadlineError, IntegrityError
from kvbridge.core.geometry.components import Component
from kvbridge.core.geometry.hot_buffer import AGE_PLANES
from kvbridge.core.wire.engine_messages import SparseRows
from kvbridge.sparse.memory import HotMemory
from kvbridge.sparse.requests import Request, RequestBook
from kvbridge.sparse.streams import Point

POLL_S = 0.0002


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

    def __init__(self, slot: int, point: Point, known: SparseRows, tallies: torch.Tensor) -> None:
        """`tallies`: int32 [layers, TALLIES] on the host, there when `point` is reached; `known`: the figures of the host."""
        self._slot, self._point, self._known, self._tallies = slot, point, known, tallies

    def reached(self) -> bool:
        """Whether all copies have ended, so that its host pages may be given back; never waits."""
        return self._point.reached()

    def wait(self, timeout_s: float) -> None:
        """Wait until then. Raises DeadlineError after `timeout_s`: the pages must then not be given back."""
        deadline_s = time.monotonic() + timeout_s
        while not self.reached():
            if time.monotonic() > deadline_s:
                raise DeadlineError(
                    f"request slot {self._slot}: copies of its rows are still under way after {timeout_s:g} s"
                )
            time.sleep(POLL_S)

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


def check_structure(memory: HotMemory, requests: RequestBook) -> None:
    """Check every request in every layer. Raises IntegrityError naming request slot, layer position and rule."""
    slot_of_row, row_of_slot = memory.slot_of_row.cpu().numpy(), memory.row_of_slot.cpu().numpy()
    ages, tallies = memory.ages.cpu().numpy().view(np.uint32), memory.tallies.cpu().numpy()
    pages, ring_begin = memory.host_pages.cpu().numpy(), memory.ring_begin.cpu().numpy()
    for slot in requests.slots():
        request = requests.get(slot)
        who = f"request slot {slot}"
        _check_table(request, pages[slot], int(ring_begin[slot]), who)
        for layer in range(len(slot_of_row)):
            where = f"{who}, layer position {layer}"
            _check_residency(slot_of_row[layer, slot], row_of_slot[layer, slot], requests.ring_start(request), where)
            _check_ages(ages[layer, slot], tallies[layer, slot], row_of_slot[layer, slot], where)


def _check_table(request: Request, pages: npt.NDArray[np.int32], ring_begin: int, who: str) -> None:
    count = len(request.pages)
    if ring_begin != request.ring_begin:
        _fail(who, f"the ring begins at row {ring_begin} on the device, at {request.ring_begin} on the host")
    if not np.array_equal(pages[:count, 0], request.pages) or (pages[count:] != -1).any():
        _fail(who, "the page tables of device and host differ")
    if not np.array_equal(pages[np.argsort(request.pages), 1], np.arange(count)):
        _fail(who, "the ranks of its pages are not those of their ids")


def _check_residency(
    slot_of_row: npt.NDArray[np.int16], row_of_slot: npt.NDArray[np.int32], ring_start: int, where: str
) -> None:
    rows, slots = np.flatnonzero(slot_of_row >= 0), np.flatnonzero(row_of_slot >= 0)
    if len(rows) != len(slots) or not np.array_equal(row_of_slot[slot_of_row[rows]], rows):
        _fail(where, f"{len(rows)} rows say that they are resident, {len(slots)} slots hold one, or others than those")
    if len(rows) and rows[-1] >= ring_start:
        _fail(where, f"row {rows[-1]} is in a hot slot, though the ring holds rows from {ring_start} on")


def _check_ages(
    ages: npt.NDArray[np.uint32], tallies: npt.NDArray[np.int32], row_of_slot: npt.NDArray[np.int32], where: str
) -> None:
    bits = (ages[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None] & np.uint32(1)).reshape(-1, AGE_PLANES)
    if bits[row_of_slot < 0].any():
        _fail(where, "an empty slot has an age")
    if int(bits[:, 0].sum()) != int(tallies[0]):
        _fail(where, f"{bits[:, 0].sum()} slots are of the present generation, {tallies[0]} are counted")


def _fail(who: str, what: str) -> None:
    raise IntegrityError(f"hot buffer, {who}: {what}")

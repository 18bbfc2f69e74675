"""Whether the tables of a hot buffer agree with one another, on the device and on the host."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbridge.core.errors import IntegrityError
from kvbridge.core.geometry.hot_buffer import AGE_PLANES
from kvbridge.sparse import SparseCache
from kvbridge.sparse.requests import Request


def check_tables(cache: SparseCache) -> None:
    """Check every request in every layer. Waits for the device. Raises IntegrityError naming what contradicts what."""
    memory, requests = cache.memory, cache.requests
    cache._streams.synchronize()
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

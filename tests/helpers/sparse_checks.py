"""Whether the tables of a hot buffer agree with one another, on the device and on the host."""

from __future__ import annotations

import numpy as np

from kvbridge.core.geometry.hot_buffer import AGE_PLANES
from kvbridge.sparse import SparseCache


def check_tables(cache: SparseCache) -> None:
    """Check every request in every layer. Waits for the device."""
    memory = cache.memory
    cache._streams.synchronize()
    slot_of_row, row_of_slot = memory.slot_of_row.cpu().numpy(), memory.row_of_slot.cpu().numpy()
    ages, tallies = memory.ages.cpu().numpy().view(np.uint32), memory.tallies.cpu().numpy()
    pages, ring_begin = memory.host_pages.cpu().numpy(), memory.ring_begin.cpu().numpy()
    for slot in cache.requests.slots():
        request = cache.requests.get(slot)
        count = len(request.pages)
        assert ring_begin[slot] == request.ring_begin
        assert np.array_equal(pages[slot, :count, 0], request.pages)
        assert (pages[slot, count:] == -1).all()
        assert np.array_equal(pages[slot, np.argsort(request.pages), 1], np.arange(count)), "ranks of the page ids"
        for layer in range(len(slot_of_row)):
            rows = np.flatnonzero(slot_of_row[layer, slot] >= 0)
            held = row_of_slot[layer, slot]
            assert np.array_equal(held[slot_of_row[layer, slot][rows]], rows), (
                "rows that are resident are in their slots"
            )
            assert len(rows) == np.count_nonzero(held >= 0), "slots hold resident rows only"
            assert (rows < cache.requests.ring_start(request)).all(), "rows in the ring are in no hot slot"
            planes = ages[layer, slot][:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None] & np.uint32(1)
            bits = planes.reshape(-1, AGE_PLANES)
            assert not bits[held < 0].any(), "an empty slot has no age"
            assert bits[:, 0].sum() == tallies[layer, slot, 0], "slots of the present generation are counted"

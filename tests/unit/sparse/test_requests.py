"""The host's account of request slots: which places, which pages to the host, which waits."""

import numpy as np
import pytest

from kvbridge.kernels.swap_in import SwapInShape
from kvbridge.sparse.requests import RequestBook


def book(ring_pages=2):
    return RequestBook(SwapInShape(hot_rows=128, ring_rows=64 * ring_pages, max_rows=1024, top_k=64), max_requests=4)


def pages(count):
    return np.arange(100, 100 + count, dtype=np.int32)


@pytest.mark.parametrize("ring_pages", [2, 3, 5])
@pytest.mark.parametrize("start", [0, 1, 30, 64, 100, 192])
def test_a_ring_page_is_written_again_only_after_its_backup(start, ring_pages):
    """Every page that decode completed is waited for, in the very step that writes the first row over it, and no other."""
    requests = book(ring_pages)
    requests.admit(0, pages(16), start)
    completed, waited = [], []
    for rows in range(start + 1, 900):
        plan = requests.begin_step([(0, rows)])
        requests.end_step()
        row = rows - 1
        assert plan.places.tolist() == [128 + row % (64 * ring_pages)]
        completed += [place.page for place in plan.completed]
        assert [place.page for place in plan.completed] == ([row // 64] if row % 64 == 63 else [])
        for place in plan.overwritten:
            assert place.page in completed
            assert place.hot_page == requests.hot_page(0, row // 64)
            assert row % 64 == 0
            waited.append(place.page)
    assert waited == completed[: len(waited)]
    assert waited == list(range(start // 64, 899 // 64 - ring_pages + 1))


def test_requests_without_a_new_row_have_no_place():
    requests = book()
    requests.admit(2, pages(4), 10)
    requests.admit(0, pages(4), 63)
    plan = requests.begin_step([(2, 10), (0, 64)])
    assert plan.places.tolist() == [-1, 128 + 63]
    assert [(place.slot, place.page, place.hot_page, place.host_page) for place in plan.completed] == [(0, 0, 2, 100)]
    assert [requests.get(slot).rows for slot in (2, 0)] == [10, 64]


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 127, 128, 129, 255])
def test_nothing_is_ever_written_to_a_page_that_others_read(rows):
    """Over steps and a longer page table: what goes to the host lies behind everything that was whole at admission."""
    requests = book()
    shared = rows // 64
    requests.admit(0, pages(max(1, -(-rows // 64))), rows, shared_pages=shared)
    written = []
    for after in range(rows + 1, 600):
        requests.extend(0, pages(after // 64 + 1))
        written += [place.page for place in requests.begin_step([(0, after)]).completed]
        requests.end_step()
    assert sorted(set(written)) == list(range(shared, 10))[: len(set(written))]
    assert len(written) >= 8 - shared

"""Rows to pages, slots to bytes, page ids to runs."""

import numpy as np
import pytest

from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.geometry.components import RowInterval
from kvbridge.core.plan.runs import PartialPage, byte_intervals, find_runs, split_rows
from tests.helpers.geometries import flash, gqa


def split(kind: Kind, start: int, stop: int):
    return split_rows(flash().component(kind), RowInterval(start=start, stop=stop))


@pytest.mark.parametrize(
    ("start", "stop", "full", "partial"),
    [
        (0, 64, range(1), []),
        (0, 63, range(0), [(0, ((0, 63),))]),
        (10, 20, range(0), [(0, ((10, 20),))]),
        (63, 65, range(0), [(0, ((63, 64),)), (1, ((0, 1),))]),
        (1, 192, range(1, 3), [(0, ((1, 64),))]),
        (64, 130, range(1, 2), [(2, ((0, 2),))]),
        (128, 192, range(2, 3), []),
    ],
)
def test_growing_rows(start, stop, full, partial):
    found = split(Kind.C4_KV, start, stop)
    assert list(found.full) == list(full)
    assert found.partial == tuple(PartialPage(*page) for page in partial)
    assert found.touched == range(start // 64, (stop - 1) // 64 + 1)


@pytest.mark.parametrize(
    ("start", "stop", "partial"),
    [
        (4, 8, [(0, ((4, 8),))]),
        (4, 11, [(0, ((0, 3), (4, 8)))]),
        (252, 259, [(0, ((4, 8),)), (1, ((0, 3),))]),
    ],
)
def test_rings(start, stop, partial):
    found = split(Kind.C4_STATE, start, stop)
    assert not found.full
    assert found.partial == tuple(PartialPage(*page) for page in partial)
    assert sum(page.rows for page in found.partial) == stop - start


def test_a_request_slot_is_one_logical_page():
    assert split(Kind.C128_STATE, 1_000_064, 1_000_100).touched == range(1)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (((0, 64),), [(0, 37_376)]),
        (((3, 5),), [(3 * 576, 2 * 576), (64 * 576 + 3 * 8, 2 * 8)]),
        (((0, 2), (60, 64)), [(0, 1_152), (60 * 576, 4 * 576 + 16), (64 * 576 + 480, 32)]),
    ],
)
def test_parts_lie_apart_unless_they_touch(slots, expected):
    assert byte_intervals(flash().component(Kind.C4_KV), 1, slots) == expected


def test_each_lane_has_its_interval():
    component = gqa().component(Kind.MHA_KV)
    assert byte_intervals(component, 2, ((1, 3),)) == [(64, 128), (1_024 + 64, 128)]
    assert byte_intervals(component, 2, ((0, 16),)) == [(0, 2_048)]


@pytest.mark.parametrize(
    ("source", "destination", "borders", "lengths"),
    [
        ([1, 2, 3, 4], [7, 8, 9, 10], (0, 0), [4]),
        ([1, 2, 3, 4], [7, 8, 3, 4], (0, 0), [2, 2]),
        ([1, 2, 9, 10], [5, 6, 7, 8], (0, 0), [2, 2]),
        ([4, 3, 2], [4, 3, 2], (0, 0), [1, 1, 1]),
        ([2, 3, 4, 5], [6, 7, 8, 9], (4, 0), [2, 2]),
        ([2, 3, 4, 5], [6, 7, 8, 9], (0, 8), [2, 2]),
        ([2, 3, 4, 5], [7, 8, 9, 10], (4, 8), [1, 1, 2]),
        ([5], [5], (0, 0), [1]),
        ([], [], (0, 0), []),
    ],
)
def test_runs(source, destination, borders, lengths):
    found = find_runs(np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64), borders)
    assert found.pages.tolist() == lengths
    begins = np.cumsum([0, *lengths[:-1]])[: len(lengths)]
    assert found.source.tolist() == [source[begin] for begin in begins]
    assert found.destination.tolist() == [destination[begin] for begin in begins]

"""Rows to pages, slots to bytes, page ids to runs."""

import numpy as np
import pytest

from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.plan.runs import byte_intervals, find_runs
from tests.helpers.geometries import flash


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

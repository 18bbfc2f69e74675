"""The reference of row copies against a plain loop: parts apart in a page, and dense rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError, UnsupportedError
from kvbridge.kernels.places import PageMemory, RowPair
from kvbridge.kernels.row_copies import CudaRowCopier, ReferenceRowCopier, row_copier
from tests.helpers.kernel_memory import Form, id_pairs, random_bytes

PARTS = st.sampled_from([(576, 8), (32,), (4, 16, 8), (12, 4)])


def pieces(form: Form, parts: tuple[int, ...], slots: int, layer: int, row: int) -> list[tuple[int, int]]:
    """Where each part of a row lies: offset and bytes."""
    page, slot = divmod(row, slots)
    at, found = form.offset(layer, page), []
    for part in parts:
        found.append((at + slot * part, part))
        at += slots * part
    return found


@st.composite
def copies(draw: st.DrawFn):
    parts, slots = draw(PARTS), [draw(st.sampled_from([1, 2, 8])) for _ in range(2)]
    forms = [
        Form(
            layers=2,
            pages=draw(st.integers(1, 5)),
            page_bytes=sum(parts) * slots[side] + draw(st.sampled_from([0, 4, 40])),
            pages_per_extent=draw(st.integers(0, 2)),
            page_first=draw(st.booleans()),
        )
        for side in range(2)
    ]
    rows = [form.pages * slot for form, slot in zip(forms, slots, strict=True)]
    destinations = draw(st.permutations(range(rows[1])))[: draw(st.integers(0, rows[1]))]
    ids = [(draw(st.integers(-1, rows[0] - 1)), draw(st.sampled_from([to, to, -1]))) for to in destinations]
    return parts, slots, forms, ids


@given(copies())
def test_copies_every_part_of_the_named_rows_and_nothing_else(case):
    parts, slots, forms, ids = case
    source, target = random_bytes(forms[0].total_bytes, 1), random_bytes(forms[1].total_bytes, 2)
    expected = target.copy()
    for layer in range(2):
        for a, b in ids:
            if a >= 0 and b >= 0:
                sides = zip(
                    pieces(forms[0], parts, slots[0], layer, a),
                    pieces(forms[1], parts, slots[1], layer, b),
                    strict=True,
                )
                for (start, length), (stop, _) in sides:
                    expected[stop : stop + length] = source[start : start + length]
    pairs = [
        RowPair(forms[0].memory(source.ctypes.data, layer), forms[1].memory(target.ctypes.data, layer), parts, *slots)
        for layer in range(2)
    ]
    named = np.array(ids, dtype=np.int32).reshape(-1, 2).T.copy()
    with row_copier(None, pairs) as copier:
        copier.copy(id_pairs(named, named.shape[1]))
        copier.check()
    np.testing.assert_array_equal(target, expected)


def test_a_count_of_a_page_is_still_rows():
    """64 rows of 64 pages: no number of rows is ever taken for whole pages."""
    memory = random_bytes(64 * 37_440, 3)
    target = np.zeros_like(memory)
    ids = np.array([np.arange(64) * 64 + 5, np.arange(64) * 64 + 60], dtype=np.int32)
    sides = [
        PageMemory.contiguous(each.ctypes.data, page_count=64, page_stride_bytes=37_440) for each in (memory, target)
    ]
    ReferenceRowCopier([RowPair(sides[0], sides[1], (576, 8), 64, 64)]).copy(id_pairs(ids, 64))
    pages, found = memory.reshape(64, -1), target.reshape(64, -1)
    np.testing.assert_array_equal(found[:, 60 * 576 : 61 * 576], pages[:, 5 * 576 : 6 * 576])
    scales = 64 * 576
    np.testing.assert_array_equal(found[:, scales + 480 : scales + 488], pages[:, scales + 40 : scales + 48])
    assert np.count_nonzero(found[:, : 60 * 576]) == 0


def test_mistakes_are_named():
    memory = np.zeros(256, dtype=np.uint8)
    side = PageMemory.contiguous(memory.ctypes.data, page_count=2, page_stride_bytes=64)
    ids = np.array([[8], [0]], dtype=np.int32)
    with pytest.raises(PageOutOfBoundsError, match="page 2 does not exist among 2"):
        ReferenceRowCopier([RowPair(side, side, (16,), 4, 4)]).copy(id_pairs(ids, 1))
    with pytest.raises(InvalidInputError, match=r"5 rows of 16 bytes do not fit"):
        RowPair(side, side, (16,), 5, 4)
    for parts in ((), (6,), (8, 0)):
        with pytest.raises(InvalidInputError, match="multiples of 4"):
            RowPair(side, side, parts, 1, 1)


def test_the_gpu_refuses_what_its_kernel_cannot_copy():
    side = PageMemory.contiguous(4096, page_count=2, page_stride_bytes=64)
    with pytest.raises(UnsupportedError, match="5 parts; the GPU copies at most 4"):
        CudaRowCopier(0, [RowPair(side, side, (4,) * 5, 1, 1)])
    with pytest.raises(UnsupportedError, match="differ in the parts of their rows or in slots"):
        CudaRowCopier(0, [RowPair(side, side, (16,), 1, 1), RowPair(side, side, (16,), 1, 2)])
    odd = PageMemory.contiguous(4098, page_count=2, page_stride_bytes=64)
    with pytest.raises(UnsupportedError, match=r"multiples of 4"):
        CudaRowCopier(0, [RowPair(side, odd, (16,), 1, 1)])

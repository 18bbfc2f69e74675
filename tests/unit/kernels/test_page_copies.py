"""The reference of page copies against a plain loop, for every form in which pages lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import PageOutOfBoundsError, UnsupportedError
from kvbridge.kernels.page_copies import CudaPageCopier, ReferencePageCopier, page_copier
from kvbridge.kernels.places import PageMemory, PagePair
from tests.helpers.kernel_memory import Form, id_pairs, random_bytes

FORMS = st.builds(
    Form,
    layers=st.just(3),
    pages=st.integers(1, 9),
    page_bytes=st.sampled_from([1, 16, 48, 600]),
    pages_per_extent=st.integers(0, 4),
    page_first=st.booleans(),
    gap_bytes=st.sampled_from([0, 7, 48]),
)


@st.composite
def copies(draw: st.DrawFn) -> tuple[Form, Form, int, list[list[tuple[int, int]]]]:
    source, target = draw(FORMS), draw(FORMS)
    page_bytes = draw(st.integers(1, min(source.page_bytes, target.page_bytes)))
    lists = []
    for _ in range(2):
        most = draw(st.integers(0, target.pages))
        destinations = draw(st.permutations(range(target.pages)))[:most]
        sources = [draw(st.integers(-1, source.pages - 1)) for _ in destinations]
        lists.append([(a, draw(st.sampled_from([b, b, -1]))) for a, b in zip(sources, destinations, strict=True)])
    return source, target, page_bytes, lists


@given(copies())
def test_copies_the_named_pages_of_each_pair_and_nothing_else(case):
    source_form, target_form, page_bytes, lists = case
    source, target = random_bytes(source_form.total_bytes, 1), random_bytes(target_form.total_bytes, 2)
    expected = target.copy()
    tables = (0, 1, 0)
    for layer, table in enumerate(tables):
        for a, b in lists[table]:
            if a >= 0 and b >= 0:
                start, stop = source_form.offset(layer, a), target_form.offset(layer, b)
                expected[stop : stop + page_bytes] = source[start : start + page_bytes]
    pairs = [
        PagePair(
            source_form.memory(source.ctypes.data, layer),
            target_form.memory(target.ctypes.data, layer),
            page_bytes,
            group=2 - layer,
            table=table,
        )
        for layer, table in enumerate(tables)
    ]
    ids = [np.array(pairs_of, dtype=np.int32).reshape(-1, 2).T.copy() for pairs_of in lists]
    with page_copier(None, pairs) as copier:
        copier.copy([id_pairs(each, each.shape[1]) for each in ids])
        copier.check()
    np.testing.assert_array_equal(target, expected)


def one_layer(pages: int = 4, page_bytes: int = 32) -> tuple[np.ndarray, np.ndarray, PagePair]:
    source, target = random_bytes(pages * page_bytes, 1), np.zeros(pages * page_bytes, dtype=np.uint8)
    places = [
        PageMemory.contiguous(memory.ctypes.data, page_count=pages, page_stride_bytes=page_bytes)
        for memory in (source, target)
    ]
    return source, target, PagePair(places[0], places[1], page_bytes, group=5)


@pytest.mark.parametrize("ids", [(4, 0), (0, 4), (-2, 0)])
def test_an_id_that_does_not_exist_is_refused_with_its_number(ids: tuple[int, int]):
    _, target, pair = one_layer()
    named = np.array([[ids[0]], [ids[1]]], dtype=np.int32)
    wrong = next(number for number in ids if number)
    with pytest.raises(PageOutOfBoundsError, match=f"page {wrong} does not exist among 4"):
        ReferencePageCopier([pair]).copy([id_pairs(named, 1)])
    assert not target.any()


@pytest.mark.parametrize(
    ("address", "stride", "page_bytes", "table", "message"),
    [
        (4096 + 8, 64, 64, 0, "multiples of 16"),
        (4096, 72, 64, 0, "multiples of 16"),
        (4096, 64, 56, 0, "multiples of 16"),
        (4096, 64, 64, 4, "at most 4 lists.*name 5"),
    ],
)
def test_the_gpu_refuses_what_its_kernel_cannot_copy(address, stride, page_bytes, table, message):
    memory = PageMemory.contiguous(address, page_count=2, page_stride_bytes=stride)
    with pytest.raises(UnsupportedError, match=message):
        CudaPageCopier(0, [PagePair(memory, memory, page_bytes, table=table)])

"""The reference of page copies against a plain loop, for every form in which pages lie."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.kernels.page_copies import CudaPageCopier, ReferencePageCopier, page_copier
from kvbridge.kernels.places import IdPairs, PageMemory, PagePair
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


def test_mistakes_of_the_caller_are_named():
    _, _, pair = one_layer()
    copier = ReferencePageCopier([pair])
    with pytest.raises(InvalidInputError, match="1 lists, got 2"):
        copier.copy([IdPairs(0, 0, 0)] * 2)
    with pytest.raises(InvalidInputError, match=r"group 4.*\(5,\)"):
        copier.wait_group(4, stream=0)
    copier.wait_group(5, stream=0)
    with pytest.raises(InvalidInputError, match="at least one"):
        ReferencePageCopier([])
    with pytest.raises(InvalidInputError, match="33 bytes at strides"):
        PagePair(pair.source, pair.destination, 33)
    with pytest.raises(InvalidInputError, match=r"5 pages of 2 an extent.*2 extents"):
        PageMemory((4096, 8192), 2, 32, 5)
    with pytest.raises(InvalidInputError, match="-1 ids"):
        IdPairs(0, 0, -1)


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


@pytest.mark.parametrize(("third", "one"), [(4096 + 2 * 3 * 64, True), (1 << 20, False)])
def test_extents_that_follow_one_another_are_one(third: int, one: bool):
    region = Region(
        component=ComponentKind.C4_KV,
        layer=3,
        space=IndexSpace.HOST,
        memory=MemoryKind.DRAM,
        extent_addresses=(4096, 4096 + 3 * 64, third),
        pages_per_extent=3,
        page_count=8,
        page_bytes=48,
        page_stride_bytes=64,
    )
    memory = PageMemory.of(region)
    assert len(memory.extent_addresses) == (1 if one else 3)
    expected = [region.extent_addresses[page // 3] + page % 3 * 64 for page in range(8)]
    assert memory.addresses(np.arange(8)).tolist() == expected

"""Addresses of pages against a plain loop, for every form in which pages lie."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.core.plan.operations import Operations
from kvbridge.core.plan.pages import NO_BORDERS, PageArray, page_copies
from kvbridge.kernels.copies import StretchCopier
from tests.helpers.gpu import Form, random_bytes

FORMS = st.builds(
    Form,
    layers=st.just(3),
    pages=st.integers(1, 9),
    page_bytes=st.sampled_from([1, 16, 48, 600]),
    pages_per_extent=st.integers(0, 4),
    page_first=st.booleans(),
    gap_bytes=st.sampled_from([0, 7, 48]),
)


def pages_at(form: Form, base: int) -> PageArray:
    regions = [
        Region(
            component=ComponentKind.MHA_KV,
            layer=layer,
            space=IndexSpace.FULL,
            memory=MemoryKind.DRAM,
            extent_addresses=tuple(base + form.offset(layer, first) for first in range(0, form.pages, form.each)),
            pages_per_extent=min(form.each, form.pages),
            page_count=form.pages,
            page_bytes=form.page_bytes,
            page_stride_bytes=form.page_bytes * (form.layers if form.page_first else 1),
        )
        for layer in range(form.layers)
    ]
    return PageArray.of(regions)


@st.composite
def copies(draw: st.DrawFn) -> tuple[Form, Form, int, list[tuple[int, int]]]:
    source, target = draw(FORMS), draw(FORMS)
    page_bytes = draw(st.integers(1, min(source.page_bytes, target.page_bytes)))
    destinations = draw(st.permutations(range(target.pages)))[: draw(st.integers(0, target.pages))]
    return source, target, page_bytes, [(draw(st.integers(0, source.pages - 1)), page) for page in destinations]


@given(copies())
def test_copies_the_named_pages_of_all_layers_and_nothing_else(case):
    source_form, target_form, page_bytes, pairs = case
    source, target = random_bytes(source_form.total_bytes, 1), random_bytes(target_form.total_bytes, 2)
    expected = target.copy()
    for layer in range(3):
        for a, b in pairs:
            start, stop = source_form.offset(layer, a), target_form.offset(layer, b)
            expected[stop : stop + page_bytes] = source[start : start + page_bytes]
    here, there = (np.array(column, dtype=np.int32) for column in (zip(*pairs, strict=True) if pairs else ([], [])))
    sides = (pages_at(source_form, source.ctypes.data), here), (pages_at(target_form, target.ctypes.data), there)
    StretchCopier(None).submit(page_copies(*sides, page_bytes))
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("wrong", [4, -2])
def test_an_id_that_does_not_exist_is_refused_with_its_number(wrong: int):
    pages = PageArray.contiguous(4096, page_count=4, stride_bytes=32)
    with pytest.raises(PageOutOfBoundsError, match=f"page {wrong} does not exist among 4"):
        pages.addresses(np.array([0, wrong]))


@pytest.mark.parametrize(("gap", "columns"), [(0, 1), (48, 3)])
def test_extents_that_follow_each_other_are_one_to_addresses_and_borders_to_operations(gap: int, columns: int):
    form = Form(layers=1, pages=5, page_bytes=16, pages_per_extent=2, gap_bytes=gap)
    pages = pages_at(form, 4096)
    assert (pages.bases.shape, pages.borders) == ((1, columns), 2)
    assert pages_at(Form(layers=1, pages=5, page_bytes=16), 4096).borders == NO_BORDERS
    assert len(page_copies((pages, np.arange(0)), (pages, np.arange(0)), 16)) == 0
    assert isinstance(page_copies((pages, np.arange(5)), (pages, np.arange(5)), 16), Operations)

"""Objects of stores: a trailer says what it was made to say or is a miss, a form names its bytes, parts lie where regions say."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import InvalidInputError, PageOutOfBoundsError, UnsupportedError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, MemoryKind
from kvbridge.pool.memory.layout import HostLayout, host_placement
from kvbridge.pool.memory.pools import MemoryPool
from kvbridge.tier.stores.objects import ObjectForm, Outcome, is_object_name
from tests.helpers.examples import fewer
from tests.helpers.manifests import new_region

KINDS = st.sampled_from(ComponentKind)
SPACES = (IndexSpace.FULL, IndexSpace.HOST)
keys = st.binary(min_size=16, max_size=16)


@st.composite
def region_sets(draw: st.DrawFn) -> list[Region]:
    """Regions of distinct components and layers, in any order, of one or two spaces, in one or several extents."""
    places = draw(st.lists(st.tuples(KINDS, st.integers(0, 40)), min_size=1, max_size=6, unique=True))
    found = []
    for kind, layer in places:
        page_bytes = draw(st.integers(1, 5_000))
        per_extent = draw(st.integers(1, 5))
        page_count = draw(st.integers(1, 12))
        extents = -(-page_count // per_extent)
        lane = draw(st.integers(0, 3))
        where = {"space": draw(st.sampled_from(SPACES)), "lanes": (lane, lane + draw(st.integers(1, 2)))}
        form = {"per_extent": per_extent, "page_bytes": page_bytes, "stride": page_bytes + draw(st.integers(0, 900))}
        starts = draw(st.lists(st.integers(0, 2**46), min_size=extents, max_size=extents))
        found.append(new_region(kind, layer, starts, pages=page_count, **where, **form))
    return found


forms = region_sets().map(ObjectForm)


@st.composite
def trailers(draw: st.DrawFn) -> tuple[ObjectForm, bytes, int, bytes]:
    form, key, digest = draw(forms), draw(keys), draw(st.integers(0, 2**32 - 1))
    return form, key, digest, form.trailer(key, digest)


@fewer(3)
@given(made=trailers(), data=st.data())
def test_a_header_says_what_it_was_made_to_say_and_is_a_miss_once_it_has_changed(made, data: st.DataObject):
    form, key, digest, trailer = made
    assert form.object_bytes == len(trailer) + sum(form.lengths)
    assert form.read_trailer(key, trailer) == digest
    changed = bytearray(trailer)
    for place in data.draw(st.lists(st.integers(0, len(trailer) - 1), min_size=1, max_size=4, unique=True)):
        changed[place] ^= data.draw(st.integers(1, 255))
    assert isinstance(form.read_trailer(key, bytes(changed)), Outcome)
    cut = data.draw(st.integers(0, len(trailer) - 1))
    assert isinstance(form.read_trailer(key, trailer[:cut]), Outcome)
    assert isinstance(form.read_trailer(key, trailer + data.draw(st.binary(min_size=1, max_size=9))), Outcome)


@fewer(3)
@given(made=trailers(), other_form=forms, other_key=keys)
def test_a_header_of_something_else_is_a_miss(made, other_form: ObjectForm, other_key: bytes):
    form, key, _, trailer = made
    if other_key != key:
        assert form.read_trailer(other_key, trailer) is Outcome.OTHER_KEY
        assert form.object_name(key) != form.object_name(other_key)
    if other_form.name != form.name:
        assert isinstance(other_form.read_trailer(key, trailer), Outcome)
        assert form.object_name(key) != other_form.object_name(key)


@fewer(3)
@given(regions=region_sets(), data=st.data())
def test_a_form_is_the_same_in_any_order_and_another_for_any_other_fact(regions: list[Region], data: st.DataObject):
    form = ObjectForm(regions)
    assert ObjectForm(data.draw(st.permutations(regions))).name == form.name
    assert is_object_name(form.object_name(bytes(16)))
    index = data.draw(st.integers(0, len(regions) - 1))
    one = regions[index]
    change = data.draw(
        st.sampled_from([{"layer": 99}, {"lane_stop": one.lane_stop + 1}, {"page_bytes": one.page_bytes + 1}])
    )
    changed = [*regions[:index], one.model_copy(update=change), *regions[index + 1 :]]
    assert ObjectForm(changed).name != form.name
    moved = [*regions[:index], one.model_copy(update={"page_stride_bytes": 10_000}), *regions[index + 1 :]]
    assert ObjectForm(moved).name == form.name, "where pages lie is not what they are"
    if len(regions) > 1:
        assert ObjectForm(regions[1:]).name != form.name


@fewer(3)
@given(regions=region_sets(), data=st.data())
def test_parts_lie_where_their_regions_say(regions: list[Region], data: st.DataObject):
    form = ObjectForm(regions)
    counts = {space: min(one.page_count for one in regions if one.space is space) for space in form.spaces}
    page = {space: data.draw(st.integers(0, counts[space] - 1)) for space in form.spaces}
    row = np.array([page[space] for space in form.spaces], dtype=np.int32)
    form.check(row.reshape(1, -1), 1)
    expected = {}
    for one in regions:
        extent, index = divmod(page[one.space], one.pages_per_extent)
        address = one.extent_addresses[extent] + index * one.page_stride_bytes
        expected[one.component, one.layer] = address, one.page_bytes
    found = [
        address + at
        for address, length in zip(*form.addresses(row.reshape(1, -1)).tolist(), form.lengths, strict=True)
        for at in range(length)
    ]
    assert found == [address + at for _, (address, length) in sorted(expected.items()) for at in range(length)]
    column = data.draw(st.integers(0, len(form.spaces) - 1))
    row[column] = data.draw(st.sampled_from([-1, counts[form.spaces[column]], 2**31 - 1]))
    with pytest.raises(PageOutOfBoundsError):
        form.check(row.reshape(1, -1), 1)


def test_parts_that_follow_one_another_are_one_stretch(tmp_path: Path):
    geometry = preset("tiny-v4")
    kinds = [component.kind for component in geometry.components if component.host_capable]
    with ExitStack() as stack:
        forms = []
        for layout in HostLayout:
            placement = host_placement(geometry, kinds, page_count=3, layout=layout)
            pool = stack.enter_context(MemoryPool.in_files(placement, tmp_path, layout))
            forms.append(ObjectForm(pool.regions))
    apart, together = forms
    assert len(apart.lengths) > len(kinds)
    assert len(together.lengths) == len(kinds)
    assert {form.name for form in forms} == {apart.name}
    assert {form.payload_bytes for form in forms} == {sum(apart.lengths)}


def test_what_cannot_be_an_object_is_refused():
    region = new_region(ComponentKind.C4_KV, 1, (4096,), pages=1, page_bytes=10, space=IndexSpace.HOST)
    with pytest.raises(InvalidInputError, match="no component of a layer twice"):
        ObjectForm([region, region])
    with pytest.raises(InvalidInputError, match="at least one part"):
        ObjectForm([])
    with pytest.raises(UnsupportedError, match="host memory"):
        ObjectForm([region.model_copy(update={"memory": MemoryKind.VRAM})])
    with pytest.raises(InvalidInputError, match="16 bytes"):
        ObjectForm([region]).object_name(b"short")


@pytest.mark.parametrize(
    "name", ["", "usage", "0" * 65, f"{0:032X}-{10:032X}", f"{0:032x}-{0:032x}.1", f"{0:032x}-{0:032x}\n"]
)
def test_what_is_no_name_of_an_object(name: str):
    assert not is_object_name(name)

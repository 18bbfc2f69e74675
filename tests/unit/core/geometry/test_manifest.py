"""A manifest that cannot be true is refused, and one that can is not."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind as Kind, ModelGeometry
from kvbridge.core.geometry.manifest import (
    RankManifest,
    Region,
    check_disjoint,
    check_manifest,
    fingerprint,
    first_difference,
)
from kvbridge.core.geometry.models import PRESETS, preset
from kvbridge.core.ids import IndexSpace as Space, Rank
from tests.helpers.manifests import Instance, new_region

TINY = preset("tiny-v4")
RANK = Rank(pp=0, tp=0)


def manifest_of(geometry, host=()):
    """A true manifest of five pages in each space."""
    return Instance(geometry, dict.fromkeys(Space, 5)).with_host(*host).manifests()[0]


def with_region(manifest, index, **changes):
    regions = list(manifest.regions)
    regions[index] = Region.model_validate(regions[index].model_dump() | changes)
    return RankManifest.model_validate(manifest.model_dump() | {"regions": tuple(regions)})


def index_of(manifest, kind, layer):
    return next(at for at, region in enumerate(manifest.regions) if region.component is kind and region.layer == layer)


@pytest.mark.parametrize("name", PRESETS)
def test_true_manifests_pass(name):
    geometry = preset(name)
    check_manifest(manifest_of(geometry), geometry)
    host = [part.kind for part in geometry.components if part.host_capable]
    check_manifest(manifest_of(geometry, host=host), geometry)


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        (Kind.C4_KV, {"component": "mla_kv"}, r"mla_kv layer 2: model 'tiny-v4' has no component 'mla_kv'"),
        (Kind.C4_KV, {"layer": 3}, "c4_kv layer 3: model 'tiny-v4' has no c4_kv in this layer"),
        (Kind.C4_KV, {"page_bytes": 6_656}, "c4_kv layer 2: pages of 6656 bytes, but 1 lanes take 6720 bytes"),
        (Kind.C4_KV, {"space": "swa"}, "c4_kv layer 2: its page ids count space 'swa', but this component's .* 'full'"),
        (
            Kind.C4_KV,
            {"space": "full_twin", "memory": "dram"},
            r"c4_kv layer 2 \(host copy\): its page ids count space 'full_twin'",
        ),
        (Kind.C4_KV, {"lane_stop": 2}, r"c4_kv layer 2: holds lanes \[0, 2\), but rank 0 of 1 must hold \[0, 1\) of 1"),
        (Kind.C4_INDEXER, {"space": "host"}, r"c4_indexer layer 2 \(host\): this component cannot live in the host"),
        (Kind.C4_KV, {"space": "host", "memory": "vram"}, r"c4_kv layer 2 \(host\): a host region lies in 'vram'"),
        (
            Kind.C4_KV,
            {"extent_addresses": [2**64 - 5 * 6_720 + 1]},
            r"c4_kv layer 2: an extent of its pages ends beyond 2\*\*64",
        ),
    ],
)
def test_one_wrong_fact_is_named(kind, changes, words):
    manifest = manifest_of(TINY)
    broken = with_region(manifest, index_of(manifest, kind, 2), **changes)
    with pytest.raises(InvalidInputError, match=r"rank pp0\.tp0: " + words):
        check_manifest(broken, TINY)


def plain(layer, *, base, stride, page_bytes, page_count, per_extent=0):
    each = per_extent or page_count
    starts = [base + extent * each * stride for extent in range(-(-page_count // each))]
    return new_region(
        Kind.C4_KV, layer, starts, pages=page_count, page_bytes=page_bytes, per_extent=each, stride=stride
    )


@pytest.mark.parametrize("pairs", [1, 60])
def test_what_it_takes_does_not_depend_on_the_pages(pairs):
    """Pages of 2**40 cannot be looked at one by one: a rule that did would not come back."""
    regions, apart = [], 2**45
    for pair in range(pairs):
        for layer, (offset, stride) in enumerate([(0, 16), (8, 32)]):
            start = pair * apart + offset
            regions.append(plain(2 * pair + layer, base=start, stride=stride, page_bytes=8, page_count=2**40))
    words = r"c4_kv layer 0 and c4_kv layer 1 reach into each other around 0x8 with strides of 16 and 32 bytes"
    with pytest.raises(InvalidInputError, match=words):
        check_disjoint(regions, rank=RANK)
    alike = [region.model_copy(update={"page_stride_bytes": 16}) for region in regions]
    check_disjoint(alike, rank=RANK)


def test_many_extents_are_compared_quickly():
    """As many as a frame holds; a comparison of each with each would be 10**10."""
    count = 100_000
    regions = [
        plain(layer, base=layer * 8, stride=16, page_bytes=8, page_count=count, per_extent=1) for layer in range(2)
    ]
    check_disjoint(regions, rank=RANK)
    wide = [regions[0].model_copy(update={"page_bytes": 9}), regions[1]]
    with pytest.raises(InvalidInputError, match="pages of c4_kv layer 0 and of c4_kv layer 1 share memory at 0x8"):
        check_disjoint(wide, rank=RANK)


@st.composite
def small_region(draw, layer):
    page_bytes = draw(st.integers(1, 6))
    count = draw(st.integers(1, 6))
    return plain(
        layer,
        base=draw(st.integers(0, 80)),
        stride=draw(st.one_of(st.just(12), st.integers(page_bytes, 14))),
        page_bytes=page_bytes,
        page_count=count,
        per_extent=draw(st.integers(1, count)),
    )


def bytes_of(region):
    for page in range(region.page_count):
        extent, index = divmod(page, region.pages_per_extent)
        first = region.extent_addresses[extent] + index * region.page_stride_bytes
        yield from range(first, first + region.page_bytes)


def ranges_of(region):
    """First and last byte of each extent."""
    pages = [(page, *divmod(page, region.pages_per_extent)) for page in range(region.page_count)]
    for extent, start in enumerate(region.extent_addresses):
        last = max(within for _, index, within in pages if index == extent)
        yield start, start + last * region.page_stride_bytes + region.page_bytes - 1


@given(st.integers(1, 4).flatmap(lambda count: st.tuples(*[small_region(layer) for layer in range(count)])))
def test_what_shares_a_byte_is_refused_and_what_is_apart_or_of_one_stride_is_not(regions):
    used = [address for region in regions for address in bytes_of(region)]
    if len(used) > len(set(used)):
        with pytest.raises(InvalidInputError, match=r"share memory|reach into each other"):
            check_disjoint(regions, rank=RANK)
        return
    ranges = sorted(one for region in regions for one in ranges_of(region))
    stride = regions[0].page_stride_bytes
    places = [{byte % stride for byte in bytes_of(region)} for region in regions]
    if all(stop < start for (_, stop), (start, _) in pairwise(ranges)) or (
        all(region.page_stride_bytes == stride for region in regions)
        and all(len(region.extent_addresses) == 1 for region in regions)
        and sum(map(len, places)) == len(set().union(*places))
    ):
        check_disjoint(regions, rank=RANK)


FLASH = preset("deepseek-v4-flash")


def changed(geometry, kind, **facts):
    """The geometry with facts of one component replaced, validated anew."""
    components = [
        Component.model_validate(part.model_dump() | (facts if part.kind is kind else {}))
        for part in geometry.components
    ]
    return ModelGeometry.model_validate(geometry.model_dump() | {"components": components})


def test_fingerprints_are_stable_across_runs_and_releases():
    """Written down on purpose: a change here makes running peers refuse each other, and so needs a new version."""
    assert {name: fingerprint(preset(name)) for name in PRESETS} == {
        "deepseek-v4-flash": "31ec6d6007ad99982a3d484f290b22b4",
        "deepseek-v4-pro": "f156d863f8d4d39d42622ed9ac892b69",
        "deepseek-v3.2": "76ddb685b5bf25bc29c9eba31d06b719",
        "tiny-v4": "db865455ff3d6e0502678fc36b24ef41",
        "tiny-gqa": "e05c47269450f4ae77606e8f99c134d2",
    }


def test_the_name_and_the_order_of_components_do_not_count():
    other = ModelGeometry(
        name="another name",
        layer_count=FLASH.layer_count,
        tokens_per_page=FLASH.tokens_per_page,
        components=tuple(reversed(FLASH.components)),
    )
    assert fingerprint(other) == fingerprint(FLASH)
    assert first_difference(FLASH, other) is None


@pytest.mark.parametrize(
    ("kind", "facts", "sentence"),
    [
        (Kind.SWA_KV, {"window": 127}, "components.swa_kv.window is 128 here and 127 on the peer"),
        (
            Kind.C4_KV,
            {"row_parts_bytes": (512, 16)},
            "components.c4_kv.row_parts_bytes is [576, 8] here and [512, 16] on the peer",
        ),
        (
            Kind.C4_KV,
            {"page_alignment_bytes": 512},
            "components.c4_kv.page_alignment_bytes is 576 here and 512 on the peer",
        ),
        (Kind.C4_KV, {"host_capable": False}, "components.c4_kv.host_capable is True here and False on the peer"),
    ],
)
def test_every_fact_counts_and_is_named(kind, facts, sentence):
    other = changed(FLASH, kind, **facts)
    assert fingerprint(other) != fingerprint(FLASH)
    assert first_difference(FLASH, other) == sentence


def test_a_component_of_one_side_only():
    fewer = FLASH.model_copy(update={"components": FLASH.components[1:]})
    assert first_difference(FLASH, fewer) == "components.c4_kv exists only here"
    assert first_difference(fewer, FLASH) == "components.c4_kv exists only on the peer"

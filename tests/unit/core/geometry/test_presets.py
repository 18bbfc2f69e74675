"""The named models, byte for byte."""

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.geometry.components import Encoding, Liveness
from kvbridge.core.geometry.presets import PRESETS, preset
from kvbridge.core.ids import IndexSpace as Space

V4_PAGE_BYTES = {
    Kind.C4_KV: 37_440,
    Kind.C4_INDEXER: 8_448,
    Kind.C128_KV: 1_728,
    Kind.SWA_KV: 149_760,
    Kind.C4_STATE: 65_536,
    Kind.C4_INDEXER_STATE: 16_384,
    Kind.C128_STATE: 524_288,
}
V4_SPACES = {
    Kind.C4_KV: Space.FULL,
    Kind.C4_INDEXER: Space.FULL,
    Kind.C128_KV: Space.FULL,
    Kind.SWA_KV: Space.SWA,
    Kind.C4_STATE: Space.SWA,
    Kind.C4_INDEXER_STATE: Space.SWA,
    Kind.C128_STATE: Space.REQUEST,
}


def reserved_bytes(geometry, pages):
    """Bytes that so many pages of each space take in one copy of the pools, by component."""
    return {part.kind: pages.get(part.space, 0) * part.page_bytes() * len(part.layers) for part in geometry.components}


def ratios(geometry):
    """The `compress_ratios` list that the layers of a geometry spell."""
    sparse = set(geometry.component(Kind.C4_KV).layers)
    heavy = set(geometry.component(Kind.C128_KV).layers)
    return [4 if layer in sparse else 128 if layer in heavy else 0 for layer in range(geometry.layer_count)]


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_v4_pages_are_byte_exact(name):
    geometry = preset(name)
    assert {part.kind: part.page_bytes() for part in geometry.components} == V4_PAGE_BYTES
    assert {part.kind: part.space for part in geometry.components} == V4_SPACES
    assert [part.kind for part in geometry.components if part.host_capable] == [Kind.C4_KV]
    assert all(part.lanes == 1 for part in geometry.components)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("deepseek-v4-flash", [0, 0, *[4, 128] * 20, 4]),
        ("deepseek-v4-pro", [128, 128, *[4, 128] * 29, 4]),
        ("tiny-v4", [0, 0, 4, 128, 4, 128]),
    ],
)
def test_v4_layer_patterns(name, pattern):
    geometry = preset(name)
    assert ratios(geometry) == pattern
    assert geometry.component(Kind.SWA_KV).layers == tuple(range(len(pattern)))
    for state, kv in ((Kind.C4_STATE, Kind.C4_KV), (Kind.C4_INDEXER, Kind.C4_KV), (Kind.C128_STATE, Kind.C128_KV)):
        assert geometry.component(state).layers == geometry.component(kv).layers


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_v4_rows(name):
    geometry = preset(name)
    kv = geometry.component(Kind.C4_KV)
    assert kv.row_parts_bytes == (576, 8)
    assert kv.part_offset(1) == 64 * 576
    assert kv.encoding is Encoding.FP8_V4
    state = geometry.component(Kind.C4_STATE)
    assert (state.row_bytes, state.slots_per_page, state.liveness) == (8_192, 8, Liveness.TAIL)
    assert state.is_ring
    assert geometry.component(Kind.C4_INDEXER_STATE).row_bytes == 2_048
    heavy = geometry.component(Kind.C128_STATE)
    assert (heavy.row_bytes, heavy.slots_per_page) == (4_096, 128)
    assert 2**40 // heavy.rows_per_logical_page <= 2, "every request's rows are in logical page 0"
    assert geometry.component(Kind.SWA_KV).window == 128


GROWING = (Kind.C4_KV, Kind.C4_INDEXER, Kind.C128_KV)


@pytest.mark.parametrize(
    ("name", "tokens", "growing"),
    [
        ("deepseek-v4-flash", 8_192, (25_159_680, 5_677_056, 1_105_920)),
        ("deepseek-v4-flash", 131_072, (402_554_880, 90_832_896, 17_694_720)),
        ("deepseek-v4-flash", 1_048_576, (3_220_439_040, 726_663_168, 141_557_760)),
        ("deepseek-v4-pro", 8_192, (35_942_400, 8_110_080, 1_714_176)),
        ("deepseek-v4-pro", 131_072, (575_078_400, 129_761_280, 27_426_816)),
        ("deepseek-v4-pro", 1_048_576, (4_600_627_200, 1_038_090_240, 219_414_528)),
    ],
)
def test_growing_totals_of_a_request(name, tokens, growing):
    held = reserved_bytes(preset(name), {Space.FULL: tokens // 256})
    assert tuple(held[kind] for kind in GROWING) == growing
    assert sum(held.values()) == sum(growing)


@pytest.mark.parametrize(
    ("name", "tokens", "with_window_mib", "worst_mib"),
    [
        ("deepseek-v4-flash", 8_192, 46.0, 56.0),
        ("deepseek-v4-flash", 131_072, 503.0, 513.0),
        ("deepseek-v4-flash", 1_048_576, 3_915, 3_925),
        ("deepseek-v4-pro", 8_192, 65.8, 81.3),
        ("deepseek-v4-pro", 131_072, 720.5, 736.0),
        ("deepseek-v4-pro", 1_048_576, 5_609, 5_624),
    ],
)
def test_worst_case_totals_of_a_request(name, tokens, with_window_mib, worst_mib):
    geometry = preset(name)
    digits = 0 if isinstance(worst_mib, int) else 1
    pages = {Space.FULL: tokens // 256, Space.SWA: 2}
    for expected, extra in ((with_window_mib, {}), (worst_mib, {Space.REQUEST: 1})):
        total = sum(reserved_bytes(geometry, pages | extra).values())
        assert round(total / 2**20, digits) == expected


@pytest.mark.parametrize(
    ("name", "page", "fixed"),
    [
        ("deepseek-v4-flash", 998_208, (6_439_680, 1_376_256, 344_064, 10_485_760)),
        ("deepseek-v4-pro", 1_430_208, (9_135_360, 1_966_080, 491_520, 16_252_928)),
    ],
)
def test_fixed_bytes_of_a_request(name, page, fixed):
    geometry = preset(name)
    assert sum(reserved_bytes(geometry, {Space.FULL: 1}).values()) == page
    held = reserved_bytes(geometry, {Space.SWA: 1, Space.REQUEST: 1})
    kinds = (Kind.SWA_KV, Kind.C4_STATE, Kind.C4_INDEXER_STATE, Kind.C128_STATE)
    assert tuple(held[kind] for kind in kinds) == fixed


def test_v32_pages():
    geometry = preset("deepseek-v3.2")
    assert (geometry.layer_count, geometry.tokens_per_page) == (61, 64)
    assert {part.kind: part.page_bytes() for part in geometry.components} == {
        Kind.MLA_KV: 64 * 1_152,
        Kind.DSA_INDEXER: 8_448,
    }
    assert geometry.component(Kind.MLA_KV).host_capable


def test_tiny_presets_are_small_and_padded():
    tiny = preset("tiny-v4")
    assert tiny.tokens_per_page == 256
    assert {part.kind for part in tiny.components} == set(V4_PAGE_BYTES)
    kv = tiny.component(Kind.C4_KV)
    assert kv.page_bytes() > kv.lane_block_bytes, "padding is exercised"
    gqa = preset("tiny-gqa").component(Kind.MHA_KV)
    assert (gqa.lanes, gqa.page_bytes(1), gqa.page_bytes()) == (4, 256 * 64, 4 * 256 * 64)


def test_every_name_builds_once():
    for name in PRESETS:
        assert preset(name).name == name
        assert preset(name) is preset(name)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidInputError, match=r"'deepseek-v5'; there are deepseek-v4-flash, .*tiny-gqa"):
        preset("deepseek-v5")

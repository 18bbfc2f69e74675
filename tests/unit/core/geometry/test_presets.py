"""The named models, byte for byte."""

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.geometry.presets import preset
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


@pytest.mark.parametrize("name", ["deepseek-v4-flash", "deepseek-v4-pro"])
def test_v4_pages_are_byte_exact(name):
    geometry = preset(name)
    assert {part.kind: part.page_bytes() for part in geometry.components} == V4_PAGE_BYTES
    assert {part.kind: part.space for part in geometry.components} == V4_SPACES
    assert [part.kind for part in geometry.components if part.host_capable] == [Kind.C4_KV]
    assert all(part.lanes == 1 for part in geometry.components)


def test_v32_pages():
    geometry = preset("deepseek-v3.2")
    assert (geometry.layer_count, geometry.tokens_per_page) == (61, 64)
    assert {part.kind: part.page_bytes() for part in geometry.components} == {
        Kind.MLA_KV: 64 * 1_152,
        Kind.DSA_INDEXER: 8_448,
    }
    assert geometry.component(Kind.MLA_KV).host_capable


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(InvalidInputError, match=r"'deepseek-v5'; there are deepseek-v4-flash, .*tiny-gqa"):
        preset("deepseek-v5")

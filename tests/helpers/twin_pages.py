"""What twins hold, as an attached engine of the node sees them, beside the device pages that they are twins of.

Owns: the comparison, page by page, of all components, layers and lanes. Must not know: which pages are cached, or why.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.twins import Piece, twin_pieces
from kvbridge.core.ids import TWINS, IndexSpace
from kvbridge.engine.base import Engine
from tests.helpers.pool_pages import page_address

Part = tuple[ComponentKind, int, int]
"""A component of a layer, and the first of the lanes that a rank holds of it."""
PageBytes = dict[Part, bytes]


def device_page(engine: Engine, space: IndexSpace, page: int) -> PageBytes:
    """What of a device page has a twin, on all ranks that the engine is attached to: the bytes that a twin keeps."""
    found = {}
    for region, twin in _pairs(engine, space):
        kept = b"".join(
            ctypes.string_at(page_address(region, page) + piece.offset_bytes, piece.length_bytes)
            for piece in _pieces(engine, region, twin)
        )
        found[region.component, region.layer, region.lane_start] = kept
    assert found, f"nothing in '{space}' has twins"
    return found


def twin_page(engine: Engine, space: IndexSpace, page: int) -> PageBytes:
    """The same bytes as a page of the twins of `space` has them."""
    return {
        (region.component, region.layer, region.lane_start): b"".join(
            ctypes.string_at(page_address(twin, page) + piece.twin_offset_bytes, piece.length_bytes)
            for piece in _pieces(engine, region, twin)
        )
        for region, twin in _pairs(engine, space)
    }


def twins_of(engine: Engine, space: IndexSpace, pages: Iterable[PageBytes]) -> list[int]:
    """The twin that holds each of these pages whole. Fails when there is none, or one page has two."""
    there = {number: twin_page(engine, space, number) for number in range(_twin_count(engine, space))}
    found = []
    for page in pages:
        holding = [number for number, held in there.items() if held == page]
        assert len(holding) == 1, f"a page of '{space}' is in the twins {holding}"
        found += holding
    assert len(set(found)) == len(found)
    return found


def _pairs(engine: Engine, space: IndexSpace) -> list[tuple[Region, Region]]:
    twins = {(twin.component, twin.layer): twin for twin in engine._attachment.twins if twin.space is TWINS[space]}
    regions = [
        views.region(kind, layer, space=space).region
        for views in engine.views.values()
        for kind, layer in twins
        if layer in views.layers(kind)
    ]
    return [(region, twins[region.component, region.layer]) for region in regions]


def _pieces(engine: Engine, region: Region, twin: Region) -> tuple[Piece, ...]:
    lanes = [(each.lane_start, each.lane_stop) for each in (region, twin)]
    return twin_pieces(engine.geometry, engine.geometry.component(region.component), *lanes)


def _twin_count(engine: Engine, space: IndexSpace) -> int:
    return min(twin.page_count for twin in engine._attachment.twins if twin.space is TWINS[space])

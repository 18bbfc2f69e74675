"""What host twins keep of device pages."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.presets import preset
from kvbridge.core.geometry.twins import Piece, twin_components, twin_page_bytes, twin_pieces
from kvbridge.core.ids import IndexSpace

FLASH, PRO, GQA = preset("deepseek-v4-flash"), preset("deepseek-v4-pro"), preset("tiny-gqa")
C4 = ComponentKind.C4_KV


def bytes_of(geometry: ModelGeometry, space: IndexSpace, on_host: set[ComponentKind] | None = None) -> int:
    """Bytes of a twin's page of all layers and components of a space."""
    return sum(
        len(component.layers) * twin_page_bytes(geometry, component, component.lanes)
        for component in twin_components(geometry, on_host or set(), checkpoints=True)
        if component.space is space
    )


@pytest.mark.parametrize(("geometry", "page", "checkpoint"), [(FLASH, 998_208, 4_080_000), (PRO, 1_430_208, 5_796_480)])
def test_bytes_of_twins(geometry: ModelGeometry, page: int, checkpoint: int):
    assert bytes_of(geometry, IndexSpace.FULL) == page
    assert bytes_of(geometry, IndexSpace.SWA) == checkpoint


def test_what_is_on_the_host_needs_no_twin():
    kinds = [component.kind for component in twin_components(FLASH, {C4}, checkpoints=False)]
    assert kinds == [ComponentKind.C4_INDEXER, ComponentKind.C128_KV]
    assert bytes_of(FLASH, IndexSpace.FULL, {C4}) == 998_208 - 786_240
    assert twin_components(FLASH, {C4, *kinds}, checkpoints=False) == ()


@pytest.mark.parametrize("window", [64, 250, 256])
def test_every_row_that_is_live_at_a_page_end_is_kept(window: int):
    geometry, swa = sliding(window=window)
    (piece,) = twin_pieces(geometry, swa, (1, 2), (1, 2))
    rows = swa.live_rows(3 * 256)
    first, last = rows.start % 256 * 24, (rows.stop - 1) % 256 * 24 + 24
    assert piece.offset_bytes <= first
    assert last <= piece.offset_bytes + piece.length_bytes == 256 * 24
    assert piece.offset_bytes % 16 == piece.length_bytes % 16 == 0


def test_a_rank_has_its_lanes_of_a_twin():
    heads = GQA.component(ComponentKind.MHA_KV)
    each = heads.lane_block_bytes
    assert twin_pieces(GQA, heads, (1, 2), (0, 2)) == (Piece(0, each, each),)
    geometry, swa = sliding(window=128)
    half = 128 * 24
    assert twin_pieces(geometry, swa, (2, 4), (0, 4)) == (
        Piece(half, 2 * half, half),
        Piece(2 * half + half, 3 * half, half),
    )
    with pytest.raises(InvalidInputError, match=r"lanes \[0, 2\) cannot keep a device page of \[1, 3\)"):
        twin_pieces(geometry, swa, (1, 3), (0, 2))


def test_state_of_which_nothing_is_live_at_a_page_end_has_no_twin():
    geometry, tail = sliding(liveness=Liveness.TAIL, block=64)
    assert twin_pieces(geometry, tail, (0, 4), (0, 4)) == ()
    assert [each.kind for each in twin_components(geometry, (), checkpoints=True)] == [ComponentKind.MHA_KV]
    geometry, odd = sliding(liveness=Liveness.TAIL, block=96)
    assert twin_pieces(geometry, odd, (0, 4), (0, 4)) == (Piece(0, 0, odd.page_bytes()),)


def sliding(**fields: object) -> tuple[ModelGeometry, Component]:
    """A geometry with one layer that keeps everything and one that does not, four heads of 24 bytes a row."""
    both = {
        "encoding": Encoding.NATIVE,
        "row_parts_bytes": (24,),
        "slots_per_page": 256,
        "rows_per_logical_page": 256,
        "lanes": 4,
    }
    full = Component(kind=ComponentKind.MHA_KV, layers=(0,), space=IndexSpace.FULL, liveness=Liveness.GROWING, **both)
    swa = Component(
        **{
            "kind": ComponentKind.SWA_KV,
            "layers": (1,),
            "space": IndexSpace.SWA,
            "liveness": Liveness.WINDOW,
            **both,
            **fields,
        }
    )
    return ModelGeometry(name="sliding", layer_count=2, components=(full, swa)), swa

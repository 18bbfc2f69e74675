"""The rules that a component must obey, and the rows that are live."""

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from kvbridge.core.geometry.components import Component, ComponentKind as Kind
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace

FLASH = preset("deepseek-v4-flash")


def changed(kind, **facts):
    return Component.model_validate(FLASH.component(kind).model_dump() | facts)


@pytest.mark.parametrize(
    ("kind", "facts", "words"),
    [
        (Kind.C4_KV, {"layers": (4, 2)}, "ascending and distinct"),
        (Kind.C4_KV, {"space": "host"}, "'host' is where it may reside"),
        (Kind.C4_KV, {"space": "full_twin"}, "names the device index space"),
        (Kind.C4_KV, {"space": "swa"}, "cannot live in window pages"),
        (Kind.C4_KV, {"slots_per_page": 32}, "cannot be rings"),
        (Kind.C4_STATE, {"slots_per_page": 12}, "not a whole number of rings"),
        (Kind.C4_STATE, {"slots_per_page": 4}, "up to 7 rows live at once, but a page stores 4"),
        (Kind.C4_STATE, {"host_capable": True}, "only growing components can live in the host pool"),
        (Kind.SWA_KV, {"window": 0}, "a window of 0 rows"),
        (Kind.SWA_KV, {"tokens_per_row": 2}, "only growing components have rows of several tokens"),
    ],
)
def test_impossible_components_are_not_built(kind, facts, words):
    with pytest.raises(ValidationError, match=words):
        changed(kind, **facts)


@given(st.integers(0, 5_000))
def test_live_rows_against_a_walk_over_the_tokens(tokens):
    tail = {row for row in range(tokens) if row // 4 >= tokens // 4 - 1}
    expected = {
        Kind.C4_KV: {row for row in range(tokens) if 4 * row + 3 < tokens},
        Kind.C128_KV: {row for row in range(tokens) if 128 * row + 127 < tokens},
        Kind.SWA_KV: {row for row in range(tokens) if row + 128 >= tokens},
        Kind.C4_STATE: tail,
        Kind.C4_INDEXER_STATE: tail,
        Kind.C128_STATE: {row for row in range(tokens) if row // 128 == tokens // 128},
    }
    for kind, rows in expected.items():
        live = FLASH.component(kind).live_rows(tokens)
        assert set(range(live.start, live.stop)) == rows
        assert live.count == len(rows)


@given(st.integers(0, 4_000), st.integers(0, 4_000))
def test_only_growing_rows_go_out_before_the_last_token(tokens, more):
    for part in FLASH.components:
        early = part.published_rows(tokens, prompt_tokens=tokens + more)
        if more and part.space is not IndexSpace.FULL:
            assert early.count == 0
        else:
            assert early == part.live_rows(tokens)


@given(st.sampled_from(["tiny-v4", "deepseek-v4-flash", "deepseek-v3.2"]), st.integers(0, 3000), st.data())
def test_bytes_that_are_sent_against_a_walk_over_the_pages(model, tokens, data):
    """Transport tests hold the same against what really moves: a page that is filled goes whole, with its padding."""
    page = preset(model).tokens_per_page
    prefix = data.draw(st.integers(0, tokens // page)) * page
    for part in preset(model).components:
        rows, each = part.live_rows(tokens, prefix), part.rows_per_logical_page
        expected = 0
        for first in range(rows.start // each * each, rows.stop, each):
            inside = min(rows.stop, first + each) - max(rows.start, first)
            expected += (
                part.page_bytes() if inside == part.slots_per_page == each else inside * part.row_bytes * part.lanes
            )
        assert part.sent_bytes(rows) == expected, part.kind

"""Where a prefill engine can go on with a prefix: which models, at which page ends, with what."""

import pytest
from hypothesis import given, strategies as st

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry import tiers
from kvbridge.core.geometry.components import Component, ComponentKind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.models import PRESETS, preset
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Section
from kvbridge.core.session.prefill import RankProgress
from tests.helpers.geometries import new_component

V4, GQA = preset("tiny-v4"), preset("tiny-gqa")
PAGE = V4.tokens_per_page
AROUND = (0, 1, 2, 3, 4, 127, 128, 129, PAGE - 1)
"""Tokens behind a page's end."""


def with_state(liveness: Liveness, *, block: int = 1, overlap: int = 0) -> ModelGeometry:
    """A model that keeps a state of this kind in its request slot."""
    slots = {Liveness.TAIL: block * (overlap + 1), Liveness.WHOLE: 1}[liveness]
    form = {"slots": slots, "rows": slots * 2**32, "block": block, "overlap": overlap, "encoding": Encoding.FP32}
    state = new_component(ComponentKind.C128_STATE, (0,), IndexSpace.REQUEST, liveness, (64,), **form)
    return GQA.model_copy(update={"components": (*GQA.components, state)})


@pytest.mark.parametrize("name", PRESETS)
def test_every_model_that_is_known_can_go_on(name: str) -> None:
    assert not tiers.why_no_prefixes(preset(name))
    assert tiers.needs_checkpoints(preset(name)) is ("v4" in name)


def test_a_state_that_is_not_empty_at_a_pages_end_is_named() -> None:
    assert "c128_state" in tiers.why_no_prefixes(with_state(Liveness.WHOLE))
    assert "c128_state" in tiers.why_no_prefixes(with_state(Liveness.TAIL, block=96))
    assert "c128_state" in tiers.why_no_prefixes(with_state(Liveness.TAIL, block=128, overlap=1))
    assert not tiers.why_no_prefixes(with_state(Liveness.TAIL, block=128))


@given(
    prompt=st.integers(1, 20 * PAGE),
    computed=st.integers(0, 20),
    known=st.integers(0, 20),
    interval=st.sampled_from([0, 100, PAGE, 2 * PAGE, 3 * PAGE, 1000]),
)
def test_checkpoints_are_at_page_ends_behind_what_is_computed(prompt: int, computed: int, known: int, interval: int):
    start = min(computed * PAGE, tiers.most_reusable_tokens(V4, prompt))
    junction = max(start, min(known * PAGE, prompt // PAGE * PAGE))
    found = tiers.wanted_checkpoints(
        V4, prompt, computed_tokens=start, known_tokens=known * PAGE, interval_tokens=interval
    )
    assert list(found) == sorted(set(found))
    assert all(end % PAGE == 0 and start < end <= prompt for end in found)
    assert junction == start or junction in found
    last = prompt // PAGE * PAGE
    for end, cause in found.items():
        expected = tiers.CheckpointCause.DIVERGENCE if end == junction else tiers.CheckpointCause.INTERVAL
        assert cause is (tiers.CheckpointCause.PROMPT_END if end == last else expected)
    reached = range(interval, prompt // PAGE * PAGE, interval) if interval else ()
    assert {end // PAGE * PAGE for end in reached if end // PAGE * PAGE > start} <= set(found)


@given(
    pages=st.integers(0, 6),
    behind=st.sampled_from(AROUND),
    computed=st.integers(0, 6),
    held=st.integers(0, 6),
    middle=st.integers(0, 6 * PAGE + 255),
)
def test_whoever_holds_more_each_row_that_decode_lacks_is_sent_once(pages, behind, computed, held, middle):
    """`held`: pages of the prompt that decode has; `computed`: where prefill starts; `middle`: one publication on the way."""
    prompt = max(1, pages * PAGE + behind)
    start, prefix = (
        min(computed * PAGE, tiers.most_reusable_tokens(V4, prompt)),
        min(held * PAGE, prompt // PAGE * PAGE),
    )
    progress = RankProgress(range(V4.layer_count), prompt_tokens=prompt, computed_tokens=start)
    sections = progress.next_sections(prefix)
    progress.publish(max(start, min(middle, prompt)), progress.layers)
    sections += progress.next_sections(prefix)
    progress.publish(prompt, progress.layers)
    sections += progress.next_sections(prefix)
    for component in V4.components:
        sent = [row for section in sections for row in _rows(component, section)]
        live = component.live_rows(prompt, prefix)
        assert sent == list(range(live.start, live.stop)), component.kind


def _rows(component: Component, section: Section) -> range:
    rows = section.added_rows(component)
    return range(rows.start, rows.stop)


FLASH, PRO, GQA = preset("deepseek-v4-flash"), preset("deepseek-v4-pro"), preset("tiny-gqa")
C4 = ComponentKind.C4_KV


def bytes_of(geometry: ModelGeometry, space: IndexSpace, on_host: set[ComponentKind] | None = None) -> int:
    """Bytes of a twin's page of all layers and components of a space."""
    return sum(
        len(component.layers) * tiers.copy_page_bytes(geometry, component, component.lanes)
        for component in tiers.copied_components(geometry, on_host or set(), checkpoints=True)
        if component.space is space
    )


@pytest.mark.parametrize(("geometry", "page", "checkpoint"), [(FLASH, 998_208, 4_080_000), (PRO, 1_430_208, 5_796_480)])
def test_bytes_of_twins(geometry: ModelGeometry, page: int, checkpoint: int):
    assert bytes_of(geometry, IndexSpace.FULL) == page
    assert bytes_of(geometry, IndexSpace.SWA) == checkpoint


def test_what_is_on_the_host_needs_no_twin():
    kinds = [component.kind for component in tiers.copied_components(FLASH, {C4}, checkpoints=False)]
    assert kinds == [ComponentKind.C4_INDEXER, ComponentKind.C128_KV]
    assert bytes_of(FLASH, IndexSpace.FULL, {C4}) == 998_208 - 786_240
    assert tiers.copied_components(FLASH, {C4, *kinds}, checkpoints=False) == ()


@pytest.mark.parametrize("window", [64, 250, 256])
def test_every_row_that_is_live_at_a_page_end_is_kept(window: int):
    geometry, swa = sliding(window=window)
    (piece,) = tiers.copy_pieces(geometry, swa, (1, 2), (1, 2))
    rows = swa.live_rows(3 * 256)
    first, last = rows.start % 256 * 24, (rows.stop - 1) % 256 * 24 + 24
    assert piece.offset_bytes <= first
    assert last <= piece.offset_bytes + piece.length_bytes == 256 * 24
    assert piece.offset_bytes % 16 == piece.length_bytes % 16 == 0


def test_a_rank_has_its_lanes_of_a_twin():
    heads = GQA.component(ComponentKind.MHA_KV)
    each = heads.lane_block_bytes
    assert tiers.copy_pieces(GQA, heads, (1, 2), (0, 2)) == (tiers.Piece(0, each, each),)
    geometry, swa = sliding(window=128)
    half = 128 * 24
    assert tiers.copy_pieces(geometry, swa, (2, 4), (0, 4)) == (
        tiers.Piece(half, 2 * half, half),
        tiers.Piece(2 * half + half, 3 * half, half),
    )
    with pytest.raises(InvalidInputError, match=r"lanes \[0, 2\) cannot keep a device page of \[1, 3\)"):
        tiers.copy_pieces(geometry, swa, (1, 3), (0, 2))


def test_state_of_which_nothing_is_live_at_a_page_end_has_no_twin():
    geometry, tail = sliding(liveness=Liveness.TAIL, block=64)
    assert tiers.copy_pieces(geometry, tail, (0, 4), (0, 4)) == ()
    assert [each.kind for each in tiers.copied_components(geometry, (), checkpoints=True)] == [ComponentKind.MHA_KV]
    geometry, odd = sliding(liveness=Liveness.TAIL, block=96)
    assert tiers.copy_pieces(geometry, odd, (0, 4), (0, 4)) == (tiers.Piece(0, 0, odd.page_bytes()),)


def sliding(**fields: object) -> tuple[ModelGeometry, Component]:
    """A geometry with one layer that keeps everything and one that does not, four heads of 24 bytes a row."""
    liveness, form = fields.pop("liveness", Liveness.WINDOW), {"slots": 256, "lanes": 4}
    full = new_component(ComponentKind.MHA_KV, (0,), IndexSpace.FULL, Liveness.GROWING, (24,), **form)
    swa = new_component(ComponentKind.SWA_KV, (1,), IndexSpace.SWA, liveness, (24,), **(form | fields))
    return ModelGeometry(name="sliding", layer_count=2, components=(full, swa)), swa

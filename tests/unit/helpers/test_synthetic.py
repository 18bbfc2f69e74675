import numpy as np
import pytest

from kvbridge.core.geometry.components import ComponentKind, Liveness
from kvbridge.core.geometry.models import preset
from kvbridge.core.plan.operations import Section
from kvbridge.tier.keys import Keys, PrefixIdentity, page_keys
from tests.helpers import synthetic
from tests.helpers.synthetic import compare, expected_rows, fill
from tests.helpers.torch_pools import Form, copy_request, make_pools

TINY = preset("tiny-v4")
GQA = preset("tiny-gqa")
ROOM = 2**64 - 3


def whole(tokens: int) -> Section:
    return Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)


@pytest.mark.parametrize("geometry", [TINY, GQA], ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("tokens", [1, 4, 255, 257, 640, 1025])
def test_what_was_filled_in_chunks_checks_after_a_move(geometry, tokens):
    source = make_pools(geometry, tokens=tokens, seed=1)
    target = make_pools(geometry, tokens=tokens, seed=2, form=Form(page_first=True, extent_pages=2))
    written = 0
    for start in range(0, tokens, 100):
        section = Section(prompt_tokens=tokens, start_token=start, stop_token=min(tokens, start + 100))
        written += fill(source.views, room=ROOM, tables=source.tables, section=section)
    rows = [(c, c.live_rows(tokens).count) for c in geometry.components]
    assert written == sum(len(c.layers) * c.lanes * c.row_bytes * count for c, count in rows)
    assert compare(source.views, room=ROOM, tables=source.tables, tokens=tokens).mismatches == ()
    copy_request(geometry, source, target, tokens=tokens)
    assert compare(target.views, room=ROOM, tables=target.tables, tokens=tokens).mismatches == ()


def test_one_wrong_byte_is_found_and_named():
    tokens = 515
    pools = make_pools(TINY, tokens=tokens)
    fill(pools.views, room=ROOM, tables=pools.tables, section=whole(tokens))
    component = TINY.component(ComponentKind.C4_KV)
    view = pools.views.home(component.kind, 4, tables=pools.tables)
    page_id = int(pools.tables[view.region.space].ids[1])
    # Row 100 is slot 36 of logical page 1; byte 97 of a row is the second one of its scales.
    view.page(page_id)[component.part_offset(1) + 36 * 8 + 1] ^= 0x10
    (mismatch,) = compare(pools.views, room=ROOM, tables=pools.tables, tokens=tokens).mismatches
    assert (mismatch.component, mismatch.layer, mismatch.lane, mismatch.row) == (component.kind, 4, 0, 100)
    assert (mismatch.page_id, mismatch.slot, mismatch.first_byte, mismatch.wrong_bytes) == (page_id, 36, 97, 1)
    assert mismatch.expected ^ mismatch.found == 0x10
    assert f"c4_kv layer 4 lane 0 row 100 (page {page_id} slot 36)" in str(mismatch)
    assert compare(pools.views, room=ROOM, tables=pools.tables, tokens=tokens, prefix_tokens=512).mismatches == ()


def test_pages_of_another_room_layer_or_place_do_not_check():
    tokens = 300
    pools = make_pools(TINY, tokens=tokens)
    fill(pools.views, room=1, tables=pools.tables, section=whole(tokens))
    assert len(compare(pools.views, room=2, tables=pools.tables, tokens=tokens).mismatches) == 20
    component = TINY.component(ComponentKind.C4_INDEXER)
    facts = {"room": 1, "layer": 2, "lanes": (0, 1), "start_row": 0, "stop_row": 64}
    rows = expected_rows(component, **facts)
    for change in ({"room": 0}, {"layer": 4}, {"lanes": (1, 2)}, {"start_row": 64, "stop_row": 128}):
        other = expected_rows(component, **{**facts, **change})
        assert float((other == rows).mean()) < 0.02, change
    assert not np.array_equal(rows, expected_rows(TINY.component(ComponentKind.C4_KV), **facts)[:, : rows.shape[1]])
    assert len({bytes(row) for row in rows}) == 64


IDENTITY = PrefixIdentity(model="m", revision="1", fingerprint="tiny", tokens_per_page=TINY.tokens_per_page)


def keys_of(*parts: tuple[int, int]) -> Keys:
    """The page keys of a prompt of so many tokens of each id."""
    return page_keys(IDENTITY, np.repeat([token for token, _ in parts], [count for _, count in parts]))


def filled(room: int, tokens: int, keys: Keys):
    """Pools that hold a request, written in chunks that end inside pages."""
    pools = make_pools(TINY, tokens=tokens, seed=room)
    for start in range(0, tokens, 300):
        section = Section(prompt_tokens=tokens, start_token=start, stop_token=min(tokens, start + 300))
        fill(pools.views, room=room, tables=pools.tables, section=section, keys=keys)
    return pools


def wrong(pools, *, room: int, tokens: int, keys: Keys, prefix_tokens: int = 0) -> set[tuple[ComponentKind, int]]:
    found = compare(pools.views, room=room, tables=pools.tables, tokens=tokens, keys=keys, prefix_tokens=prefix_tokens)
    each = {(one.component, one.row // TINY.component(one.component).rows_per_logical_page) for one in found.mismatches}
    assert bool(each) == bool(found.wrong_bytes)
    return each


GROWING = {each.kind for each in TINY.components if each.liveness is Liveness.GROWING}
PAGE = TINY.tokens_per_page


def test_rooms_with_one_prefix_have_the_same_bytes_there_and_others_everywhere_else(monkeypatch):
    monkeypatch.setattr(synthetic, "MOST_NAMED", 100_000)
    tokens = 4 * PAGE + 100
    ours = keys_of((1, 2 * PAGE), (2, tokens - 2 * PAGE))
    pools = filled(1, tokens, ours)
    assert not wrong(pools, room=1, tokens=tokens, keys=ours)
    for theirs in (
        keys_of((1, 2 * PAGE), (3, tokens - 2 * PAGE)),
        keys_of((1, 2 * PAGE + 1), (2, tokens - 2 * PAGE - 1)),
    ):
        differing = wrong(pools, room=2, tokens=tokens, keys=theirs)
        assert {kind for kind, _ in differing} == {each.kind for each in TINY.components}
        assert {each for each in differing if each[0] in GROWING} == {
            (kind, page) for kind in GROWING for page in (2, 3, 4)
        } - {
            (ComponentKind.C128_KV, 4)  # of 100 tokens it has no row
        }
    other_start = wrong(
        pools, room=1, tokens=tokens, keys=keys_of((1, 1), (2, 1), (1, 2 * PAGE - 2), (2, tokens - 2 * PAGE))
    )
    assert {one for one in other_start if one[0] in GROWING} == {(kind, page) for kind in GROWING for page in range(4)}


@pytest.mark.parametrize("tokens", [100, 2 * PAGE, 2 * PAGE + 1])
def test_the_same_prompt_in_two_rooms(tokens, monkeypatch):
    """Bytes that end with a page are the same in both, as a checkpoint of one serves the other; other bytes are each room's own."""
    monkeypatch.setattr(synthetic, "MOST_NAMED", 100_000)
    keys = keys_of((1, tokens))
    found = wrong(filled(1, tokens, keys), room=2, tokens=tokens, keys=keys)
    assert bool(found) == bool(tokens % PAGE)
    assert not {kind for kind, page in found if page < tokens // PAGE} & GROWING

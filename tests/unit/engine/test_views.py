import numpy as np
import pytest
import torch

from kvbridge.core.errors import InvalidInputError, NotFoundError, PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, PageTable
from kvbridge.core.plan.operations import Section
from kvbridge.engine.views import PoolViews, place_rows, section_rows
from tests.helpers.torch_pools import Form, make_pools, part

TINY = preset("tiny-v4")
GQA = preset("tiny-gqa")
FORMS = [
    Form(),
    Form(page_first=True),
    Form(extent_pages=1),
    Form(page_first=True, extent_pages=3, host=frozenset({ComponentKind.C4_KV})),
]


def random_rows(count: int, row_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


def by_hand(pools, component, layer, row) -> bytes:
    """Read one row from raw pages, by the words of Component's docstring."""
    view = pools.views.home(component.kind, layer, tables=pools.tables)
    table = pools.tables[view.region.space]
    page = view.page(int(table.ids[row // component.rows_per_logical_page - table.first_page]))
    raw, slot, found = bytes(page.numpy()), row % component.slots_per_page, b""
    for lane in range(view.region.lanes):
        offset = lane * component.lane_block_bytes
        for part_bytes in component.row_parts_bytes:
            found += raw[offset + slot * part_bytes : offset + (slot + 1) * part_bytes]
            offset += component.slots_per_page * part_bytes
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("geometry", [TINY, GQA], ids=lambda geometry: geometry.name)
@pytest.mark.parametrize("tokens", [3, 700, 769])
def test_rows_lie_where_the_component_says(geometry, form, tokens):
    if geometry is GQA:
        form = Form(page_first=form.page_first, extent_pages=form.extent_pages)
    pools = make_pools(geometry, tokens=tokens, form=form)
    for component in geometry.components:
        live = component.live_rows(tokens)
        for layer in component.layers:
            rows = random_rows(live.count, component.lanes * component.row_bytes)
            mine = part(pools.views, pools.tables, component.kind, layer, live.start, live.stop)
            mine.write(rows)
            assert torch.equal(mine.read(), rows)
            for index in {0, live.count // 2, live.count - 1} if live.count else ():
                assert by_hand(pools, component, layer, live.start + index) == bytes(rows[index].numpy())


def test_writing_touches_nothing_else():
    pools = make_pools(TINY, tokens=512, form=Form(page_first=True))
    component = TINY.component(ComponentKind.C4_KV)
    rows = random_rows(3, component.row_bytes)
    rows[rows == 0xA5] = 0
    part(pools.views, pools.tables, component.kind, 2, 62, 65).write(rows)
    changed = sum(int((memory != 0xA5).sum()) for memory in pools.memory)
    assert changed == rows.numel()


def test_a_head_sharded_rank_holds_its_lanes_only():
    component = GQA.component(ComponentKind.MHA_KV)
    pools = make_pools(GQA, tokens=300, form=Form(tp=(1, 2)))
    view = pools.views.home(component.kind, 0, tables=pools.tables)
    assert (view.region.lane_start, view.region.lane_stop, view.row_bytes) == (2, 4, 2 * component.row_bytes)
    rows = random_rows(300, view.row_bytes)
    part(pools.views, pools.tables, component.kind, 0, 0, 300).write(rows)
    assert by_hand(pools, component, 0, 299) == bytes(rows[299].numpy())


def test_a_request_with_host_pages_lives_there():
    device = make_pools(TINY, tokens=300)
    host = make_pools(TINY, tokens=300, form=Form(host=frozenset({ComponentKind.C4_KV})))
    views = PoolViews(TINY, device.regions + [region for region in host.regions if region.space is IndexSpace.HOST])
    both = {**device.tables, **host.tables}
    assert views.home(ComponentKind.C4_KV, 2, tables=both).region.space is IndexSpace.HOST
    assert views.home(ComponentKind.C4_KV, 2, tables=device.tables).region.space is IndexSpace.FULL
    assert views.home(ComponentKind.C4_INDEXER, 2, tables=both).region.space is IndexSpace.FULL


def test_mistakes_are_refused_with_their_names():
    pools = make_pools(TINY, tokens=300)
    views, tables = pools.views, pools.tables
    good = random_rows(1, TINY.component(ComponentKind.C4_KV).row_bytes)
    swa, mixed = {IndexSpace.SWA: tables[IndexSpace.SWA]}, {IndexSpace.FULL: tables[IndexSpace.SWA]}
    wrong = {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array([99], dtype=np.int32))}
    for asked, layer, start, rows, error, complaint in (
        (tables, 3, 0, good, NotFoundError, "c4_kv layer 3 is not on this rank"),
        (tables, 2, 0, good[:, :-1], InvalidInputError, "need uint8 rows of shape"),
        (tables, 2, 128, good, PageOutOfBoundsError, "logical pages 2 to 2"),
        (swa, 2, 0, good, InvalidInputError, "pages in 'swa', this rank needs one of 'full'"),
        (mixed, 2, 0, good, InvalidInputError, "cannot index space"),
        (wrong, 2, 0, good, PageOutOfBoundsError, "do not all exist"),
    ):
        with pytest.raises(error, match=complaint):
            part(views, asked, ComponentKind.C4_KV, layer, start, start + 1).write(rows)
    with pytest.raises(PageOutOfBoundsError, match="do not all exist"):
        part(views, wrong, ComponentKind.C4_KV, 2, 0, 1).read()
    with pytest.raises(InvalidInputError, match="two regions"):
        PoolViews(TINY, [*pools.regions, pools.regions[0]])
    with pytest.raises(InvalidInputError, match="another geometry"):
        PoolViews(TINY, [pools.regions[0].model_copy(update={"page_bytes": 8})])
    with pytest.raises(NotFoundError, match="space 'host'"):
        views.region(ComponentKind.C4_KV, 2, space=IndexSpace.HOST)


def test_a_ring_refuses_to_overwrite_itself():
    state = TINY.component(ComponentKind.C4_STATE)
    table = PageTable(IndexSpace.SWA, np.array([4, 2], dtype=np.int32))
    assert place_rows(state, table, 252, 259).page_ids.tolist() == [4] * 4 + [2] * 3
    assert place_rows(state, table, 252, 259).slots.tolist() == [4, 5, 6, 7, 0, 1, 2]
    assert len(place_rows(state, table, 250, 260).slots) == 10  # six in one page, four in the next
    with pytest.raises(InvalidInputError, match="ring of 8 slots"):
        place_rows(state, table, 3, 12)


def test_sections_name_each_row_once():
    for component in TINY.components:
        seen: list[int] = []
        for start, stop in ((0, 5), (5, 130), (130, 131), (131, 515)):
            section = Section(prompt_tokens=515, prefix_tokens=256, start_token=start, stop_token=stop)
            rows = section_rows(component, section)
            seen += range(rows.start, rows.stop)
        live = component.live_rows(515, 256)
        assert seen == list(range(live.start, live.stop))

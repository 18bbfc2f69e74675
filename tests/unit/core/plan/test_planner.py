"""Operations of a plan: how many, what goes together, dead bytes, refusals; and addresses of pages against a plain loop."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.config.pools import HostLayout
from kvbridge.config.transports import TCP_OPERATION_COST_BYTES, MooncakeSettings
from kvbridge.core.errors import PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind, ComponentKind as Kind
from kvbridge.core.geometry.manifest import RankManifest, fingerprint
from kvbridge.core.geometry.pages import first_window_page, pages_needed
from kvbridge.core.ids import IndexSpace as Space, PageTable, Rank
from kvbridge.core.plan.operations import NO_BORDERS, Operations, PageArray, Section, page_copies
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import find_neighbours, plan
from kvbridge.kernels.copies import StretchCopier
from kvbridge.pool.memory.layout import RankPart, device_placement, host_placement
from tests.helpers.geometries import flash, gqa
from tests.helpers.gpu import Form, random_bytes
from tests.helpers.manifests import Instance, Layout, new_region

NO_LIMIT = 1 << 40
PAGES = {Space.FULL: 64, Space.SWA: 8, Space.REQUEST: 4, Space.HOST: 128}


def table(space: Space, ids, first_page: int = 0) -> dict[Space, PageTable]:
    return {space: PageTable(space, np.array(ids, dtype=np.int32), first_page)}


def flash_tables(tokens: int, *, full: int = 0, swa: int = 0, request: int = 0, host: int = 0):
    """Consecutive pages in each space, from the given id on."""
    pages, first = -(-tokens // 256), max(0, tokens - 128) // 256
    return (
        table(Space.FULL, range(full, full + pages))
        | table(Space.HOST, range(host, host + pages))
        | table(Space.SWA, range(swa, swa + pages - first), first)
        | table(Space.REQUEST, [request])
    )


def whole(tokens: int, **changes) -> Section:
    return Section(**{"prompt_tokens": tokens, "start_token": 0, "stop_token": tokens} | changes)


def pair(source: Instance, destination: Instance, *, writer: int = 0, reader: int = 0) -> Pairing:
    readers = destination.manifests()
    return Pairing.create(
        source.geometry,
        source.manifests()[writer],
        readers[reader],
        destination_ordinal=reader,
        destination_count=len(readers),
    )


def flash_pair() -> Pairing:
    return pair(Instance(flash(), PAGES), Instance(flash(), PAGES, base=1 << 50).with_host(Kind.C4_KV))


def test_nothing_is_kept_of_peers_that_are_gone():
    pairing = flash_pair()
    plan(pairing, whole(300), flash_tables(300), flash_tables(300), max_operation_bytes=NO_LIMIT)
    addresses = [weakref.ref(group.destination.pages.bases) for group in pairing.groups]
    del pairing
    gc.collect()
    assert not [each for each in addresses if each() is not None]


def gqa_pair(source: Layout | None = None, destination: Layout | None = None, **geometry) -> Pairing:
    model = gqa(**geometry)
    sides = [
        Instance(model, PAGES, layouts={Kind.MHA_KV: layout or Layout()}, base=base)
        for layout, base in ((source, 1 << 40), (destination, 1 << 50))
    ]
    return pair(*sides)


def plan_gqa(pairing: Pairing, tokens: int, ids=None, **changes):
    """Plan with the same page ids on both sides (16 tokens a page); by default consecutive from 5 on."""
    pages = -(-tokens // 16)
    tables = table(Space.FULL, range(5, 5 + pages) if ids is None else ids)
    limit = changes.pop("max_operation_bytes", NO_LIMIT)
    return plan(pairing, whole(tokens, **changes), tables, tables, max_operation_bytes=limit)


def test_a_flash_request_of_whole_pages_moves_the_documented_bytes():
    planned = plan(
        flash_pair(),
        whole(2_048),
        flash_tables(2_048, full=3),
        flash_tables(2_048, host=9),
        max_operation_bytes=NO_LIMIT,
    )
    amounts = planned.amounts
    assert {kind: amounts[kind].bytes for kind in amounts} == {
        Kind.C4_KV: 8 * 21 * 37_440,
        Kind.C4_INDEXER: 8 * 21 * 8_448,
        Kind.C128_KV: 8 * 20 * 1_728,
        Kind.SWA_KV: 43 * 128 * 584,
        Kind.C4_STATE: 21 * 4 * 8_192,
        Kind.C4_INDEXER_STATE: 21 * 4 * 2_048,
    }
    assert amounts[Kind.C4_KV].operations == 21
    assert amounts[Kind.SWA_KV].operations == 43 * 2, "128 of 256 slots: values and scales lie apart"
    assert amounts[Kind.C4_KV].lane_rows == 8 * 21 * 64
    assert amounts[Kind.SWA_KV].lane_rows == 43 * 128


def test_page_first_on_both_sides_is_one_operation_for_all_layers():
    page_first = Layout(page_first=True)
    planned = plan_gqa(gqa_pair(page_first, page_first), 160)
    assert planned.operations.length.tolist() == [3 * 10 * 4_096]
    assert planned.amounts[Kind.MHA_KV].operations == 1
    assert planned.amounts[Kind.MHA_KV].lane_rows == 3 * 160 * 4


def test_page_first_joins_the_neighbours_among_the_layers_of_a_section():
    page_first = Layout(page_first=True)
    planned = plan_gqa(gqa_pair(page_first, page_first, layers=4), 32, layers=(0, 1, 3))
    assert sorted(planned.operations.length.tolist()) == [4_096] * 2 + [2 * 4_096] * 2


def test_which_layers_touch_is_kept_for_all_layers_of_a_pair_and_not_for_some():
    pairing = gqa_pair()
    plan_gqa(pairing, 32, layers=(0, 1))
    assert not pairing.neighbours
    plan_gqa(pairing, 32)
    assert pairing.neighbours


def test_long_operations_are_cut_into_equal_aligned_pieces():
    planned = plan_gqa(gqa_pair(layers=1), 160, max_operation_bytes=17_000)
    lengths = planned.operations.length
    assert lengths.tolist() == [16_384, 16_384, 8_192], "40 KiB at 17,000 bytes: 4 KiB multiples"
    ends = planned.operations.source + lengths
    assert ends[:-1].tolist() == planned.operations.source[1:].tolist()
    assert planned.amounts[Kind.MHA_KV].operations == 3


@pytest.mark.parametrize(
    ("side", "wrong", "message"),
    [
        (0, 64, r"^source rank pp0.tp0: c4_kv would use page id 64 of space 'full' .* logical page 1, .* \[0, 64\)$"),
        (0, -1, r"^source rank pp0.tp0: c4_kv would use page id -1 of space 'full'"),
        (1, 128, r"^destination rank pp0.tp0: c4_kv would use page id 128 of space 'host' .*\[0, 128\)$"),
        (1, -7, r"^destination rank pp0.tp0: c4_kv would use page id -7 of space 'host'"),
    ],
)
def test_page_ids_outside_a_region_are_refused(side, wrong, message):
    tables = [flash_tables(768), flash_tables(768)]
    space = (Space.FULL, Space.HOST)[side]
    tables[side] |= table(space, [1, wrong, 2])
    with pytest.raises(PageOutOfBoundsError, match=message):
        plan(flash_pair(), whole(768), *tables, max_operation_bytes=NO_LIMIT)


def test_page_ids_of_other_replicas_and_of_partial_pages_are_checked_too():
    source = Instance(flash(), PAGES, tp_size=4)
    pairing = pair(source, Instance(flash(), PAGES, base=1 << 50), writer=3)
    for count in (512, 511):
        with pytest.raises(PageOutOfBoundsError, match="page id 99 of space 'full'"):
            plan(
                pairing,
                whole(count),
                flash_tables(512) | table(Space.FULL, [0, 99]),
                flash_tables(512),
                max_operation_bytes=NO_LIMIT,
            )


def test_a_short_table_is_refused_with_what_it_covers():
    short = flash_tables(768) | table(Space.HOST, [0, 1])
    with pytest.raises(PageOutOfBoundsError, match=r"needs logical page 2 of space 'host', .* covers \[0, 2\)"):
        plan(flash_pair(), whole(768), flash_tables(768), short, max_operation_bytes=NO_LIMIT)
    late = flash_tables(700) | table(Space.SWA, [0], 2)
    with pytest.raises(PageOutOfBoundsError, match=r"^source .*logical page 2 of space 'swa', .* covers \[3, 4\)"):
        plan(flash_pair(), whole(768), flash_tables(768) | table(Space.SWA, [0], 3), late, max_operation_bytes=NO_LIMIT)


PAGE_FIRST = dict.fromkeys(Kind, Layout(page_first=True))
ONE_RANK = Rank(pp=0, tp=0)
DEVICE = frozenset({Space.FULL, Space.SWA, Space.REQUEST})


def both(geometry=None, **changes) -> Pairing:
    return pair(*(Instance(geometry or flash(), PAGES, base=base, **changes) for base in (1 << 40, 1 << 50)))


def planned(pairing: Pairing, *, start: int = 0, stop: int = 256, prompt: int = 256, cost: int = 0):
    tables = {space: PageTable(space, np.array([0, 1], dtype=np.int32)) for space in DEVICE}
    section = Section(prompt_tokens=prompt, start_token=start, stop_token=stop)
    limits = {"max_operation_bytes": 1 << 30, "operation_cost_bytes": cost}
    return plan(pairing, section, tables, tables, **limits)


def lying(*, host: frozenset[Kind], base: int) -> RankManifest:
    """One rank of Flash in `page_first` pools, as a node lays them out."""
    part = RankPart.of(flash(), ONE_RANK, pp_size=1, tp_size=1)
    pools = [device_placement(flash(), part, page_counts=dict.fromkeys(DEVICE, 256), exclude=host, page_first=True)]
    if host:
        pools.append(host_placement(flash(), host, page_count=256, layout=HostLayout.PAGE_FIRST))
    regions = [
        region
        for number, pool in enumerate(pools)
        for region in pool.regions_at([base + (number << 44)] * len(pool.mappings))
    ]
    return RankManifest(fingerprint=fingerprint(flash()), rank=ONE_RANK, pp_size=1, tp_size=1, regions=tuple(regions))


@pytest.mark.parametrize(("tokens", "budget"), [(256, 10), (8_192, 30), (32_768, 60)])
def test_a_request_of_flash_in_one_run_takes_no_more_operations_than_its_budget(tokens, budget):
    c4 = frozenset({Kind.C4_KV})
    sides = lying(host=frozenset(), base=1 << 40), lying(host=c4, base=1 << 50)
    pairing = Pairing.create(flash(), *sides, destination_ordinal=0, destination_count=1)
    tables = []
    for host in (frozenset(), c4):
        counts = pages_needed(flash(), tokens=tokens, host=host)
        firsts = {Space.SWA: first_window_page(flash(), tokens)}
        tables.append(
            {
                space: PageTable(space, np.arange(count, dtype=np.int32), firsts.get(space, 0))
                for space, count in counts.items()
            }
        )
    section = Section(prompt_tokens=tokens, start_token=0, stop_token=tokens)
    limits = {"max_operation_bytes": MooncakeSettings().max_operation_bytes}
    live = plan(pairing, section, *tables, **limits, operation_cost_bytes=0).operations
    dead = plan(pairing, section, *tables, **limits, operation_cost_bytes=TCP_OPERATION_COST_BYTES).operations
    assert len(dead) <= budget
    assert len(live) >= len(dead)
    assert live.total_bytes <= dead.total_bytes


def test_dead_bytes_go_along_where_they_are_few_enough():
    pairing = both(layouts=PAGE_FIRST, together=DEVICE)
    exact, near, whole = (planned(pairing, cost=cost) for cost in (0, 1_024, 1 << 20))
    assert len(exact.operations) - len(near.operations) >= 43, "values and scales of a layer, with dead scales between"
    assert near.operations.total_bytes - exact.operations.total_bytes >= 43 * 1_024
    assert len(whole.operations) == 2, "what grows, and what does not"
    for planned_ in (exact, near, whole):
        assert {kind: each.lane_rows for kind, each in planned_.amounts.items()} == {
            kind: each.lane_rows for kind, each in exact.amounts.items()
        }
        assert sum(each.bytes for each in planned_.amounts.values()) == planned_.operations.total_bytes
        assert sum(each.operations for each in planned_.amounts.values()) == len(planned_.operations)


def test_only_the_last_section_takes_dead_bytes_along():
    pairing = both(layouts=PAGE_FIRST, together=DEVICE)
    early = planned(pairing, stop=200, prompt=300, cost=1 << 20)
    assert early.operations.total_bytes == planned(pairing, stop=200, prompt=300).operations.total_bytes
    last = planned(pairing, start=200, stop=300, prompt=300, cost=1 << 20)
    assert len(last.operations) < len(planned(pairing, start=200, stop=300, prompt=300).operations)


def test_blocks_that_touch_by_chance_are_not_neighbours():
    """Pools of one page, without a gap between two of their blocks: what follows a page's end is another registration."""
    layout = {Kind.MHA_KV: Layout(page_first=True, gap_bytes=0)}
    first, second = (
        [
            Instance(gqa(layers=4), {Space.FULL: 1}, layouts=layout, base=base).manifests()[0]
            for base in (at, at + 2 * 4_096)
        ]
        for at in (1 << 40, 1 << 50)
    )
    regions = []
    for low, high in (first, second):
        stride = {"page_stride_bytes": 2 * 4_096}
        both_blocks = [*low.regions[:2], *(region for region in high.regions[:2])]
        layers = [region.model_copy(update={"layer": layer} | stride) for layer, region in enumerate(both_blocks)]
        regions.append(low.model_copy(update={"regions": tuple(layers)}))
    pairing = Pairing.create(gqa(layers=4), *regions, destination_ordinal=0, destination_count=1)
    (band,) = find_neighbours(pairing.groups)
    assert (band.rows, band.page_bytes) == (2, 2 * 4_096)


FORMS = st.builds(
    Form,
    layers=st.just(3),
    pages=st.integers(1, 9),
    page_bytes=st.sampled_from([1, 16, 48, 600]),
    pages_per_extent=st.integers(0, 4),
    page_first=st.booleans(),
    gap_bytes=st.sampled_from([0, 7, 48]),
)


def pages_at(form: Form, base: int) -> PageArray:
    sizes = {"pages": form.pages, "per_extent": min(form.each, form.pages), "page_bytes": form.page_bytes}
    sizes |= {"stride": form.page_bytes * (form.layers if form.page_first else 1)}
    starts = [
        [base + form.offset(layer, first) for first in range(0, form.pages, form.each)] for layer in range(form.layers)
    ]
    return PageArray.of([new_region(ComponentKind.MHA_KV, layer, each, **sizes) for layer, each in enumerate(starts)])


@st.composite
def copies(draw: st.DrawFn) -> tuple[Form, Form, int, list[tuple[int, int]]]:
    source, target = draw(FORMS), draw(FORMS)
    page_bytes = draw(st.integers(1, min(source.page_bytes, target.page_bytes)))
    destinations = draw(st.permutations(range(target.pages)))[: draw(st.integers(0, target.pages))]
    return source, target, page_bytes, [(draw(st.integers(0, source.pages - 1)), page) for page in destinations]


@given(copies())
def test_copies_the_named_pages_of_all_layers_and_nothing_else(case):
    source_form, target_form, page_bytes, pairs = case
    source, target = random_bytes(source_form.total_bytes, 1), random_bytes(target_form.total_bytes, 2)
    expected = target.copy()
    for layer in range(3):
        for a, b in pairs:
            start, stop = source_form.offset(layer, a), target_form.offset(layer, b)
            expected[stop : stop + page_bytes] = source[start : start + page_bytes]
    here, there = (np.array(column, dtype=np.int32) for column in (zip(*pairs, strict=True) if pairs else ([], [])))
    sides = (pages_at(source_form, source.ctypes.data), here), (pages_at(target_form, target.ctypes.data), there)
    StretchCopier(None).submit(page_copies(*sides, page_bytes))
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("wrong", [4, -2])
def test_an_id_that_does_not_exist_is_refused_with_its_number(wrong: int):
    pages = PageArray.contiguous(4096, page_count=4, stride_bytes=32)
    with pytest.raises(PageOutOfBoundsError, match=f"page {wrong} does not exist among 4"):
        pages.addresses(np.array([0, wrong]))


@pytest.mark.parametrize(("gap", "columns"), [(0, 1), (48, 3)])
def test_extents_that_follow_each_other_are_one_to_addresses_and_borders_to_operations(gap: int, columns: int):
    form = Form(layers=1, pages=5, page_bytes=16, pages_per_extent=2, gap_bytes=gap)
    pages = pages_at(form, 4096)
    assert (pages.bases.shape, pages.borders) == ((1, columns), 2)
    assert pages_at(Form(layers=1, pages=5, page_bytes=16), 4096).borders == NO_BORDERS
    assert len(page_copies((pages, np.arange(0)), (pages, np.arange(0)), 16)) == 0
    assert isinstance(page_copies((pages, np.arange(5)), (pages, np.arange(5)), 16), Operations)

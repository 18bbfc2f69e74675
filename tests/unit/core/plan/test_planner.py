"""What a plan consists of: which operations, how many, and what is refused."""

import gc
import weakref

import numpy as np
import pytest

from kvbridge.core.errors import PageOutOfBoundsError
from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.ids import IndexSpace as Space
from kvbridge.core.ids import PageTable
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import plan
from tests.helpers.geometries import flash, gqa
from tests.helpers.manifests import Instance, Layout

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


# ------------------------------------------------------------------------------------------- flash, by the numbers


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


# ------------------------------------------------------------------------------------------- how operations look


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


# ------------------------------------------------------------------------------------------- what is refused


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

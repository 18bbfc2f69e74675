"""The regions of two ranks that meet, the rows that each writer owes; rows to pages, slots to bytes, page ids to runs."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.ids import IndexSpace as Space, Rank
from kvbridge.core.plan.pages import byte_intervals, find_runs
from kvbridge.core.plan.pairing import Demand, Pairing, Stripe, shortfall
from tests.helpers.geometries import flash, gqa
from tests.helpers.manifests import Instance
from tests.helpers.rooms import all_rows

PAGES = {Space.FULL: 16, Space.SWA: 4, Space.REQUEST: 2, Space.HOST: 16}


def create(source, destination, **changes) -> Pairing:
    where = {"destination_ordinal": 0, "destination_count": 1} | changes
    return Pairing.create(flash(), source, destination, **where)


def test_layers_of_different_forms_are_groups_of_their_own():
    source, destination = (Instance(gqa(), PAGES, base=base).manifests()[0] for base in (1 << 40, 1 << 50))
    odd = source.regions[1].model_copy(update={"page_stride_bytes": source.regions[1].page_stride_bytes * 2})
    source = source.model_copy(update={"regions": (source.regions[0], odd, source.regions[2])})
    pairing = Pairing.create(gqa(), source, destination, destination_ordinal=0, destination_count=1)
    assert [group.layers for group in pairing.groups] == [(0, 2), (1,)]


def test_the_host_copy_is_the_destination_where_both_are_listed():
    host = Instance(flash(), PAGES, base=1 << 50).with_host(Kind.C4_KV).manifests()[0]
    device = Instance(flash(), PAGES, base=1 << 52).manifests()[0]
    both = host.model_copy(update={"regions": (*device.regions, *[r for r in host.regions if r.space is Space.HOST])})
    pairing = create(Instance(flash(), PAGES).manifests()[0], both)
    spaces = {group.component.kind: group.destination.form.space for group in pairing.groups}
    assert (spaces[Kind.C4_KV], spaces[Kind.C4_INDEXER]) == (Space.HOST, Space.FULL)


@pytest.mark.parametrize(
    ("slots", "expected"),
    [
        (((0, 64),), [(0, 37_376)]),
        (((3, 5),), [(3 * 576, 2 * 576), (64 * 576 + 3 * 8, 2 * 8)]),
        (((0, 2), (60, 64)), [(0, 1_152), (60 * 576, 4 * 576 + 16), (64 * 576 + 480, 32)]),
    ],
)
def test_parts_lie_apart_unless_they_touch(slots, expected):
    assert byte_intervals(flash().component(Kind.C4_KV), 1, slots) == expected


@pytest.mark.parametrize(
    ("source", "destination", "borders", "lengths"),
    [
        ([1, 2, 3, 4], [7, 8, 9, 10], (0, 0), [4]),
        ([1, 2, 3, 4], [7, 8, 3, 4], (0, 0), [2, 2]),
        ([1, 2, 9, 10], [5, 6, 7, 8], (0, 0), [2, 2]),
        ([4, 3, 2], [4, 3, 2], (0, 0), [1, 1, 1]),
        ([2, 3, 4, 5], [6, 7, 8, 9], (4, 0), [2, 2]),
        ([2, 3, 4, 5], [6, 7, 8, 9], (0, 8), [2, 2]),
        ([2, 3, 4, 5], [7, 8, 9, 10], (4, 8), [1, 1, 2]),
        ([5], [5], (0, 0), [1]),
        ([], [], (0, 0), []),
    ],
)
def test_runs(source, destination, borders, lengths):
    found = find_runs(np.array(source, dtype=np.int64), np.array(destination, dtype=np.int64), borders)
    assert found.pages.tolist() == lengths
    begins = np.cumsum([0, *lengths[:-1]])[: len(lengths)]
    assert found.source.tolist() == [source[begin] for begin in begins]
    assert found.destination.tolist() == [destination[begin] for begin in begins]


def demand(instance: Instance) -> Demand:
    return Demand(instance.geometry, instance.manifests())


def expected(instance: Instance, prompt_tokens: int, prefix_tokens: int = 0):
    return all_rows(instance.geometry, demand(instance), prompt_tokens, prefix_tokens)


def test_device_copies_count_for_each_rank_and_the_host_pool_once():
    decode = Instance(flash(), PAGES, tp_size=4).with_host(Kind.C4_KV)
    assert expected(decode, 2_049) == {
        Kind.C4_KV: 21 * 512,
        Kind.C4_INDEXER: 4 * 21 * 512,
        Kind.C4_STATE: 4 * 21 * 5,
        Kind.C4_INDEXER_STATE: 4 * 21 * 5,
        Kind.C128_KV: 4 * 20 * 16,
        Kind.C128_STATE: 4 * 20 * 1,
        Kind.SWA_KV: 4 * 43 * 128,
    }


def test_shortfall_names_the_first_difference():
    due = {Kind.C4_KV: 100, Kind.SWA_KV: 10, Kind.C128_STATE: 0}
    right = {Kind.C4_KV: 100, Kind.SWA_KV: 10}
    assert shortfall(due, right) is None
    less = shortfall(due, right | {Kind.C4_KV: 93})
    assert less == "c4_kv: 93 of 100 rows were reported as written, 7 are missing"
    assert shortfall(due, {Kind.C4_KV: 100}) == ("swa_kv: 0 of 10 rows were reported as written, 10 are missing")
    more = shortfall(due, right | {Kind.SWA_KV: 12})
    assert more == "swa_kv: 12 rows were reported as written where 10 were due, 2 too many"
    unknown = shortfall(due, right | {Kind.MHA_KV: 1})
    assert unknown == "mha_kv: 1 rows were reported as written where 0 were due, 1 too many"


def of(share, tokens: int, prefix: int = 0):
    return share.rows(prompt_tokens=tokens, prefix_tokens=prefix)


def test_the_shares_of_replicas_have_no_row_in_common_and_are_everything():
    decode = Instance(flash(), PAGES, tp_size=2).with_host(Kind.C4_KV)
    due = demand(decode)
    for tp_size in (1, 2, 4):
        shares = [due.share(Rank(pp=0, tp=tp), tp_size=tp_size, layers=range(43)) for tp in range(tp_size)]
        assert due.uncovered(shares) is None
        for tokens, prefix in ((2_049, 0), (4_096, 1_024), (3, 0)):
            together = Counter()
            for share in shares:
                together.update(of(share, tokens, prefix))
            assert shortfall(expected(decode, tokens, prefix), together) is None
    assert due.uncovered(shares[1:]) == "c4_indexer: 126 lanes of layers where 168 are due"


def test_what_no_rank_can_be_written_through_is_not_covered():
    """Were a layer of the host pool listed by one rank only, a writer that goes through another would leave it out."""
    one, two = Instance(flash(), PAGES, tp_size=2).with_host(Kind.C4_KV).manifests()
    lacking = two.model_copy(update={"regions": tuple(region for region in two.regions if region.space != Space.HOST)})
    due = Demand(flash(), [one, lacking])
    shares = [due.share(Rank(pp=0, tp=tp), tp_size=2, layers=range(43)) for tp in range(2)]
    assert due.uncovered(shares).startswith("c4_kv: ")


@given(st.integers(1, 8), st.integers(0, 100), st.integers(-5, 100))
def test_a_stripe_counts_the_pages_that_it_owns(count, start, length):
    pages = range(start, start + length)
    for index in range(count):
        stripe = Stripe(index, count)
        assert stripe.count_pages(pages) == sum(stripe.owns_page(page) for page in pages)

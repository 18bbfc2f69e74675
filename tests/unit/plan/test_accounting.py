"""What must be reported before a request may be committed."""

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.ids import IndexSpace as Space
from kvbridge.core.plan.accounting import expected_amounts, shortfall
from kvbridge.core.plan.operations import Amount
from tests.helpers.geometries import flash, gqa
from tests.helpers.manifests import Instance

PAGES = {Space.FULL: 16, Space.SWA: 4, Space.REQUEST: 2, Space.HOST: 16}


def expected(instance: Instance, prompt_tokens: int, prefix_tokens: int = 0):
    return expected_amounts(
        instance.geometry, instance.manifests(), prompt_tokens=prompt_tokens, prefix_tokens=prefix_tokens
    )


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


def test_stages_share_the_layers():
    one, two = Instance(flash(), PAGES), Instance(flash(), PAGES, pp_size=2, boundaries=(17,))
    assert expected(one, 1_000) == expected(two, 1_000)
    hosted = expected(two.with_host(Kind.C4_KV), 1_000)
    assert hosted == expected(two, 1_000), "one host copy is as much as one device copy"


def test_sharded_heads_count_once_and_shared_ones_for_each_rank():
    assert expected(Instance(gqa(), PAGES, tp_size=4), 100) == {Kind.MHA_KV: 3 * 4 * 100}
    assert expected(Instance(gqa(), PAGES, tp_size=8), 100) == {Kind.MHA_KV: 3 * 8 * 100}


def test_a_prefix_shortens_what_grows():
    found = expected(Instance(flash(), PAGES), 1_024, 768)
    assert (found[Kind.C4_KV], found[Kind.SWA_KV]) == (21 * 64, 43 * 128)
    with pytest.raises(InvalidInputError, match="prefix"):
        expected(Instance(flash(), PAGES), 256, 512)


def test_shortfall_names_the_first_difference():
    due = {Kind.C4_KV: 100, Kind.SWA_KV: 10, Kind.C128_STATE: 0}
    right = {Kind.C4_KV: Amount(lane_rows=100), Kind.SWA_KV: Amount(lane_rows=10)}
    assert shortfall(due, right) is None
    less = shortfall(due, right | {Kind.C4_KV: Amount(lane_rows=93)})
    assert less == "c4_kv: 93 of 100 rows were reported as written, 7 are missing"
    assert shortfall(due, {Kind.C4_KV: Amount(lane_rows=100)}) == (
        "swa_kv: 0 of 10 rows were reported as written, 10 are missing"
    )
    more = shortfall(due, right | {Kind.SWA_KV: Amount(lane_rows=12)})
    assert more == "swa_kv: 12 rows were reported as written where 10 were due, 2 too many"
    unknown = shortfall(due, right | {Kind.MHA_KV: Amount(lane_rows=1)})
    assert unknown == "mha_kv: 1 rows were reported as written where 0 were due, 1 too many"

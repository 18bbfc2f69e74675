"""The cost of a request on decode, and how many requests fit."""

import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.geometry.costs import (
    DecodePlan,
    SparseSettings,
    fit_memory,
    fit_pools,
    hot_slot_bytes,
    request_cost,
    sparse_request_bytes,
)
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace as Space

FLASH = preset("deepseek-v4-flash")
HOST = frozenset({Kind.C4_KV})
SPARSE = SparseSettings(max_requests=64, hot_rows=4096, top_k=512, max_tokens=1 << 20)
DENSE, ON_HOST = DecodePlan(geometry=FLASH), DecodePlan(geometry=FLASH, host=HOST)
PLAN = DecodePlan(geometry=FLASH, host=HOST, sparse=SPARSE)


def test_flash_at_128k_costs_what_was_worked_out_by_hand():
    cost = request_cost(PLAN, prompt_tokens=131_072, max_new_tokens=0)
    assert cost.host == {Kind.C4_KV: 512 * 37_440 * 21}
    assert cost.device[Kind.C4_INDEXER] == 512 * 8_448 * 21
    assert cost.device[Kind.C128_KV] == 512 * 1_728 * 20
    assert cost.device[Kind.C128_STATE] == 524_288 * 20
    assert cost.device[Kind.SWA_KV] == 1 * 149_760 * 43
    assert cost.pages == {Space.FULL: 512, Space.HOST: 512, Space.SWA: 1, Space.REQUEST: 1}


def test_a_slot_of_the_hot_buffer_by_hand():
    each = sparse_request_bytes(SPARSE, FLASH.component(Kind.C4_KV), layer_count=21)
    assert each.hot_rows == 64 * 37_440 * 21
    assert each.ring == 2 * 37_440 * 21
    assert each.residency == 21 * (262_144 * 2 + 4096 * 4)
    assert each.ages == 21 * (128 * 16 + 16)
    assert each.page_tables == 4096 * 8 + 4
    assert each.steps == 12 + 512 * 4
    assert each.total == sum(each.model_dump().values())


@pytest.mark.parametrize("tokens", [100, 8192, 131_072, 1_000_000])
def test_fit_memory_is_the_largest_number_that_fits(tokens):
    cost = request_cost(PLAN, prompt_tokens=tokens, max_new_tokens=1000)
    for device_bytes, host_bytes in ((60 << 30, 1 << 40), (60 << 30, 16 << 30), (cost.device_bytes - 1, 1 << 40)):
        fit = fit_memory(PLAN, cost, device_bytes=device_bytes, host_bytes=host_bytes)
        assert fit.requests * cost.device_bytes <= device_bytes
        assert fit.requests * cost.host_bytes <= host_bytes
        more = fit.requests + 1
        scarce = (
            more * cost.device_bytes > device_bytes
            if fit.limit == "device memory"
            else more * cost.host_bytes > host_bytes
        )
        assert scarce


def test_fit_pools_names_the_resource_that_runs_out():
    cost = request_cost(PLAN, prompt_tokens=10_000, max_new_tokens=240)  # 40 pages
    plenty = {Space.FULL: 10_000, Space.HOST: 10_000, Space.SWA: 10_000, Space.REQUEST: 10_000}
    assert fit_pools(PLAN, cost, pages=plenty).model_dump() == {"requests": 64, "limit": "sparse.max_requests"}
    for space, pages, requests in (
        (Space.HOST, 119, 2),
        (Space.FULL, 80, 2),
        (Space.SWA, 9, 9 // cost.pages[Space.SWA]),
        (Space.REQUEST, 3, 3),
    ):
        fit = fit_pools(PLAN, cost, pages=plenty | {space: pages})
        assert (fit.requests, fit.limit) == (requests, f"pages of '{space}'")
    assert fit_pools(PLAN, cost, pages={Space.HOST: 80}).requests == 2, "spaces without a number set no limit"


def test_sparse_decode_needs_one_component_on_the_host():
    with pytest.raises(InvalidInputError, match="exactly one component in the host pool"):
        hot_slot_bytes(DecodePlan(geometry=FLASH, sparse=SPARSE))
    with pytest.raises(InvalidInputError, match="no hot buffer is configured"):
        hot_slot_bytes(ON_HOST)


def test_sizes_that_do_not_suit_the_component_are_refused():
    component = FLASH.component(Kind.C4_KV)
    with pytest.raises(
        InvalidInputError, match=r"hot_rows \(sparse.hot_rows\) is 4000, which is not a multiple of the 64"
    ):
        SparseSettings(max_requests=1, hot_rows=4000).check_component(component)
    with pytest.raises(InvalidInputError, match="cannot be decoded sparsely"):
        SparseSettings(max_requests=1).check_component(FLASH.component(Kind.SWA_KV))

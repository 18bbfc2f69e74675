"""Page counts against models that count one token at a time; the cost of a request on decode, and how many requests fit."""

import numpy as np
import pytest

from kvbridge.core.errors import InvalidInputError
from kvbridge.core.geometry import costs
from kvbridge.core.geometry.components import Component, ComponentKind as Kind, Encoding, Liveness, ModelGeometry
from kvbridge.core.geometry.models import geometry_from_config, preset
from kvbridge.core.geometry.pages import (
    first_window_page,
    most_window_pages,
    pages_needed,
    rotate_window,
    tables_cover,
    window_pages,
)
from kvbridge.core.ids import IndexSpace as Space, PageTable

FLASH = preset("deepseek-v4-flash")
C4_HOST = frozenset({Kind.C4_KV})


def table(space, ids, first_page=0):
    return PageTable(space, np.array(ids, dtype=np.int32), first_page)


def window_geometry(window, tokens_per_page, rates=(4, 128)):
    """A native V4 model of one layer of each kind."""
    return geometry_from_config(
        {
            "model_type": "deepseek_v4",
            "num_hidden_layers": 3,
            "head_dim": 8,
            "index_head_dim": 4,
            "sliding_window": window,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rate_csa": rates[0],
            "compress_rate_hca": rates[1],
        },
        tokens_per_page=tokens_per_page,
    )


def naive_counts(tokens):
    """Flash pages of a prompt, found by walking over its tokens: full, host, swa, request."""
    full, host, window = set(), set(), set()
    for token in range(tokens):
        full.add(token // 256)
        if token % 4 == 3:
            host.add((token // 4) // 64)
        if token >= tokens - 128:
            window.add(token // 256)
    return len(full), len(host), len(window), 1


def test_flash_counts_at_every_length():
    for tokens in range(1, 1_101):
        needed = pages_needed(FLASH, tokens=tokens, host=C4_HOST)
        got = tuple(needed[space] for space in (Space.FULL, Space.HOST, Space.SWA, Space.REQUEST))
        assert got == naive_counts(tokens), f"at {tokens} tokens"
        assert window_pages(FLASH, tokens) == range(max(0, tokens - 128) // 256, -(-tokens // 256))


class Ring:
    """The physical window pages of one request: remembers which row each slot was last written with."""

    def __init__(self, geometry, prompt, last):
        self.geometry = geometry
        self.parts = [part for part in geometry.components if part.space is Space.SWA]
        count = pages_needed(geometry, tokens=last, prompt_tokens=prompt)[Space.SWA]
        self.table = table(Space.SWA, [9 * page + 1 for page in range(count)], first_window_page(geometry, prompt))
        self.memory = {}

    def place(self, part, row):
        pages = rotate_window(self.table, first_page=row // self.geometry.tokens_per_page, page_count=1)
        return part.kind, int(pages.ids[0]), row % part.slots_per_page

    def write(self, part, rows):
        for row in rows:
            self.memory[self.place(part, row)] = row

    def lost(self, part, rows):
        return [row for row in rows if self.memory[self.place(part, row)] != row]


def live(part, tokens):
    rows = part.live_rows(tokens)
    return range(rows.start, rows.stop)


@pytest.mark.parametrize(("window", "rates"), [(1, (1, 1)), (16, (4, 16)), (17, (16, 8)), (40, (8, 16))])
def test_a_ring_never_loses_a_row_that_is_needed(window, rates):
    """Decode token by token into the ring; whatever the next step reads is still there, for any prompt."""
    geometry = window_geometry(window, 16, rates)
    for prompt in range(1, 70, 7):
        ring = Ring(geometry, prompt, prompt + 45)
        for part in ring.parts:
            ring.write(part, live(part, prompt))
        for tokens in range(prompt, prompt + 45):
            for part in ring.parts:
                assert not ring.lost(part, live(part, tokens))
            for part in ring.parts:
                # A tail's block is pooled by the step that completes it, which reads it with its new row.
                rows = live(part, tokens)
                ring.write(part, [tokens])
                read = rows if part.liveness is Liveness.TAIL else rows[-part.window + 1 :] if part.window > 1 else []
                assert not ring.lost(part, [*read, tokens])


def test_rotation_refuses_what_the_ring_cannot_hold():
    ring = table(Space.SWA, [70, 80], first_page=3)
    with pytest.raises(InvalidInputError, match="page 2 lies before the ring, which begins at 3"):
        rotate_window(ring, first_page=2, page_count=1)
    with pytest.raises(InvalidInputError, match="ring of 2 window pages cannot hold 3"):
        rotate_window(ring, first_page=3, page_count=3)
    with pytest.raises(InvalidInputError, match="space 'full' cannot index space 'swa'"):
        rotate_window(table(Space.FULL, [1]), first_page=0, page_count=1)


def test_a_window_space_without_live_rows():
    """At a block border a tail without overlap keeps nothing; the ring then begins with the next row's page."""
    tail = Component(
        kind=Kind.C128_STATE,
        layers=(0,),
        space=Space.SWA,
        encoding=Encoding.FP32,
        liveness=Liveness.TAIL,
        block=16,
        row_parts_bytes=(4,),
        slots_per_page=16,
        rows_per_logical_page=16,
    )
    geometry = ModelGeometry(name="tail", layer_count=1, tokens_per_page=16, components=(tail,))
    assert most_window_pages(geometry) == 1
    assert window_pages(geometry, 32) == range(2, 2)
    assert pages_needed(geometry, tokens=32) == {Space.SWA: 0}
    assert pages_needed(geometry, tokens=50, prompt_tokens=32) == {Space.SWA: 1}
    assert window_pages(geometry, 33) == range(2, 3)


@pytest.mark.parametrize(("tokens", "prompt"), [(5, 6), (5, -1), (-1, None)])
def test_contradictory_lengths_are_refused(tokens, prompt):
    with pytest.raises(InvalidInputError, match="0 <= prompt_tokens <= tokens"):
        pages_needed(FLASH, tokens=tokens, prompt_tokens=prompt)


def flash_tables(tokens):
    needed = pages_needed(FLASH, tokens=tokens, host=C4_HOST)
    return {
        space: table(space, range(count), first_window_page(FLASH, tokens) if space is Space.SWA else 0)
        for space, count in needed.items()
    }


@pytest.mark.parametrize("tokens", [1, 3, 4, 256, 257, 260, 384, 700])
def test_exact_tables_cover_and_one_page_less_does_not(tokens):
    tables = flash_tables(tokens)
    tables_cover(tables, FLASH, tokens=tokens, host=C4_HOST)
    if tokens % 128 == 0:  # no block of a state is begun, so an engine need not name its slot
        tables_cover(
            {space: one for space, one in tables.items() if space is not Space.REQUEST},
            FLASH,
            tokens=tokens,
            host=C4_HOST,
        )
        del tables[Space.REQUEST]
    for space, full in tables.items():
        if len(full):
            short = tables | {space: PageTable(space, full.ids[:-1], full.first_page)}
            words = rf"{tokens} tokens needs {len(full)} pages of space '{space}'.*got {len(full) - 1} from"
            with pytest.raises(InvalidInputError, match=words):
                tables_cover(short, FLASH, tokens=tokens, host=C4_HOST)


HOST = frozenset({Kind.C4_KV})
SPARSE = costs.SparseSettings(max_requests=64, hot_rows=4096, top_k=512, max_tokens=1 << 20)
DENSE, ON_HOST = costs.DecodePlan(geometry=FLASH), costs.DecodePlan(geometry=FLASH, host=HOST)
PLAN = costs.DecodePlan(geometry=FLASH, host=HOST, sparse=SPARSE)


def test_flash_at_128k_costs_what_was_worked_out_by_hand():
    cost = costs.request_cost(PLAN, prompt_tokens=131_072, max_new_tokens=0)
    assert cost.host == {Kind.C4_KV: 512 * 37_440 * 21}
    assert cost.device[Kind.C4_INDEXER] == 512 * 8_448 * 21
    assert cost.device[Kind.C128_KV] == 512 * 1_728 * 20
    assert cost.device[Kind.C128_STATE] == 524_288 * 20
    assert cost.device[Kind.SWA_KV] == 1 * 149_760 * 43
    assert cost.pages == {Space.FULL: 512, Space.HOST: 512, Space.SWA: 1, Space.REQUEST: 1}


def test_a_slot_of_the_hot_buffer_by_hand():
    each = costs.sparse_request_bytes(SPARSE, FLASH.component(Kind.C4_KV), layer_count=21)
    assert each.hot_rows == 64 * 37_440 * 21
    assert each.ring == 2 * 37_440 * 21
    assert each.residency == 21 * (262_144 * 2 + 4096 * 4)
    assert each.ages == 21 * (128 * 16 + 16)
    assert each.page_tables == 4096 * 8 + 4
    assert each.steps == 12 + 512 * 4
    assert each.total == sum(each.model_dump().values())


@pytest.mark.parametrize("tokens", [100, 8192, 131_072, 1_000_000])
def test_fit_memory_is_the_largest_number_that_fits(tokens):
    cost = costs.request_cost(PLAN, prompt_tokens=tokens, max_new_tokens=1000)
    for device_bytes, host_bytes in ((60 << 30, 1 << 40), (60 << 30, 16 << 30), (cost.device_bytes - 1, 1 << 40)):
        fit = costs.fit_memory(PLAN, cost, device_bytes=device_bytes, host_bytes=host_bytes)
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
    cost = costs.request_cost(PLAN, prompt_tokens=10_000, max_new_tokens=240)  # 40 pages
    plenty = {Space.FULL: 10_000, Space.HOST: 10_000, Space.SWA: 10_000, Space.REQUEST: 10_000}
    assert costs.fit_pools(PLAN, cost, pages=plenty).model_dump() == {"requests": 64, "limit": "sparse.max_requests"}
    for space, pages, requests in (
        (Space.HOST, 119, 2),
        (Space.FULL, 80, 2),
        (Space.SWA, 9, 9 // cost.pages[Space.SWA]),
        (Space.REQUEST, 3, 3),
    ):
        fit = costs.fit_pools(PLAN, cost, pages=plenty | {space: pages})
        assert (fit.requests, fit.limit) == (requests, f"pages of '{space}'")
    assert costs.fit_pools(PLAN, cost, pages={Space.HOST: 80}).requests == 2, "spaces without a number set no limit"


def test_sparse_decode_needs_one_component_on_the_host():
    with pytest.raises(InvalidInputError, match="exactly one component in the host pool"):
        costs.hot_slot_bytes(costs.DecodePlan(geometry=FLASH, sparse=SPARSE))
    with pytest.raises(InvalidInputError, match="no hot buffer is configured"):
        costs.hot_slot_bytes(ON_HOST)


def test_sizes_that_do_not_suit_the_component_are_refused():
    component = FLASH.component(Kind.C4_KV)
    with pytest.raises(
        InvalidInputError, match=r"hot_rows \(sparse.hot_rows\) is 4000, which is not a multiple of the 64"
    ):
        costs.SparseSettings(max_requests=1, hot_rows=4000).check_component(component)
    with pytest.raises(InvalidInputError, match="cannot be decoded sparsely"):
        costs.SparseSettings(max_requests=1).check_component(FLASH.component(Kind.SWA_KV))

"""Which layers and components go together, what goes along between them, and what different layouts cost."""

import numpy as np
import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.config.transports import TCP_OPERATION_COST_BYTES, MooncakeSettings
from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.geometry.manifest import RankManifest, fingerprint
from kvbridge.core.geometry.pages import first_window_page, pages_needed
from kvbridge.core.ids import IndexSpace as Space
from kvbridge.core.ids import PageTable, Rank
from kvbridge.core.plan.operations import Section
from kvbridge.core.plan.pairing import Pairing
from kvbridge.core.plan.planner import find_neighbours, plan
from kvbridge.pool.memory.layout import RankPart, device_placement, host_placement
from tests.helpers.geometries import flash, gqa
from tests.helpers.manifests import Instance, Layout

PAGES = {Space.FULL: 16, Space.SWA: 4, Space.REQUEST: 2, Space.HOST: 16}
PAGE_FIRST = dict.fromkeys(Kind, Layout(page_first=True))
ONE_RANK = Rank(pp=0, tp=0)
DEVICE = frozenset({Space.FULL, Space.SWA, Space.REQUEST})


def pair(source: Instance, destination: Instance) -> Pairing:
    sides = source.manifests()[0], destination.manifests()[0]
    return Pairing.create(source.geometry, *sides, destination_ordinal=0, destination_count=1)


def both(geometry=None, **changes) -> Pairing:
    """Both sides laid out alike."""
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

"""Which regions of two ranks meet; rows to pages, slots to bytes, page ids to runs."""

from __future__ import annotations

import numpy as np
import pytest

from kvbridge.core.geometry.components import ComponentKind as Kind
from kvbridge.core.ids import IndexSpace as Space
from kvbridge.core.plan.pages import byte_intervals, find_runs
from kvbridge.core.plan.pairing import Pairing
from tests.helpers.geometries import flash, gqa
from tests.helpers.manifests import Instance

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

"""DeepSeek-V4-Flash at full size, byte for byte: every way to split both sides, over every transport.

Every pipeline split with one TP rank, every TP split of one stage, and splits of both kinds at once; the tiny model gets all of
them crossed. `make test` tries each split over one transport, and every second one of the tiny model. Ids of source and
destination, and of different spaces, differ at every place of their tables.
"""

from __future__ import annotations

from itertools import product

import pytest

from kvbridge.core.geometry.components import ComponentKind, ModelGeometry
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace
from tests.helpers.matrices import one_in
from tests.helpers.rank_harness import Case, Crossing, Setting
from tests.helpers.rank_pools import Form, Ranks

FLASH = preset("deepseek-v4-flash")
SOURCE = Form({IndexSpace.FULL: 20, IndexSpace.SWA: 4, IndexSpace.REQUEST: 3})
DESTINATION = Form(
    {IndexSpace.FULL: 19, IndexSpace.SWA: 4, IndexSpace.REQUEST: 3, IndexSpace.HOST: 21},
    host=frozenset({ComponentKind.C4_KV}),
)

# First layers of the stages. Four stages: one that has windows only, one with a single sparse layer.
ONE, TWO, TWO_LATE, THREE, FOUR = (), (17,), (30,), (5, 31), (2, 3, 29)
PIPELINES = [(ONE, ONE), (TWO, ONE), (THREE, ONE), (FOUR, ONE), (TWO, TWO_LATE)]
TENSORS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]

CHOSEN = [
    *product(PIPELINES, [(1, 1)]),
    *product([(ONE, ONE)], TENSORS[1:]),
    ((TWO, ONE), (2, 2)),
    ((THREE, ONE), (1, 2)),
    ((TWO, TWO_LATE), (2, 1)),
    ((TWO, TWO_LATE), (1, 2)),
]

# 1,023: one short of everything. 2,306: a full page more than host pages. 4,354: more stripes than ranks.
INSIDE_PAGES = Case(1023, (333, 777), longest_run=3)
PREFIX_BY_LAYER = Case(2306, (1026,), prefix=256, by_layer=True)
LONG_OVERLAPPING = Case(4354, (1025, 3001), waits=False, longest_run=4)


Split = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]]


def setting(geometry: ModelGeometry, transport: str, split: Split, *, label: str = "") -> Setting:
    (source_stages, destination_stages), (source_tp, destination_tp) = split
    return Setting(
        geometry,
        Ranks(len(source_stages) + 1, source_tp, source_stages),
        Ranks(len(destination_stages) + 1, destination_tp, destination_stages),
        SOURCE,
        DESTINATION,
        transport,
        label,
    )


@pytest.mark.parametrize("case", [INSIDE_PAGES, PREFIX_BY_LAYER, LONG_OVERLAPPING], ids=str)
@pytest.mark.parametrize(
    "link",
    [
        param
        for first, transport in enumerate(("mooncake", "nixl", "local"))
        for param in one_in(3, (setting(FLASH, transport, split) for split in CHOSEN), first=first)
    ],
    indirect=True,
    scope="module",
    ids=str,
)
def test_every_byte_arrives_and_no_other_is_written(link: Crossing, case: Case) -> None:
    link.deliver(case)


TINY = preset("tiny-v4")  # six layers
TINY_ONE, TINY_TWO, TINY_TWO_LATE, TINY_THREE, TINY_FOUR = (), (3,), (5,), (1, 4), (2, 3, 4)
TINY_PIPELINES = [
    (TINY_ONE, TINY_ONE),
    (TINY_TWO, TINY_ONE),
    (TINY_THREE, TINY_ONE),
    (TINY_FOUR, TINY_ONE),
    (TINY_TWO, TINY_TWO_LATE),
]


@pytest.mark.parametrize("case", [PREFIX_BY_LAYER, LONG_OVERLAPPING], ids=str)
@pytest.mark.parametrize(
    "link",
    [
        param
        for first, pipeline in enumerate(TINY_PIPELINES)
        for param in one_in(
            2, (setting(TINY, "local", (pipeline, each), label="tiny") for each in TENSORS), first=first
        )
    ],
    indirect=True,
    scope="module",
    ids=str,
)
def test_all_splits_crossed(link: Crossing, case: Case) -> None:
    link.deliver(case)

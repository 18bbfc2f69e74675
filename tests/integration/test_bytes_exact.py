"""Rank workers of both sides, byte for byte: splits, lengths, layouts and models at full size, over every transport.

Ids of source and destination, and of different spaces, differ at every place of their tables. `make test` runs each value of each
matrix over one transport.
"""

import gc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.core.geometry.components import ComponentKind, Encoding, ModelGeometry
from kvbridge.core.geometry.models import geometry_from_config, preset
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.memory.layout import Chunking
from tests.helpers.matrices import kept
from tests.helpers.rank_harness import Case, Crossing, Setting, crossing
from tests.helpers.rank_pools import Form, Ranks

FULL, SWA, REQUEST, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST, IndexSpace.HOST
C4_KV = frozenset({ComponentKind.C4_KV})
TRANSPORTS = ("mooncake", "nixl", "local")
ORDER = ("nixl", "mooncake", "local", "mooncake", "local", "local")
FLASH, TINY = preset("deepseek-v4-flash"), preset("tiny-v4")


def device(full: int) -> dict[IndexSpace, int]:
    return {FULL: full, SWA: 4, REQUEST: 3}


def over_transports(made: Sequence[Setting], first: int = 100) -> list[Any]:
    """Settings over every transport.

    `make test` runs each of the `first` over one: every sixth over nixl, which takes seconds to connect, the others over local
    and mooncake.
    """
    return [
        kept(replace(setting, transport=transport), number < first and ORDER[number % len(ORDER)] == transport)
        for number, setting in enumerate(made)
        for transport in TRANSPORTS
    ]


def crossings(links: Iterable[Any], cases: Sequence[Case]) -> Any:
    """Parametrize a test with connected nodes and with requests."""

    def decorated(test: Any) -> Any:
        by_link = pytest.mark.parametrize("link", list(links), indirect=True, scope="module", ids=str)
        return by_link(pytest.mark.parametrize("case", cases, ids=str)(test))

    return decorated


SOURCE, DESTINATION = Form(device(20)), Form(device(19) | {HOST: 21}, host=C4_KV)

# First layers of the stages. Four stages: one that has windows only, one with a single sparse layer.
ONE, TWO, TWO_LATE, THREE, FOUR = (), (17,), (30,), (5, 31), (2, 3, 29)
SPLITS = [
    ((FOUR, ONE), (1, 1)),
    ((ONE, ONE), (4, 2)),
    ((TWO, TWO_LATE), (2, 1)),
    ((THREE, ONE), (1, 2)),
    ((TWO, ONE), (2, 2)),
    ((TWO, TWO_LATE), (1, 2)),
    *product([(TWO, ONE), (THREE, ONE), (TWO, TWO_LATE)], [(1, 1)]),
    *product([(ONE, ONE)], [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)]),
]
"""The first four have each value of each side."""

# 1,023: one short of everything. 2,306: a full page more than host pages. 4,354: more stripes than ranks.
INSIDE_PAGES = Case(1023, (333, 777), longest_run=3)
PREFIX_BY_LAYER = Case(2306, (1026,), prefix=256, by_layer=True)
LONG_OVERLAPPING = Case(4354, (1025, 3001), waits=False, longest_run=4)

Split = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[int, int]]


def setting(geometry: ModelGeometry, split: Split, *, label: str = "") -> Setting:
    (source_stages, destination_stages), (source_tp, destination_tp) = split
    return Setting(
        geometry,
        Ranks(len(source_stages) + 1, source_tp, source_stages),
        Ranks(len(destination_stages) + 1, destination_tp, destination_stages),
        SOURCE,
        DESTINATION,
        "local",
        label,
    )


@crossings(
    over_transports([setting(FLASH, split) for split in SPLITS], first=4),
    [INSIDE_PAGES, PREFIX_BY_LAYER, LONG_OVERLAPPING],
)
def test_every_byte_arrives_and_no_other_is_written(link: Crossing, case: Case) -> None:
    link.deliver(case)


BY_HEADS = Setting(FLASH, Ranks(tp=2), Ranks(tp=2), Form(device(9)), Form(device(9) | {HOST: 10}, host=C4_KV), "local")

# Around 0, a C4 entry (4), a window or a C128 entry (128), a page (256), and both together (384).
LENGTHS = [1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 384, 1021]
BORDERS = [
    Case(2, (1,)),
    Case(259, (2, 3, 4, 255, 256, 257)),
    Case(260, (258,), 256),
    Case(256, (), 256),
    Case(515, (256, 512), 256),
    Case(769, (700,), 512),
    Case(1027, (1024,), 768),
]


@pytest.mark.parametrize(
    "link",
    [kept(replace(BY_HEADS, transport=name), name == "local") for name in TRANSPORTS],
    indirect=True,
    scope="module",
    ids=str,
)
def test_lengths_cuts_and_prefixes_at_every_border(link: Crossing) -> None:
    for case in (*map(Case, LENGTHS), *BORDERS):
        print(case)  # so that a failure shows which one it was
        link.deliver(case)


# Extents of so few pages that runs of neighbouring ids cross their borders: one ring, three window pages, 14 C4 pages on a
# device, four C4 pages in the host pool (two of all layers with page_first); or several files.
SMALL = Chunking(extent_bytes=524_288)
ROOMY = Form(device(24) | {HOST: 25}, host=C4_KV)
FORMS = {
    "small_extents": replace(ROOMY, chunking=SMALL, host_chunking=Chunking(extent_bytes=4 * 37_440)),
    "page_first_small_extents": replace(
        ROOMY, layout=HostLayout.PAGE_FIRST, host_chunking=Chunking(extent_bytes=2 * 21 * 37_440)
    ),
    "page_first_files": replace(
        ROOMY,
        layout=HostLayout.PAGE_FIRST,
        chunking=Chunking(mapping_bytes=600_000),
        host_chunking=Chunking(mapping_bytes=5 << 20),
    ),
    "page_first_device_small_extents": Form(
        device(24), chunking=Chunking(extent_bytes=2 * 11_200_000), page_first=True
    ),
    "device_only": Form(device(24)),
}
NEIGHBOURS = Setting(
    FLASH,
    Ranks(),
    Ranks(),
    Form(device(24), page_first=True),
    replace(ROOMY, page_first=True, layout=HostLayout.PAGE_FIRST),
    "mooncake",
    "neighbours",
)
"""Page first on both sides: what lies beside each other is copied together."""


@crossings(
    over_transports(
        [
            Setting(FLASH, Ranks(), Ranks(), Form(device(24), chunking=SMALL), form, "local", label)
            for label, form in FORMS.items()
        ]
    ),
    [Case(4354, (300, 1500), longest_run=9), Case(3330, (1030,), prefix=256, waits=False, longest_run=6)],
)
def test_every_layout_of_the_destination(link: Crossing, case: Case) -> None:
    link.deliver(case)


@crossings([NEIGHBOURS], [Case(3), Case(4354)])
def test_neighbours_are_copied_together(link: Crossing, case: Case) -> None:
    link.deliver(case)


@crossings(
    [replace(NEIGHBOURS, label="dead_bytes_too", dead_bytes=True)],
    [
        Case(3),
        Case(4354, (300, 1500, 4300), longest_run=9, waits=False),
        Case(3330, (1030, 3329), prefix=256, waits=False, longest_run=6),
    ],
)
def test_dead_bytes_never_take_the_place_of_rows_that_came_before_or_after_them(link: Crossing, case: Case) -> None:
    link.deliver(case)


PRO, V32 = preset("deepseek-v4-pro"), preset("deepseek-v3.2")
PRO_DESTINATION = Form(device(12) | {HOST: 13}, host=C4_KV)
MLA_KV = frozenset({ComponentKind.MLA_KV})


def pro(source: Ranks, destination: Ranks, transport: str, form: Form = PRO_DESTINATION) -> Setting:
    return Setting(PRO, source, destination, Form(device(12)), form, transport, "pro")


def v32(host: frozenset[ComponentKind], transport: str, source: Ranks) -> Setting:
    return Setting(V32, source, Ranks(tp=2), Form({FULL: 12}), Form({FULL: 13, HOST: 14}, host=host), transport, "v32")


@crossings(
    [
        pro(Ranks(pp=2, tp=2, boundaries=(25,)), Ranks(pp=2, boundaries=(33,)), "mooncake"),
        kept(pro(Ranks(pp=3, boundaries=(2, 40)), Ranks(), "nixl"), False),
        kept(pro(Ranks(tp=4), Ranks(tp=2), "nixl"), False),
        kept(pro(Ranks(pp=4, boundaries=(1, 20, 59)), Ranks(tp=2), "local", Form(device(12))), False),
    ],
    [Case(3), INSIDE_PAGES, replace(PREFIX_BY_LAYER, longest_run=4)],
)
def test_pro_arrives_byte_for_byte(link: Crossing, case: Case) -> None:
    link.deliver(case)


@crossings(
    [
        v32(MLA_KV, "mooncake", Ranks(tp=2)),
        v32(frozenset(), "local", Ranks(tp=2)),
        kept(v32(frozenset(), "nixl", Ranks(tp=2)), False),
        kept(v32(MLA_KV, "local", Ranks(pp=2, boundaries=(7,))), False),
    ],
    [Case(1), Case(257, (100,), longest_run=2), Case(640, (385,), prefix=128, waits=False, longest_run=4)],
)
def test_latents_arrive_byte_for_byte(link: Crossing, case: Case) -> None:
    link.deliver(case)


def grouped(heads: int, source: Ranks, destination: Ranks) -> Setting:
    layer_types = ["sliding_attention" if layer in {1, 4} else "full_attention" for layer in range(6)]
    config = {"model_type": "grouped", "num_hidden_layers": 6, "num_attention_heads": heads, "head_dim": 128}
    config |= {"sliding_window": 100, "layer_types": layer_types}
    geometry = geometry_from_config(config, encoding=Encoding.BF16, tokens_per_page=64, name=f"grouped-{heads}")
    pages: list[Mapping[IndexSpace, int]] = [{FULL: 12, SWA: 6}, {FULL: 14, SWA: 5}]
    return Setting(geometry, source, destination, Form(pages[0]), Form(pages[1]), "local", f"{heads}heads")


@crossings(
    over_transports(
        [
            grouped(8, Ranks(tp=4), Ranks(tp=2)),
            grouped(8, Ranks(tp=2), Ranks(tp=4)),
            grouped(8, Ranks(tp=1), Ranks(tp=2)),
            grouped(2, Ranks(tp=4), Ranks(tp=2)),
            grouped(2, Ranks(tp=2), Ranks(tp=4)),
            grouped(8, Ranks(pp=2, tp=2, boundaries=(3,)), Ranks(pp=2, tp=4, boundaries=(2,))),
        ]
    ),
    [Case(1), Case(63), Case(129, (70,), longest_run=2), Case(700, (200, 455), prefix=128, waits=False, longest_run=4)],
)
def test_heads_arrive_at_the_ranks_that_hold_them(link: Crossing, case: Case) -> None:
    link.deliver(case)


def test_what_a_worker_has_mapped_of_its_peers_goes_with_it(destination_process, tmp_path: Path) -> None:
    """Workers are threads here, as in an engine, and the collector is off, as for minutes in a process at work.

    A mapping that stayed would stay page-locked, and its lock would say for ever that somebody may still write.
    """

    def mapped() -> set[str]:
        lines = Path("/proc/self/maps").read_text().splitlines()
        return {line.split(maxsplit=5)[5] for line in lines if str(tmp_path) in line}

    gc.collect()
    gc.disable()
    try:
        before = mapped()
        with crossing(setting(TINY, ((ONE, ONE), (1, 1))), destination_process, tmp_path) as link:
            link.deliver(Case(300))
            assert mapped() > before
        assert mapped() == before
    finally:
        gc.enable()

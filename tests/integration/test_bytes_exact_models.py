"""Other models, byte for byte: DeepSeek-V4-Pro and V3.2 at full size, and heads that are split over tensor-parallel ranks.

`make test` tries each split of the large models over one library.
"""

from __future__ import annotations

import pytest

from kvbridge.core.geometry.components import ComponentKind, Encoding, ModelGeometry
from kvbridge.core.geometry.families import RowForm, grouped_geometry
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace
from tests.helpers.matrices import kept, one_in
from tests.helpers.rank_harness import Case, Crossing, Setting
from tests.helpers.rank_pools import Form, Ranks

FULL, SWA, REQUEST, HOST = IndexSpace.FULL, IndexSpace.SWA, IndexSpace.REQUEST, IndexSpace.HOST
LIBRARIES = ("mooncake", "nixl")

# ------------------------------------------------------------------------------------------- DeepSeek-V4-Pro

PRO = preset("deepseek-v4-pro")
PRO_SOURCE = Form({FULL: 12, SWA: 4, REQUEST: 3})
PRO_DESTINATION = Form({FULL: 12, SWA: 4, REQUEST: 3, HOST: 13}, host=frozenset({ComponentKind.C4_KV}))
PRO_SPLITS = [
    (Ranks(pp=3, boundaries=(2, 40)), Ranks()),
    (Ranks(tp=4), Ranks(tp=2)),
    (Ranks(pp=2, tp=2, boundaries=(25,)), Ranks(pp=2, boundaries=(33,))),
]
PRO_LINKS = [
    *(
        param
        for first, library in enumerate(LIBRARIES)
        for param in one_in(
            2,
            (
                Setting(PRO, source, destination, PRO_SOURCE, PRO_DESTINATION, library, "pro")
                for source, destination in PRO_SPLITS
            ),
            first=first,
        )
    ),
    Setting(PRO, Ranks(pp=4, boundaries=(1, 20, 59)), Ranks(tp=2), PRO_SOURCE, PRO_SOURCE, "local", "pro_device"),
]


@pytest.mark.parametrize(
    "case",
    [Case(3), Case(1023, (333, 777), longest_run=3), Case(2306, (1026,), prefix=256, by_layer=True, longest_run=4)],
    ids=str,
)
@pytest.mark.parametrize("link", PRO_LINKS, indirect=True, scope="module", ids=str)
def test_pro_arrives_byte_for_byte(link: Crossing, case: Case) -> None:
    link.deliver(case)


# ------------------------------------------------------------------------------------------- DeepSeek-V3.2

V32 = preset("deepseek-v3.2")
V32_LINKS = [
    kept(
        Setting(V32, Ranks(tp=2), Ranks(tp=2), Form({FULL: 12}), Form({FULL: 13, HOST: 14}, host=host), library, label),
        library == preferred,
    )
    for label, host, preferred in (
        ("v32_host", frozenset({ComponentKind.MLA_KV}), "mooncake"),
        ("v32_device", frozenset[ComponentKind](), "nixl"),
    )
    for library in LIBRARIES
] + [
    Setting(
        V32,
        Ranks(pp=2, boundaries=(7,)),
        Ranks(tp=2),
        Form({FULL: 12}),
        Form({FULL: 13, HOST: 14}, host=frozenset({ComponentKind.MLA_KV})),
        "local",
        "v32",
    )
]


@pytest.mark.parametrize(
    "case",
    [Case(1), Case(257, (100,), longest_run=2), Case(640, (385,), prefix=128, waits=False, longest_run=4)],
    ids=str,
)
@pytest.mark.parametrize("link", V32_LINKS, indirect=True, scope="module", ids=str)
def test_latents_arrive_byte_for_byte(link: Crossing, case: Case) -> None:
    link.deliver(case)


# ------------------------------------------------------------------------------------------- grouped queries


def grouped(heads: int) -> ModelGeometry:
    return grouped_geometry(
        f"grouped-{heads}",
        6,
        sliding=(1, 4),
        window=100,
        row=RowForm(encoding=Encoding.BF16, parts=(2 * 128 * 2,), lanes=heads),
        tokens_per_page=64,
    )


GROUPED_SPLITS = [
    (8, Ranks(tp=4), Ranks(tp=2)),
    (8, Ranks(tp=2), Ranks(tp=4)),
    (8, Ranks(tp=1), Ranks(tp=2)),
    (2, Ranks(tp=4), Ranks(tp=2)),
    (2, Ranks(tp=2), Ranks(tp=4)),
    (8, Ranks(pp=2, tp=2, boundaries=(3,)), Ranks(pp=2, tp=4, boundaries=(2,))),
]
GROUPED_LINKS = [
    Setting(
        grouped(heads),
        source,
        destination,
        Form({FULL: 12, SWA: 6}),
        Form({FULL: 14, SWA: 5}),
        transport,
        f"{heads}heads",
    )
    for transport, splits in (("mooncake", GROUPED_SPLITS[:3]), ("nixl", GROUPED_SPLITS[:3]), ("local", GROUPED_SPLITS))
    for heads, source, destination in splits
]


@pytest.mark.parametrize(
    "case",
    [Case(1), Case(63), Case(129, (70,), longest_run=2), Case(700, (200, 455), prefix=128, waits=False, longest_run=4)],
    ids=str,
)
@pytest.mark.parametrize("link", GROUPED_LINKS, indirect=True, scope="module", ids=str)
def test_heads_arrive_at_the_ranks_that_hold_them(link: Crossing, case: Case) -> None:
    link.deliver(case)

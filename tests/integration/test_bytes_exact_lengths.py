"""DeepSeek-V4-Flash, byte for byte, at every length where a page, an entry, a state or the window begins or ends."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvbridge.config.pools import HostLayout
from kvbridge.core.geometry.components import ComponentKind
from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.pool.memory.layout import Chunking
from tests.helpers.matrices import one_in
from tests.helpers.rank_harness import Case, Crossing, Setting
from tests.helpers.rank_pools import Form, Ranks

FLASH = preset("deepseek-v4-flash")
ON_DEVICE = {IndexSpace.FULL: 9, IndexSpace.SWA: 4, IndexSpace.REQUEST: 3}
C4_KV = frozenset({ComponentKind.C4_KV})
SOURCE = Form(ON_DEVICE)
DESTINATION = Form(ON_DEVICE | {IndexSpace.HOST: 10}, host=C4_KV)
TRANSPORTS = ("mooncake", "nixl", "local")

# Around 0, a C4 entry (4), a window or a C128 entry (128), a page (256), and both together (384).
LENGTHS = [1, 2, 3, 4, 5, 7, 8, *range(125, 134), *range(252, 264), 383, 384, 385, 511, 512, 515, 1021]


# `make test` tries each length over one transport.
LINKS = [Setting(FLASH, Ranks(tp=2), Ranks(tp=2), SOURCE, DESTINATION, transport) for transport in TRANSPORTS]


@pytest.mark.parametrize(
    ("link", "tokens"),
    [param for first, link in enumerate(LINKS) for param in one_in(3, ((link, each) for each in LENGTHS), first=first)],
    indirect=["link"],
    scope="module",
    ids=str,
)
def test_every_residue_of_a_length(link: Crossing, tokens: int) -> None:
    link.deliver(Case(tokens))


@pytest.mark.parametrize(
    ("tokens", "stops", "prefix"),
    [
        (2, (1,), 0),
        (259, (2, 3, 4, 255, 256, 257), 0),
        (260, (258,), 256),
        (256, (), 256),
        (515, (256, 512), 256),
        (769, (700,), 512),
        (1027, (1024,), 768),
    ],
)
@pytest.mark.parametrize("link", LINKS, indirect=True, scope="module", ids=str)
def test_cuts_and_prefixes_at_the_borders(link: Crossing, tokens: int, stops: tuple[int, ...], prefix: int) -> None:
    link.deliver(Case(tokens, stops, prefix))


# Extents of so few pages that runs of neighbouring ids cross their borders: one ring, three window pages, 14 C4 pages on a
# device, four C4 pages in the host pool (two of all layers with page_first); or several files.
ROOMY_DEVICE = ON_DEVICE | {IndexSpace.FULL: 24}
SMALL_DEVICE = Chunking(extent_bytes=524_288)
ROOMY = Form(ROOMY_DEVICE | {IndexSpace.HOST: 25}, host=C4_KV)
FORMS = {
    "small_extents": replace(ROOMY, chunking=SMALL_DEVICE, host_chunking=Chunking(extent_bytes=4 * 37_440)),
    "page_first": replace(ROOMY, layout=HostLayout.PAGE_FIRST),
    "page_first_small_extents": replace(
        ROOMY, layout=HostLayout.PAGE_FIRST, host_chunking=Chunking(extent_bytes=2 * 21 * 37_440)
    ),
    "page_first_direct_files": replace(
        ROOMY,
        layout=HostLayout.PAGE_FIRST,
        chunking=Chunking(mapping_bytes=600_000),
        host_chunking=Chunking(mapping_bytes=5 << 20),
    ),
    "page_first_device": replace(ROOMY, page_first=True),
    "page_first_device_small_extents": Form(
        ROOMY_DEVICE, chunking=Chunking(extent_bytes=2 * 11_200_000), page_first=True
    ),
    "device_only": Form(ROOMY_DEVICE),
    "device_only_small_extents": Form(ROOMY_DEVICE, chunking=SMALL_DEVICE),
}
SMALL_SOURCE = Form(ROOMY_DEVICE, chunking=SMALL_DEVICE)


@pytest.mark.parametrize(
    "case",
    [Case(4354, (300, 1500), longest_run=9), Case(3330, (1030,), prefix=256, waits=False, longest_run=6)],
    ids=str,
)
@pytest.mark.parametrize(
    "link",
    [
        param
        for first, transport in enumerate(TRANSPORTS)
        for param in one_in(
            3,
            (Setting(FLASH, Ranks(), Ranks(), SMALL_SOURCE, form, transport, label) for label, form in FORMS.items()),
            first=first,
        )
    ],
    indirect=True,
    scope="module",
    ids=str,
)
def test_every_layout_of_the_destination(link: Crossing, case: Case) -> None:
    link.deliver(case)


PAGE_FIRST = (
    Form(ROOMY_DEVICE, page_first=True),
    replace(ROOMY, page_first=True, layout=HostLayout.PAGE_FIRST),
)
"""Of both sides: neighbours are copied together."""


@pytest.mark.parametrize("case", [Case(tokens) for tokens in (3, 256, 300, 4354)], ids=str)
@pytest.mark.parametrize(
    "link",
    [
        Setting(FLASH, Ranks(), Ranks(), *PAGE_FIRST, "mooncake", "neighbours", dead_bytes=dead)
        for dead in (False, True)
    ],
    indirect=True,
    scope="module",
    ids=lambda setting: "dead_bytes_too" if setting.dead_bytes else "live_rows_only",
)
def test_neighbours_are_copied_together(link: Crossing, case: Case) -> None:
    link.deliver(case)


@pytest.mark.parametrize(
    "link",
    [Setting(FLASH, Ranks(), Ranks(), *PAGE_FIRST, "mooncake", "early", dead_bytes=True)],
    indirect=True,
    scope="module",
    ids=str,
)
def test_dead_bytes_never_take_the_place_of_rows_that_came_before_or_after_them(link: Crossing) -> None:
    link.deliver(Case(4354, (300, 1500, 4300), longest_run=9, waits=False))
    link.deliver(Case(3330, (1030, 3329), prefix=256, waits=False, longest_run=6))

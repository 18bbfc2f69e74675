"""Cached pages whose bytes change in the pool between two turns, on real daemons: found, named, dropped, counted, and sent anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvbridge.core.geometry.components import Liveness
from kvbridge.engine.decode import DecodeRoom
from kvbridge.engine.views import PoolViews
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, all_free, http, live_cluster, metric, status
from tests.integration.test_shared_prefixes import NODE, PAGE, POOL, TINY, Conversation, append

MISMATCHES = "kvbridge_prefix_mismatches_total"
VERIFIES = {"verify_on_hit": True}
HOST_KIND = next(part for part in TINY.components if part.host_capable)
DEVICE_KIND = next(part for part in TINY.components if part.liveness is Liveness.GROWING and not part.host_capable)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def started(integrity: dict[str, Any], **ranks: int) -> Any:
    settings: dict[str, Any] = {"prefill": NODE, "decode": NODE | {"integrity": integrity}}
    return live_cluster(transport="local", pages=POOL, host_pages=24, **settings, **ranks)


@pytest.fixture(scope="module", params=["digests of its own", "the commit's digests 2"])
def live(request: pytest.FixtureRequest) -> Iterator[LiveCluster]:
    """Pages are looked at when they come; two decode ranks, which agree with prefill on what has come."""
    several = request.param.endswith("2")
    integrity = VERIFIES | ({"digest": "crc32c"} if several else {})
    with started(integrity, **({"decode_tp": 2} if several else {})) as running:
        assert running.sender
        assert running.reader
        yield running
        for daemon in (running.prefill, running.decode):
            all_free(daemon)
        running.no_traceback()


def change(view: PoolViews, part: Any, claimed: DecodeRoom, page: int, layers: int) -> None:
    """Let one bit of a row in the middle of a page be another one, in so many layers, at the same place."""
    row = page * part.rows_per_logical_page + 1
    for layer in view.layers(part.kind)[:layers]:
        rows = view.read_rows(part.kind, layer, tables=claimed.tables, start_row=row, stop_row=row + 1).clone()
        rows.view(torch.uint8).view(-1)[3] ^= 16
        view.write_rows(part.kind, layer, tables=claimed.tables, start_row=row, rows=rows)


def remembered(turns: Conversation, tokens: int) -> DecodeRoom:
    """A room that crosses and ends; its tables say where its pages still lie."""
    room = turns.admit(tokens)
    turns.write(room, tokens)
    claimed = turns.read(room, tokens)
    turns.live.reader.release(room)
    return claimed


def said(live: LiveCluster) -> list[str]:
    return [line for line in live.decode.log_path.read_text().splitlines() if "cached_pages_differ" in line]


def test_a_page_that_changed_is_found_and_the_next_room_is_sent_it_anew(live: LiveCluster) -> None:
    turns = Conversation(live, 1)
    claimed, lines = remembered(turns, 5 * PAGE + 3), len(said(live))
    assert turns.cross(5 * PAGE + 3) == 5 * PAGE, "pages that are as they were are shared"
    for part, page in ((HOST_KIND, 3), (DEVICE_KIND, 2)):
        before = metric(live.decode, MISMATCHES, component=part.kind)
        change(next(iter(live.reader.views.values())), part, claimed, page, layers=2)
        assert turns.cross(5 * PAGE + 3) == page * PAGE, f"{part.kind}: not found"
        assert metric(live.decode, MISMATCHES, component=part.kind) == before + 1
        line = said(live)[-1]
        assert f"page {page} of the prompt, key {turns.keys(5 * PAGE)[page].hex()}: {part.kind} in page" in line
        claimed = remembered(turns, 5 * PAGE + 3)
        assert claimed.prefix_tokens == 5 * PAGE, "what was sent anew is kept"
    assert len(said(live)) == lines + 2


def test_a_page_of_an_answer_that_changed_is_found(live: LiveCluster) -> None:
    turns, before = Conversation(live, 2), metric(live.decode, MISMATCHES, component=HOST_KIND.kind)
    prompt, whole = PAGE + 40, 3 * PAGE
    room = turns.admit(prompt, more=2 * PAGE)
    turns.write(room, prompt)
    claimed = turns.read(room, prompt)
    for view in live.reader.views.values():
        for part in TINY.components:
            if part.liveness is Liveness.GROWING:
                append(view, part, turns.number, claimed, prompt // part.tokens_per_row, whole // part.tokens_per_row)
    live.reader.release(room, valid_tokens=whole, page_hashes=turns.keys(whole))
    assert turns.cross(whole + 7) == whole
    change(next(iter(live.reader.views.values())), HOST_KIND, claimed, 2, layers=1)
    assert turns.cross(whole + 7) == 2 * PAGE
    assert metric(live.decode, MISMATCHES, component=HOST_KIND.kind) == before + 1


def test_everything_that_is_cached_can_be_dropped(live: LiveCluster) -> None:
    turns, tokens = Conversation(live, 4), 4 * PAGE + 5
    for daemon in (live.prefill, live.decode):
        http("DELETE", daemon, "/v1/prefixes")
    turns.cross(4 * PAGE)  # its end is a page's, so prefill has the windows there
    eventually("prefill has them too", lambda: status(live.prefill)["prefixes"]["unread_pages"] == 4)
    reading = turns.admit(tokens)
    for daemon in (live.prefill, live.decode):
        assert status(daemon)["prefixes"]["read_pages"] == 4
        answer = http("DELETE", daemon, "/v1/prefixes")
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"dropped_pages": 4, "read_pages": 4, "store": None}
        assert http("DELETE", daemon, "/v1/prefixes").json() == {"dropped_pages": 0, "read_pages": 0, "store": None}
    turns.write(reading, tokens)
    assert turns.read(reading, tokens).prefix_tokens == 4 * PAGE, "a room under way goes on with what it reads"
    live.reader.release(reading)
    assert turns.cross(tokens) == 0
    assert turns.cross(tokens) == 4 * PAGE


def test_without_the_option_nobody_looks() -> None:
    """What the check is for, and that it costs nothing: no rank worker is asked for a digest."""
    with started({}) as live:
        assert live.sender
        assert live.reader
        turns = Conversation(live, 3)
        claimed = remembered(turns, 3 * PAGE)
        change(next(iter(live.reader.views.values())), HOST_KIND, claimed, 1, layers=1)
        room = turns.admit(3 * PAGE)
        turns.write(room, 3 * PAGE)
        with pytest.raises(AssertionError, match=str(HOST_KIND.kind)):
            turns.read(room, 3 * PAGE)
        live.reader.release(room)
        assert metric(live.decode, MISMATCHES, component=HOST_KIND.kind) == 0

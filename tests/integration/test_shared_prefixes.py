"""Prefixes that stay on a decode node, through real daemons with C4 in the host pool: what is sent, and what is read.

The synthetic engine's bytes follow from a number and a place in the prompt. Here the number is that of a conversation, not of a
room, and prompts of one conversation begin alike: so each byte of a shared page has one right value, whoever wrote it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvbridge.core.geometry.components import Component, Liveness, ModelGeometry
from kvbridge.core.geometry.presets import preset
from kvbridge.core.plan.operations import Section
from kvbridge.engine.decode import DecodeRoom
from kvbridge.engine.views import PoolViews
from tests.contract.harness import BACKENDS, require_library
from tests.helpers import synthetic
from tests.helpers.cluster import eventually, live_rows_only
from tests.helpers.live_rooms import LiveCluster, all_free, ends, http, live_cluster, report, status
from tests.helpers.matrices import kept

TINY = preset("tiny-v4")
PAGE = TINY.tokens_per_page
OVERS = (0, 1, 2, 3, 4, 127, 128, 255)
CLAIM_S = 30.0
NODE = {"tier": {"enabled": True, "model_name": "tiny", "model_revision": "1"}}
POOL = {"full": 24, "swa": 16, "request": 8}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["local", "local 2:2", "mooncake", kept("nixl", False)])
def live(request: pytest.FixtureRequest) -> Iterator[LiveCluster]:
    """One rank each; two stages of prefill and two decode ranks, which share the host pool; one each, with digests."""
    transport = request.param.split()[0]
    require_library(BACKENDS[transport])
    digests = {"integrity": {"digest": "crc32c"}} if transport == "mooncake" else {}
    ranks = {"prefill_pp": 2, "decode_tp": 2} if request.param != transport else {}
    exact = NODE | live_rows_only(transport)
    settings: dict[str, Any] = {"prefill": exact, "decode": NODE | digests, "pages": POOL, "host_pages": 24}
    with live_cluster(transport=transport, **settings, **ranks) as running:
        assert running.sender
        assert running.reader
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def nothing_is_left(live: LiveCluster) -> Iterator[None]:
    yield
    for daemon in (live.prefill, live.decode):
        all_free(daemon)


class Conversation:
    """Prompts that begin alike, and the bytes that belong to them."""

    def __init__(self, live: LiveCluster, number: int) -> None:
        self.live, self.number = live, number
        self.tokens = [number * 100_000 + token for token in range(12 * PAGE)]

    def keys(self, tokens: int) -> Any:
        return self.live.sender.page_keys(self.tokens[:tokens])

    def admit(self, tokens: int, more: int = 0, **asked: Any) -> int:
        hashes = base64.b64encode(self.keys(tokens).data).decode()
        return int(self.live.ticket(tokens, page_hashes=hashes, max_new_tokens=more, **asked)["room"])

    def write(self, room: int, tokens: int) -> None:
        """The prefill engine's part: it computes from where it is told to."""
        sender = self.live.sender
        begun = sender.begin(room, prompt_tokens=tokens, page_hashes=self.keys(tokens))
        section = Section(prompt_tokens=tokens, start_token=begun.computed_tokens, stop_token=tokens)
        for view in sender.views.values():
            synthetic.fill(view, room=self.number, tables=begun.tables, section=section)
        sender.publish(room, tokens)
        sender.finish(room)

    def read(self, room: int, tokens: int) -> DecodeRoom:
        """The decode engine's part: every byte of the prompt, whoever sent it, and how many were sent."""
        claimed = self.live.reader.wait_claim(room, CLAIM_S, page_hashes=self.keys(tokens))
        for view in self.live.reader.views.values():
            wrong = synthetic.compare(view, room=self.number, tables=claimed.tables, tokens=tokens)
            assert not wrong.wrong_bytes, wrong.mismatches[0]
            assert wrong.checked_bytes
        sent = sum(amount.bytes for amount in claimed.amounts.values())
        try:
            assert sent == owed_bytes(TINY, tokens, claimed.prefix_tokens, ranks=len(self.live.reader.views))
        except AssertionError:
            self.live.reader.release(room)
            raise
        return claimed

    def cross(self, tokens: int, **asked: Any) -> int:
        """A whole room; returns how much of its prompt decode held."""
        room = self.admit(tokens, **asked)
        self.write(room, tokens)
        held = self.read(room, tokens).prefix_tokens
        self.live.reader.release(room)
        return held


def owed_bytes(geometry: ModelGeometry, tokens: int, prefix_tokens: int, *, ranks: int = 1) -> int:
    """The geometry's own sum for a prompt of which decode holds so much; pages that are sent whole take their padding along.

    Each rank has all lanes of what is not in the host pool.
    """
    found = 0
    for part in geometry.components:
        rows, each = part.live_rows(tokens, prefix_tokens), part.rows_per_logical_page
        for page in range(rows.start // each, -(-rows.stop // each)):
            inside = min(rows.stop, (page + 1) * each) - max(rows.start, page * each)
            page_bytes = part.page_bytes() if inside == part.slots_per_page else inside * part.row_bytes * part.lanes
            found += page_bytes * len(part.layers) * (1 if part.host_capable else ranks)
    return found


def forget(live: LiveCluster) -> None:
    """Push everything that is cached out, by a room that takes all pages."""
    other = Conversation(live, 99)
    room = other.admit(10 * PAGE, more=14 * PAGE)
    assert status(live.decode)["pools"]["full"]["cached"] == 0
    assert http("DELETE", live.decode, f"/v1/requests/{room}").status_code == 200
    http("DELETE", live.prefill, f"/v1/requests/{room}")
    ends(live.decode, room, "aborted", "aborted")


@pytest.mark.parametrize("over", OVERS)
def test_the_second_turn_is_sent_what_lacks_and_every_byte_is_right(live: LiveCluster, over: int) -> None:
    turns = Conversation(live, 1 + over)
    assert turns.cross(2 * PAGE + over) == 0
    assert turns.cross(3 * PAGE + over) == 2 * PAGE, "nothing was reused"
    assert turns.cross(3 * PAGE + over) == 3 * PAGE, "a prompt that is wholly held"
    assert owed_bytes(TINY, 3 * PAGE + over, 3 * PAGE) < owed_bytes(TINY, 3 * PAGE + over, 0)


def test_what_was_evicted_is_sent_again(live: LiveCluster) -> None:
    turns = Conversation(live, 300)
    turns.cross(4 * PAGE + 9)
    assert turns.cross(4 * PAGE + 9) == 4 * PAGE
    forget(live)
    assert turns.cross(4 * PAGE + 9) == 0
    assert turns.cross(5 * PAGE) == 4 * PAGE


def test_what_is_retained_is_there_when_others_have_come_meanwhile(live: LiveCluster) -> None:
    """An agent waits for its tool while longer prompts than all that is free pass, and one that wants more than its share."""
    forget(live)
    agent, plain, greedy = (Conversation(live, number) for number in (310, 311, 312))
    before = status(live.decode)["prefixes"]["retention_refused"]
    agent.cross(3 * PAGE, retention={"priority": 3, "for_s": 3600})
    plain.cross(3 * PAGE)
    greedy.cross(4 * PAGE, retention={"priority": 1, "for_s": 3600})  # 3 + 4 of 24 pages are more than a quarter
    prefixes = status(live.decode)["prefixes"]
    assert (prefixes["retained_pages"], prefixes["retention_refused"] - before) == ({"": 3}, 1)
    other = Conversation(live, 313)
    room = other.admit(10 * PAGE, more=11 * PAGE)
    assert http("DELETE", live.decode, f"/v1/requests/{room}").status_code == 200
    http("DELETE", live.prefill, f"/v1/requests/{room}")
    ends(live.decode, room, "aborted", "aborted")
    assert agent.cross(4 * PAGE) == 3 * PAGE
    assert plain.cross(3 * PAGE) == 0
    forget(live)
    gone = status(live.decode)["prefixes"]["evicted_pages"]
    assert gone["retained"] >= 3, "nothing is kept from a request that needs all there is"
    assert 'kvbridge_prefix_evicted_pages_total{reason="retained"}' in http("GET", live.decode, "/metrics").text


def test_an_abort_in_the_middle_leaves_the_prefix_and_a_sibling_that_reads_it(live: LiveCluster) -> None:
    turns = Conversation(live, 301)
    turns.cross(3 * PAGE)
    aborted, sibling = turns.admit(5 * PAGE + 1), turns.admit(4 * PAGE)
    begun = live.sender.begin(aborted, prompt_tokens=5 * PAGE + 1, page_hashes=turns.keys(5 * PAGE + 1))
    section = Section(
        prompt_tokens=5 * PAGE + 1, start_token=begun.computed_tokens, stop_token=max(PAGE, begun.computed_tokens)
    )
    for view in live.sender.views.values():
        synthetic.fill(view, room=turns.number, tables=begun.tables, section=section)
    live.sender.abort(aborted, "a test")
    assert eventually("its end", lambda: report(live.decode, aborted)["reason"])
    turns.write(sibling, 4 * PAGE)
    assert turns.read(sibling, 4 * PAGE).prefix_tokens == 3 * PAGE
    live.reader.release(sibling)
    assert turns.cross(5 * PAGE + 1) == 4 * PAGE


def test_the_answer_is_there_for_the_next_turn(live: LiveCluster) -> None:
    """What decode appended is the engine's own rows: written here as the next prompt has them."""
    turns = Conversation(live, 302)
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


def test_an_engine_that_leaves_in_the_middle_of_an_answer_leaves_the_prompt_warm(live: LiveCluster) -> None:
    turns = Conversation(live, 303)
    room = turns.admit(2 * PAGE + 3, more=PAGE)
    turns.write(room, 2 * PAGE + 3)
    turns.read(room, 2 * PAGE + 3)
    assert turns.keys(2 * PAGE)
    sibling = turns.admit(2 * PAGE + 9)
    live.detach()
    assert eventually("its end", lambda: report(live.decode, room)["state"] == "failed")
    assert live.reader, "attached again"
    turns.write(sibling, 2 * PAGE + 9)
    assert turns.read(sibling, 2 * PAGE + 9).prefix_tokens == 2 * PAGE
    live.reader.release(sibling)
    assert turns.cross(3 * PAGE) == 2 * PAGE


def append(view: PoolViews, part: Component, number: int, claimed: DecodeRoom, start_row: int, stop_row: int) -> None:
    """Write rows of a growing component, as decode does while it answers."""
    for layer in view.layers(part.kind):
        lanes, rows = (0, part.lanes), {"start_row": start_row, "stop_row": stop_row}
        values = synthetic.expected_rows(part, room=number, layer=layer, lanes=lanes, **rows)
        view.write_rows(part.kind, layer, tables=claimed.tables, start_row=start_row, rows=torch.from_numpy(values))


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

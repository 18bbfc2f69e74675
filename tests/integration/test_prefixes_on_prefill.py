"""Prefixes that stay on prefill, through real daemons: the engine computes and writes only what is new, and every byte is right.

Bytes follow from a conversation and the place of a row, so whatever comes out of another conversation's page is seen.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvbridge.core.geometry.presets import preset
from kvbridge.core.ids import IndexSpace
from kvbridge.core.plan.operations import Section
from kvbridge.engine.prefill import PrefillRoom
from tests.helpers import synthetic
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import LiveCluster, busy_pages, ends, http, live_cluster, report

PAGE = 256
TIER = {"tier": {"enabled": True, "model_name": "tiny", "model_revision": "1"}}


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    """Nodes whose pools hold two or three prompts. Every test has conversations of its own."""
    with live_cluster(prefill=TIER, decode=TIER, pages={"full": 16, "swa": 8, "request": 4}) as running:
        assert running.sender
        assert running.reader
        yield running
        running.no_traceback()


def prompt(conversation: int, length: int) -> list[int]:
    return [conversation * 100_000 + place for place in range(length)]


@dataclass
class Turn:
    """One request of a conversation, of which nothing has been done yet but its admission on both sides."""

    live: LiveCluster
    conversation: int
    length: int
    on_both_sides: bool = True
    begun: PrefillRoom | None = None
    written: int = 0
    """Bytes of the prompt that the engine has written, those of checkpoints not counted."""

    def __post_init__(self) -> None:
        self.keys = self.live.sender.page_keys(prompt(self.conversation, self.length))
        hashes = base64.b64encode(self.keys.data).decode()
        if self.on_both_sides:
            self.room = int(self.live.ticket(self.length, page_hashes=hashes)["room"])
            return
        body = {"prompt_tokens": self.length, "page_hashes": hashes}
        answer = http("POST", self.live.prefill, "/v1/requests", json=body)
        assert answer.status_code == 201, answer.text
        self.room = answer.json()["room"]

    def begin(self) -> PrefillRoom:
        """Begin it and look at what the engine starts from."""
        self.begun = self.live.sender.begin(self.room, prompt_tokens=self.length, page_hashes=self.keys)
        if self.begun.computed_tokens:
            for views in self.live.sender.views.values():
                found = synthetic.compare(
                    views, room=self.conversation, tables=self.begun.restore, tokens=self.begun.computed_tokens
                )
                assert found.checked_bytes
                assert not found.mismatches, found.mismatches[0]
        return self.begun

    def compute(self, *, leave_checkpoints: bool = True) -> None:
        """Write and publish what is new, cut where checkpoints are wanted, and finish."""
        begun = self.begun or self.begin()
        start, wanted = begun.computed_tokens, begun.checkpoints if leave_checkpoints else {}
        for stop in [*wanted, self.length]:
            section = Section(prompt_tokens=self.length, start_token=start, stop_token=stop)
            at_end = Section(prompt_tokens=stop, prefix_tokens=stop // PAGE * PAGE, start_token=0, stop_token=stop)
            for views in self.live.sender.views.values():
                self.written += synthetic.fill(views, room=self.conversation, tables=begun.tables, section=section)
                if stop in wanted:
                    assert synthetic.fill(views, room=self.conversation, tables=wanted[stop], section=at_end)
            self.live.sender.publish(self.room, stop)
            start = stop
        self.live.sender.finish(self.room, checkpoints=list(wanted))

    def check(self) -> None:
        """Claim it and look at every byte that decode has."""
        claimed = self.live.reader.wait_claim(self.room, 30, page_hashes=self.keys)
        for views in self.live.reader.views.values():
            found = synthetic.compare(views, room=self.conversation, tables=claimed.tables, tokens=self.length)
            assert not found.mismatches, found.mismatches[0]
        self.live.reader.release(self.room)

    def cross(self, *, leave_checkpoints: bool = True) -> Turn:
        """All of it; returns itself when prefill has let go, too."""
        self.compute(leave_checkpoints=leave_checkpoints)
        self.check()
        ends(self.live.prefill, self.room, "completed")
        eventually("let go", lambda: idle(self.live.prefill))
        return self

    @property
    def computed(self) -> int:
        """Where prefill's engine started, as engine and receipt say alike."""
        assert self.begun is not None
        told = report(self.live.prefill, self.room)["computed_tokens"]
        assert told == self.begun.computed_tokens
        return told

    @property
    def held(self) -> int:
        """What decode held, as both receipts say alike."""
        told = {report(daemon, self.room)["prefix_tokens"] for daemon in (self.live.prefill, self.live.decode)}
        assert len(told) == 1, told
        return told.pop()


def idle(daemon: DaemonProcess) -> bool:
    """Whether no page of a daemon is anybody's but the cache's."""
    return all(states.keys() <= {"cached"} for states in busy_pages(daemon).values())


def rows_bytes(tokens: int, prefix_tokens: int) -> int:
    """What of a prompt is not in its first `prefix_tokens` tokens' growing rows: windows and states are always whole."""
    return sum(
        part.live_rows(tokens, prefix_tokens).count * part.row_bytes * part.lanes * len(part.layers)
        for part in preset("tiny-v4").components
    )


def only_on_prefill(live: LiveCluster, conversation: int, length: int) -> None:
    """Leave a prompt and its checkpoint on the prefill node alone."""
    turn = Turn(live, conversation, length, on_both_sides=False)
    turn.compute()
    http("DELETE", live.prefill, f"/v1/requests/{turn.room}")
    eventually("let go", lambda: idle(live.prefill))


def test_the_second_turn_computes_only_what_is_new(live: LiveCluster) -> None:
    first, second, again = (Turn(live, 1, length).cross() for length in (1000, 1500, 1500))
    assert [turn.computed for turn in (first, second, again)] == [0, 768, 1280]
    assert [turn.held for turn in (first, second, again)] == [0, 768, 1280]
    for turn in (first, second, again):
        assert turn.written == rows_bytes(turn.length, turn.computed)


@pytest.mark.parametrize("length", [3 * PAGE + behind for behind in (0, 1, 128, 255)])
def test_a_prompt_that_ends_anywhere_in_a_page_is_continued(live: LiveCluster, length: int) -> None:
    turns = [Turn(live, 1_000 + length, length + 300 * number).cross().computed for number in range(3)]
    assert turns == [0, 3 * PAGE, (length + 300) // PAGE * PAGE]


def test_without_its_checkpoint_a_prefix_is_computed_again_and_decode_may_hold_more(live: LiveCluster) -> None:
    Turn(live, 2, 1000).cross(leave_checkpoints=False)
    second = Turn(live, 2, 1500).cross()
    assert (second.computed, second.held) == (0, 768)
    assert Turn(live, 2, 1501).cross().computed == 1280


def test_decode_holds_less_than_prefill(live: LiveCluster) -> None:
    Turn(live, 3, 600).cross()
    only_on_prefill(live, 3, 1100)
    turn = Turn(live, 3, 1500).cross()
    assert (turn.computed, turn.held) == (1024, 512)


def test_decode_holds_nothing(live: LiveCluster) -> None:
    only_on_prefill(live, 6, 1100)
    turn = Turn(live, 6, 1500).cross()
    assert (turn.computed, turn.held) == (1024, 0)


def test_what_is_evicted_is_computed_again(live: LiveCluster) -> None:
    Turn(live, 4, 1000).cross()
    for other in range(10, 14):
        Turn(live, other, 9 * PAGE).cross()
    assert Turn(live, 4, 1500).cross().computed == 0
    assert Turn(live, 4, 1501).cross().computed == 1280


def test_two_requests_at_once_over_one_prefix_and_one_is_killed(live: LiveCluster) -> None:
    Turn(live, 5, 1000).cross()
    killed, living = Turn(live, 5, 1500), Turn(live, 5, 1400)
    shared = [turn.begin().tables for turn in (killed, living)]
    assert [turn.begun and turn.begun.computed_tokens for turn in (killed, living)] == [768, 768]
    first, second = (tables[IndexSpace.FULL].ids for tables in shared)
    assert first[:3].tolist() == second[:3].tolist()
    assert not set(first[3:].tolist()) & set(second[3:].tolist())
    live.sender.abort(killed.room, "killed")
    ends(live.decode, killed.room, "failed", "aborted")
    living.cross()
    assert Turn(live, 5, 1300).cross().computed == 1280

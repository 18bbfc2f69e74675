"""Prefixes that move down to host memory and come back, through real daemons: every byte, states included, whatever was evicted."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cluster import eventually
from tests.helpers.conversation import PAGE, Conversation
from tests.helpers.host_tiers import adds_up, copies, drop, forget, host_tier, host_tiers, let_go, on_host
from tests.helpers.live_rooms import LiveCluster, status
from tests.helpers.matrices import kept

POOL = {"full": 24, "swa": 12, "request": 6}
WRITE_THROUGH = "page_first layer_first kernel write_through ranks"
SETTINGS = [
    WRITE_THROUGH,
    "page_first page_first direct write_through_selective",
    "layer_first layer_first kernel write_back",
    *(
        kept(setting, False)
        for setting in (
            "layer_first page_first kernel write_through",
            "page_first page_first kernel write_through_selective",
            "layer_first layer_first kernel write_through heads",
        )
    ),
]
"""Layouts of host and device, copy backend, policy; several ranks that share the host, or that have heads of their own."""

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Tiers:
    live: LiveCluster
    policy: str

    def warm(self, talk: Conversation, tokens: int, *, leave: int = 0) -> None:
        """Use a prompt until the host takes it, and have the devices forget all but so many pages."""
        talk.cross(tokens)
        if self.policy == "write_through_selective":
            assert host_tier(self.live.decode)["device_pages"] >= tokens // PAGE, "it was used once"
            talk.cross(tokens)
        if self.policy == "write_back":
            eventually("backed up", lambda: all(host_tier(daemon)["both_pages"] for daemon in self.live.nodes))
        else:
            on_host(*self.live.nodes)
        forget(self.live, leave=leave)


@pytest.fixture(scope="module", params=SETTINGS)
def tiers(request: pytest.FixtureRequest) -> Iterator[Tiers]:
    host, device, backend, policy, *ranks = request.param.split()
    more: dict[str, Any] = {}
    if ranks == ["ranks"]:
        more = {"prefill_pp": 2, "prefill_tp": 2, "decode_tp": 2}
    elif ranks == ["heads"]:
        pools = {"pools": {"device": POOL, "host": {"components": []}}}
        more = {"model": "tiny-gqa", "prefill_tp": 2, "decode_pp": 2, "decode": pools, "checkpoint_pages": 0}
    settings = {"layout": host, "backend": backend, "backup": {"policy": policy, "low_share": 0.5}}
    with host_tiers(host=settings, device_layout=device, pages=POOL, **more) as live:
        files = files_of_twins(live, backend)
        yield Tiers(live, policy)
    assert not any(path.exists() for path in files), "twins outlive their node"


def files_of_twins(live: LiveCluster, backend: str) -> set[Path]:
    """Both engines have attached to what was configured; returns the files that twins lie in."""
    answers = [engine._answer for engine in (live.sender, live.reader)]
    assert {answer.copy_backend for answer in answers} == {backend}
    files = {Path(origin.path) for answer in answers for shared in answer.twins for origin in shared.origins}
    assert all(path.exists() for path in files)
    return files


@pytest.fixture(autouse=True)
def nothing_is_left(tiers: Tiers) -> Iterator[None]:
    """Each test begins with empty caches, and ends with every page free or cached."""
    drop(*tiers.live.nodes)
    yield
    let_go(tiers.live)
    for daemon in tiers.live.nodes:
        adds_up(daemon)


@pytest.mark.parametrize(("left", "by_layer"), [(0, False), (1, True)])
def test_what_the_device_has_lost_comes_back_from_the_host(tiers: Tiers, left: int, by_layer: bool) -> None:
    if tiers.policy == "write_back":
        pytest.skip("what is backed up ahead of need is not known beforehand")
    live, talk = tiers.live, Conversation(tiers.live, 1 + left + 2 * by_layer, by_layer=by_layer)
    tiers.warm(talk, 3 * PAGE + 40, leave=left)
    before = [copies(daemon, "load_back") for daemon in live.nodes]
    turn = talk.cross(5 * PAGE + 7)
    assert turn.reused == (3 * PAGE, 3 * PAGE)
    assert 0 < min(turn.from_host) <= max(turn.from_host) <= 3 * PAGE
    assert left or turn.from_host == turn.reused
    assert [copies(daemon, "load_back") for daemon in live.nodes] == [count + 1 for count in before]
    turn = talk.cross(5 * PAGE + 90)
    assert turn.reused == (5 * PAGE, 5 * PAGE)
    assert turn.from_host == (0, 0), "what came back is on the device, and what went on from it"


def test_many_conversations_at_once_whatever_is_evicted(tiers: Tiers) -> None:
    """Eight of them, three in flight at a time, in a device that holds two; every byte of every turn is looked at."""
    live, came = tiers.live, [0, 0]
    talks = [Conversation(live, 100 + number) for number in range(8)]
    counted = [status(daemon)["prefixes"]["host_tokens"] for daemon in live.nodes]
    for step in range(4):
        for first in range(0, len(talks), 3):
            turns = [
                talk.turn(2 * PAGE + step * (PAGE + 40) + 17 * number)
                for number, talk in enumerate(talks[first : first + 3], start=first)
            ]
            for turn in turns:
                turn.begin()
            for turn in reversed(turns):
                turn.compute()
            for turn in turns:
                turn.read().release()
            for turn in turns:
                turn.end()
                came = [total + tokens for total, tokens in zip(came, turn.from_host, strict=True)]
    for daemon, before, tokens in zip(live.nodes, counted, came, strict=True):
        assert tokens > 0, f"nothing came back on {daemon.name}"
        # Rooms that the other side had no pages for were admitted here, and asked for once more.
        assert status(daemon)["prefixes"]["host_tokens"] - before >= tokens

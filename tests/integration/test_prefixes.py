"""Prefixes that stay on the devices of both nodes, through real daemons: what is computed, sent and read."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.harness import BACKENDS, require_library
from tests.helpers.cluster import live_rows_only
from tests.helpers.conversation import PAGE, TIER, Conversation, owed_bytes
from tests.helpers.host_tiers import forget
from tests.helpers.live_rooms import LiveCluster, all_free, http, live_cluster, metric, status
from tests.helpers.matrices import kept

OVERS = (0, 1, 255)
POOL = {"full": 24, "swa": 16, "request": 8}
LOCAL = "local 2:2"

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=[LOCAL])
def live(request: pytest.FixtureRequest) -> Iterator[LiveCluster]:
    """Two stages of prefill and two decode ranks, which share the host pool; one rank each; one each, with digests."""
    transport = request.param.split()[0]
    require_library(BACKENDS[transport])
    digests = {"integrity": {"digest": "crc32c"}} if transport == "mooncake" else {}
    ranks = {"prefill_pp": 2, "decode_tp": 2} if request.param != transport else {}
    settings: dict[str, Any] = {"prefill": TIER | live_rows_only(transport), "decode": TIER | digests}
    with live_cluster(transport=transport, pages=POOL, host_pages=24, **settings, **ranks) as running:
        assert running.sender
        assert running.reader
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def nothing_is_left(live: LiveCluster) -> Iterator[None]:
    yield
    for daemon in live.nodes:
        all_free(daemon)


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize(
    "live", [LOCAL, "mooncake", kept("local", False), kept("nixl", False)], indirect=True, scope="module"
)
def test_each_turn_computes_and_sends_what_is_new_and_every_byte_is_right(live: LiveCluster, over: int) -> None:
    talk, geometry = Conversation(live, 1 + over), live.sender.geometry
    turns = [talk.cross(pages * PAGE + over) for pages in (2, 3, 3)]
    whole = (3 * PAGE + over - 1) // PAGE * PAGE  # prefill computes the last token all the same
    assert [turn.reused for turn in turns] == [(0, 0), (2 * PAGE, 2 * PAGE), (whole, 3 * PAGE)]
    for turn in turns:
        computed, held = turn.reused
        assert turn.sent_bytes == owed_bytes(geometry, turn.tokens, held, ranks=len(live.reader.views))
        assert turn.written_bytes == sum(
            part.live_rows(turn.tokens, computed).count * part.row_bytes * part.lanes * len(part.layers)
            for part in geometry.components
        )


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
    live.take(live.decode, POOL["full"] - 3)
    assert agent.cross(4 * PAGE).reused[1] == 3 * PAGE
    assert plain.cross(3 * PAGE).reused[1] == 0
    forget(live)
    gone = metric(live.decode, "kvbridge_prefix_evicted_pages_total", reason="retained")
    assert gone >= 3, "nothing is kept from a request that needs all there is"
    assert not status(live.decode)["prefixes"]["retained_pages"].get("")


def test_the_answer_is_there_for_the_next_turn(live: LiveCluster) -> None:
    """Decode appended the engine's own rows: written here as the next prompt has them."""
    talk = Conversation(live, 302)
    turn = talk.turn(PAGE + 40, more=2 * PAGE)
    turn.compute()
    turn.read().release(answered=3 * PAGE)
    assert talk.cross(3 * PAGE + 7).reused == (PAGE, 3 * PAGE)


def test_without_its_checkpoint_a_prefix_is_computed_again_and_decode_may_hold_more(live: LiveCluster) -> None:
    talk = Conversation(live, 304)
    talk.cross(1000, checkpoints=False)
    assert talk.cross(1500).reused == (0, 768)
    assert talk.cross(1501).reused == (1280, 1280)


def test_everything_that_is_cached_can_be_dropped(live: LiveCluster) -> None:
    talk, tokens = Conversation(live, 330), 4 * PAGE + 5
    for daemon in live.nodes:
        http("DELETE", daemon, "/v1/prefixes")
    talk.cross(4 * PAGE)
    reading = talk.turn(tokens)
    for daemon in live.nodes:
        answer = http("DELETE", daemon, "/v1/prefixes")
        assert answer.json() == {"dropped_pages": 4, "read_pages": 4, "store": None}
        assert http("DELETE", daemon, "/v1/prefixes").json() == {"dropped_pages": 0, "read_pages": 0, "store": None}
    reading.compute()
    reading.read().release()
    assert reading.reused == (4 * PAGE, 4 * PAGE), "a room under way goes on with what it reads"
    assert talk.cross(tokens).reused == (0, 0)
    assert talk.cross(tokens).reused == (4 * PAGE, 4 * PAGE)

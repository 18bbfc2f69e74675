"""The engines' sockets of running daemons: calls in the wrong order, of the wrong size and by the wrong caller; engines that leave.

A refused call changes nothing: after each the room in question is finished correctly, byte for byte.
"""

import pytest

from kvbridge.core.ids import Rank
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine, PrefillRoom
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, all_free, ends, raises_code, report, status

TOKENS = 1000


@pytest.fixture
def room(live: LiveCluster) -> int:
    """A room that is reserved on both sides and not begun. Both engines are attached."""
    assert live.sender
    assert live.reader
    return live.pair(TOKENS)


def completed(live: LiveCluster, room: int) -> None:
    """The rest of a published room goes well."""
    live.begun[room].finish()
    live.read(room, TOKENS).release()
    for daemon in live.nodes:
        assert ends(daemon, room, "completed") == ""
        all_free(daemon)


def test_prefill_calls_out_of_order(live: LiveCluster, room: int) -> None:
    sender, begun = live.sender, PrefillRoom(live.sender, room, 1, TOKENS, {})
    assert "not begun" in raises_code("conflict", lambda: begun.publish(10))
    assert "not begun" in raises_code("conflict", begun.finish)
    text = raises_code("invalid_input", lambda: sender.begin(room, prompt_tokens=TOKENS - 1))
    assert "admitted with 1000 prompt tokens" in text
    live.write(room, TOKENS, 0, 500)
    assert "already begun" in raises_code("conflict", lambda: sender.begin(room, prompt_tokens=TOKENS))
    text = raises_code("invalid_input", lambda: begun.publish(TOKENS + 1))
    assert "publish(1001) is past the 1000 tokens that were reserved" in text
    assert "goes backwards" in raises_code("conflict", lambda: begun.publish(499))
    assert "[99]" in raises_code("invalid_input", lambda: begun.publish(600, layers=(0, 99)))
    assert "published 500 of 1000 tokens" in raises_code("conflict", begun.finish)
    live.write(room, TOKENS, 500, TOKENS)
    completed(live, room)
    for call in (lambda: begun.publish(TOKENS), begun.finish, lambda: sender.begin(room, prompt_tokens=TOKENS)):
        assert "over" in raises_code("conflict", call)
    begun.abort("harmless on a room that is over")
    assert report(live.prefill, room)["state"] == "completed"


def test_another_engine_of_the_same_rank_has_no_say(live: LiveCluster, room: int) -> None:
    live.write(room, TOKENS, 0, 500)
    with PrefillEngine.attach(live.prefill.runtime_dir) as other:
        theirs = PrefillRoom(other, room, 1, TOKENS, {})
        raises_code("conflict", lambda: other.begin(room, prompt_tokens=TOKENS))
        raises_code("conflict", lambda: theirs.publish(TOKENS))
        raises_code("conflict", theirs.finish)
    live.write(room, TOKENS, 500, TOKENS)
    completed(live, room)


def test_who_cannot_attach(live: LiveCluster) -> None:
    text = raises_code("invalid_input", lambda: PrefillEngine.attach(live.decode.runtime_dir))
    assert "this is a decode daemon; a prefill engine cannot attach to it" in text
    raises_code("invalid_input", lambda: DecodeEngine.attach(live.prefill.runtime_dir))
    unknown = [Rank(pp=3, tp=1)]
    text = raises_code("invalid_input", lambda: PrefillEngine.attach(live.prefill.runtime_dir, ranks=unknown))
    assert "['pp3.tp1'] do not live on this node (it has ['pp0.tp0'])" in text
    nobody = live.cluster.folder / "nobody"
    nobody.mkdir(mode=0o700)
    raises_code("not_ready", lambda: PrefillEngine.attach(nobody, call_timeout_s=0.2))
    eventually("nobody left behind", lambda: not status(live.prefill)["engines"] and not status(live.decode)["engines"])


def test_an_engine_that_leaves_fails_what_it_had_begun(live: LiveCluster, room: int) -> None:
    live.write(room, TOKENS, 0, 500)
    live.detach()
    for daemon in live.nodes:
        assert "is gone" in ends(daemon, room, "failed", "peer_failed")

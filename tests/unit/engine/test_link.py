"""How an engine finds its node."""

import tempfile
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbridge.core.errors import BridgeError, NotReadyError, RoomFailedError
from kvbridge.core.ids import Role
from kvbridge.core.wire.engine_messages import Accepted, EngineToNode, Finish, Hold, NodeToEngine, Publish, Refused
from kvbridge.engine import DecodeEngine
from kvbridge.engine.link import EngineLink
from tests.helpers.hooked_vllm import Node as AdoptedNode
from tests.helpers.rooms import ADDRESS, PAGE


@pytest.mark.outside
def test_the_runtime_directory_may_be_relative_to_where_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `cluster/run/decode`: what is missing is the daemon, not a slash."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as folder:
        monkeypatch.chdir(folder)
        (Path(folder) / "run").mkdir(mode=0o700)
        with pytest.raises(BridgeError) as raised:
            DecodeEngine.attach("run", call_timeout_s=0.1)
    assert "must be absolute" not in str(raised.value)


class Node:
    """A node's end of an engine's link, which answers what it is told to, in its own time."""

    def __init__(self, *answers: NodeToEngine) -> None:
        self.answers, self.said = deque(answers), []
        self.reads = True

    def send(self, message: EngineToNode, timeout_s: float) -> None:
        if not self.reads:
            raise NotReadyError(f"could not send within {timeout_s} s")
        self.said.append((message, timeout_s))

    def receive(self, timeout_s: float) -> NodeToEngine | None:
        return self.answers.popleft() if self.answers else None

    def close(self) -> None:
        pass


@pytest.fixture
def link() -> Iterator[EngineLink]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as folder:
        made = EngineLink(folder, timeout_s=20)
        made._client.close()
        made._client = Node()
        yield made


def test_a_refusal_says_which_generation_the_message_named(link: EngineLink) -> None:
    link.post(Hold(call=link.number(), room=5, generation=3, prompt_tokens=16))
    link._client.answers.append(Refused(call=1, code="conflict", message="it is over"))
    assert [event.generation for event in link.events()] == [3]


def test_a_call_passes_the_answers_that_nobody_waits_for(link: EngineLink) -> None:
    link.post(Publish(call=link.number(), room=5, upto_token=1))
    refused = Refused(call=1, code="conflict", message="it is over")
    link._client.answers.extend((refused, Accepted(call=2)))
    assert link.call(Finish(call=link.number(), room=6), Accepted) == Accepted(call=2)
    assert [event.kind for event in link.events()] == ["refused"]


def test_whoever_waits_to_claim_a_room_hears_why_its_pages_were_refused() -> None:
    node = AdoptedNode(Role.DECODE)
    engine = node.attach()
    assert isinstance(engine, DecodeEngine)
    engine.fetch(5, prompt_tokens=2 * PAGE, prefill=(ADDRESS,))
    engine.fetch(5, pages=[99, 100])
    with pytest.raises(RoomFailedError, match=r"room 5 refused: .*99"):
        engine.claim(5, timeout_s=0.2)

"""`kvbridge status`, `rooms` and `room`, asked of running daemons."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from kvbridge.cli.main import app
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, ends, http, reserve

NOBODY = "http://127.0.0.1:9"


def kvbridge(*arguments: str | Path, code: int = 0) -> Result:
    found = CliRunner().invoke(app, [*map(str, arguments)])
    assert found.exit_code == code, found.output
    return found


def test_the_state_of_each_daemon_and_a_daemon_that_does_not_answer(live: LiveCluster) -> None:
    assert live.sender is not None
    prefill, decode, bootstrap = live.prefill, live.decode, live.cluster.bootstrap
    eventually("bootstrap is ready", lambda: http("GET", bootstrap, "/ready").status_code == 200)
    said = kvbridge("status", prefill.runtime_dir, decode.url, bootstrap.url).output
    blocks = said.split("\n\n")
    assert [block.split(": ")[1:3] for block in (one.partition(", up")[0] for one in blocks)] == [
        ["prefill prefill-0/node-0", "ready"],
        ["decode decode-0/node-0", "ready"],
        ["bootstrap", "ready"],
    ]
    assert "rank pp0.tp0: ready" in blocks[0]
    assert "engines: engine-" in blocks[0]
    assert "engines: none is attached" in blocks[1]
    assert "prefill prefill-0: ready, tiny-v4" in blocks[2]
    half = kvbridge("status", NOBODY, bootstrap.url, code=1).output
    assert NOBODY in half.splitlines()[0]
    assert "failed" in half.splitlines()[0]
    assert ": bootstrap: ready" in half
    documents = json.loads(kvbridge("status", "--json", bootstrap.url).output)
    assert documents[bootstrap.url]["role"] == "bootstrap"


def test_a_room_while_it_waits_and_after_its_end(live: LiveCluster) -> None:
    room = reserve(live.prefill, {"prompt_tokens": 700, "client": "night"})
    waits = kvbridge("rooms", "--client", "night", live.prefill.url).output
    assert f"{room}  admitted" in waits
    assert "a prefill engine to begin it" in waits
    assert "timeouts.begin_s" in waits
    story = kvbridge("room", room, live.prefill.url).output
    assert f"prefill room {room}, generation 1: admitted" in story
    assert "700 prompt tokens" in story
    http("DELETE", live.prefill, f"/v1/requests/{room}", params={"reason": "asked by the night shift"})
    ends(live.prefill, room, "aborted", "aborted")
    assert f"{room}  " not in kvbridge("rooms", "--client", "night", live.prefill.url).output
    assert "aborted: asked by the night shift" in kvbridge("rooms", "--ended", live.prefill.url).output
    listed = json.loads(kvbridge("rooms", "--ended", "--client", "night", "--json", live.prefill.url).output)
    assert room in {one["room"] for one in listed[live.prefill.url]}
    both = kvbridge("room", room, live.prefill.url, live.decode.url).output
    assert "! aborted: asked by the night shift" in both
    assert f"room {room} is not known to this decode daemon" in both


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("room", "77777777"), 1, "is not known to this prefill daemon"),
        (("rooms", "--state", "asleep"), 2, "'asleep' is not one of"),
        (("status", "nowhere"), 2, "nowhere is no directory"),
        (("status", "--token-file", "/nowhere/token"), 2, "cannot read /nowhere/token"),
    ],
)
def test_what_cannot_be_shown(live: LiveCluster, arguments: tuple[str, ...], code: int, said: str) -> None:
    assert said in kvbridge(*arguments, live.prefill.url, code=code).output

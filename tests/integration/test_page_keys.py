"""Page keys and namespaces through real daemons: bootstrap, both nodes and an engine on each."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.core.errors import RoomFailedError
from kvbridge.core.plan.operations import Section
from kvbridge.engine.base import Engine
from kvbridge.tier.keys import Keys
from tests.helpers import synthetic
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import (
    LiveCluster,
    all_free,
    bearer,
    ends,
    http,
    live_cluster,
    metric,
    raises_code,
    report,
)

TOKENS = list(range(5_000, 6_000))
LENGTH = len(TOKENS)
"""Three whole pages, and one that is not."""
BYTES = 4711
"""The synthetic bytes of that prompt, in all rooms: its pages are shared."""
OTHERS = [*TOKENS[:600], 7, *TOKENS[601:]]
"""The same but for one token of the third page."""
NODE, TENANT, PLAIN = (f"token-of-the-{who}" for who in ("nodes", "tenant", "others"))


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    """Nodes that say which model they hold. One file of tokens for everybody: bootstrap shows its first line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens"
        file.write_text(f"{NODE} namespaces=*\n{TENANT} namespaces=acme\n{PLAIN}\n")
        node = {
            "http": {"port": 0, "token_file": str(file)},
            "tier": {"enabled": True, "model_name": "tiny", "model_revision": "1"},
        }
        with live_cluster(prefill=node, decode=node, bootstrap={"daemons": {"token_file": str(file)}}) as running:
            running.headers = bearer(NODE)
            assert running.sender
            assert running.reader
            yield running
            running.no_traceback()


def named(keys: Keys, namespace: str = "acme") -> dict[str, Any]:
    return {"page_hashes": base64.b64encode(keys.data).decode(), "namespace": namespace}


def keys_of(engine: Engine, tokens: list[int] = TOKENS) -> Keys:
    return engine.page_keys(tokens, namespace="acme")


def send(live: LiveCluster, room: int) -> None:
    """The prefill engine's part of a good room."""
    tables = live.sender.begin(room, prompt_tokens=LENGTH, page_hashes=keys_of(live.sender)).tables
    for view in live.sender.views.values():
        section = Section(prompt_tokens=LENGTH, start_token=0, stop_token=LENGTH)
        synthetic.fill(view, room=BYTES, tables=tables, section=section)
    live.sender.publish(room, LENGTH)
    live.sender.finish(room)


def admit(daemon: DaemonProcess, token: str, **fields: Any) -> Any:
    return http("POST", daemon, "/v1/requests", json={"prompt_tokens": LENGTH, **fields}, headers=bearer(token))


def over(live: LiveCluster, room: int, state: str, code: str = "") -> list[str]:
    """Both ends of a room that is over, and nothing is left of it."""
    found = [ends(daemon, room, state, code, headers=live.headers) for daemon in (live.prefill, live.decode)]
    for daemon in (live.prefill, live.decode):
        all_free(daemon, live.headers)
    return found


def test_a_room_with_keys_crosses_and_its_reports_do_not_repeat_them(live: LiveCluster) -> None:
    keys = keys_of(live.sender)
    assert keys == keys_of(live.reader)
    room = live.ticket(LENGTH, **named(keys))["room"]
    raises_code("invalid_input", lambda: live.sender.begin(room, prompt_tokens=LENGTH))
    send(live, room)
    claimed = live.reader.wait_claim(room, 20, page_hashes=keys)
    for view in live.reader.views.values():
        assert not synthetic.compare(view, room=BYTES, tables=claimed.tables, tokens=LENGTH).mismatches
    live.reader.release(room, valid_tokens=LENGTH, page_hashes=keys)
    over(live, room, "completed")
    told = report(live.decode, room, live.headers)
    assert (told["namespace"], told["computed_tokens"]) == ("acme", 0)
    assert "page_hashes" not in told


def test_a_prefill_engine_with_other_tokens_ends_both_ends(live: LiveCluster) -> None:
    room = live.ticket(LENGTH, **named(keys_of(live.sender)))["room"]
    other = keys_of(live.sender, OTHERS)
    text = raises_code("key_mismatch", lambda: live.sender.begin(room, prompt_tokens=LENGTH, page_hashes=other))
    assert "page 2 (tokens 512 to 767)" in text
    assert all("page 2" in reason for reason in over(live, room, "failed", "key_mismatch"))


def test_a_decode_engine_with_other_tokens_ends_the_room_and_prefill_is_told(live: LiveCluster) -> None:
    room = live.ticket(LENGTH, **named(keys_of(live.sender)))["room"]
    send(live, room)
    other = keys_of(live.reader, OTHERS)
    raises_code("key_mismatch", lambda: live.reader.wait_claim(room, 20, page_hashes=other))
    ends(live.decode, room, "failed", "key_mismatch", headers=live.headers)
    with pytest.raises(RoomFailedError, match="page 2"):
        live.reader.claim(room, page_hashes=keys_of(live.reader))
    eventually("told", lambda: report(live.prefill, room, live.headers)["reason_code"] == "key_mismatch")
    all_free(live.decode, live.headers)


def test_a_tenant_names_its_own_namespace_only(live: LiveCluster) -> None:
    keys = keys_of(live.sender)
    own = admit(live.prefill, TENANT, **named(keys))
    assert own.status_code == 201, own.text
    for token, fields in ((TENANT, named(keys, "globex")), (TENANT, named(keys, "")), (PLAIN, named(keys))):
        answer = admit(live.prefill, token, **fields)
        assert (answer.status_code, answer.json()["code"]) == (403, "namespace_forbidden"), answer.text
    name = "kvbridge_admissions_refused_total"
    assert metric(live.prefill, name, code="namespace_forbidden", headers=live.headers) == 3
    plain = admit(live.prefill, PLAIN)
    assert plain.status_code == 201
    for answer in (own, plain):
        http("DELETE", live.prefill, f"/v1/requests/{answer.json()['room']}", headers=live.headers)
    all_free(live.prefill, live.headers)


def test_rooms_without_keys_cross_as_before(live: LiveCluster) -> None:
    live.cross(LENGTH)


def test_the_directory_shows_what_is_held(live: LiveCluster) -> None:
    listing = http("GET", live.cluster.bootstrap, "/v1/instances").json()
    assert [one["model_identity"] for one in listing] == [{"name": "tiny", "revision": "1"}] * 2

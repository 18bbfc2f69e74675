"""The directory of a prefill server of SGLang: nodes register from their own host, and decode's readers find all of them."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import ConflictError
from kvbridge.engine.sglang import directory as directory_module
from kvbridge.engine.sglang.directory import (
    PATH,
    Announcement,
    GroupNode,
    NodeDirectory,
    PrefillServer,
    PrefillServers,
    generate,
)
from tests.helpers.cluster import eventually


def node(dp_rank: int, dp_size: int = 2) -> GroupNode:
    address = PeerAddress(endpoint=f"tcp://127.0.0.1:{7000 + dp_rank}")
    return GroupNode(dp_rank=dp_rank, dp_size=dp_size, follows_room=True, address=address, http_port=80)


def iter_nodes() -> Callable[[], GroupNode]:
    """A node that cannot be described at the first look."""
    looks = [ConflictError("its file is being written"), *[None] * 1_000]

    def look() -> GroupNode:
        error = looks.pop(0)
        if error is not None:
            raise error
        return node(0, dp_size=1)

    return look


@pytest.fixture
def directory() -> Iterator[str]:
    made = NodeDirectory("127.0.0.1", 0)
    host, port = made.server_address[:2]
    yield f"{host}:{port}"
    made.shutdown()
    made.server_close()


def ask(
    directory: str, method: str, path: str, body: str, source: str = "127.0.0.1", **headers: str
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(directory, timeout=10, source_address=(source, 0))
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_a_server_is_known_when_all_of_its_groups_have_registered(directory: str) -> None:
    servers = PrefillServers()
    first = Announcement(f"http://{directory}", lambda: node(0))
    try:
        assert not servers.name(directory)
        second = Announcement(f"http://{directory}", lambda: node(1))
        try:
            eventually("both are known", lambda: servers.name(directory))
        finally:
            second.close()
        assert servers[directory].nodes == {rank: node(rank).address for rank in (0, 1)}
    finally:
        first.close()
        servers.close()


def test_decode_asks_which_group_computes_a_room(directory: str) -> None:
    """The question is SGLang's own, and a room is known at once."""
    first, second = (Announcement(f"http://{directory}", lambda rank=rank: node(rank)) for rank in (0, 1))
    room = 2**62 + 5
    try:
        second.computes(room)
        body = json.dumps({"bootstrap_rooms": [room, 7]})
        eventually(
            "the room is known", lambda: ask(directory, "POST", "/query_dp_ranks", body) == (200, {str(room): 1})
        )
    finally:
        first.close()
        second.close()


def test_nobody_registers_a_node_from_another_host(directory: str) -> None:
    """Decode would take the KV cache from whoever did."""
    status, why = ask(directory, "PUT", PATH, node(0).model_dump_json(), source="127.0.0.2")
    assert (status, "its own host" in why["error"]) == (403, True)


def test_no_address_that_a_request_names_keeps_another_server_unknown(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client chooses the address. The thread that asks goes on, and asks a bounded number of servers."""
    monkeypatch.setattr(directory_module, "MOST_NAMED", 4)
    servers = PrefillServers()
    announcement = Announcement(f"http://{directory}", iter_nodes())
    try:
        for address in ("a b:1", "[:1", "\x00:1", *(f"127.0.0.1:{port}" for port in range(1, 9))):
            servers.name(address)
        assert len(servers._named) == 4
        eventually("the server is known", lambda: servers.name(directory))
    finally:
        announcement.close()
        servers.close()


def test_silent_connections_take_a_bounded_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory is in the launcher of a server that people use; a client that is turned away asks again."""
    monkeypatch.setattr(directory_module, "CONNECTIONS", 1)
    monkeypatch.setattr(directory_module._Handler, "timeout", 600.0)  # the silent one stays until it leaves
    made = NodeDirectory("127.0.0.1", 0)
    host, port = made.server_address[:2]
    directory, body = f"{host}:{port}", json.dumps({"bootstrap_rooms": [7]})
    try:
        with socket.create_connection((str(host), port), 10):
            eventually("the next one is closed", lambda: turned_away(directory, body))
        eventually("a place is free", lambda: not turned_away(directory, body))
    finally:
        made.shutdown()
        made.server_close()


def turned_away(directory: str, body: str) -> bool:
    try:
        return ask(directory, "POST", "/query_dp_ranks", body)[0] != 200
    except (OSError, http.client.HTTPException):
        return True


@pytest.mark.parametrize("method", ["PUT", "POST"])
@pytest.mark.parametrize("headers", [{}, {"Content-Length": "many"}, {"Content-Length": "-1"}])
def test_a_body_that_cannot_be_read_is_answered(directory: str, method: str, headers: dict[str, str]) -> None:
    assert ask(directory, method, PATH, "{}", **headers)[0] == 400


@pytest.mark.parametrize(("server", "why"), [(None, "not known any more"), (0, "refused"), (1, "answered")])
def test_a_prompt_that_prefill_does_not_compute_says_why(directory: str, server: int | None, why: str) -> None:
    port = {None: 0, 0: 9, 1: int(directory.rpartition(":")[2])}[server]
    known = None if server is None else PrefillServer(dp_size=1, follow_bootstrap_room=True, nodes={}, http_port=port)
    assert why in generate(directory, known, {"input_ids": [1]}).lower()


@pytest.mark.parametrize(("address", "payload"), [("a b:1", {}), ("127.0.0.1:1", {"text": object()})])
def test_whatever_keeps_prefill_from_being_asked_is_said(address: str, payload: dict[str, object]) -> None:
    """A room of decode waits for the answer."""
    known = PrefillServer(dp_size=1, follow_bootstrap_room=True, nodes={}, http_port=9)
    assert "Error" in generate(address, known, payload) or "InvalidURL" in generate(address, known, payload)

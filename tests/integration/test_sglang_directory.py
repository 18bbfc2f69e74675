"""The directory of a prefill server of SGLang: nodes register from their own host, and decode's readers find all of them."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from kvbridge.core.addresses import PeerAddress
from kvbridge.engine.sglang.directory import PATH, Announcement, GroupNode, NodeDirectory, PrefillServers
from tests.helpers.cluster import eventually


def node(dp_rank: int, dp_size: int = 2) -> GroupNode:
    address = PeerAddress(endpoint=f"tcp://127.0.0.1:{7000 + dp_rank}")
    return GroupNode(dp_rank=dp_rank, dp_size=dp_size, follows_room=True, address=address)


@pytest.fixture
def directory() -> Iterator[str]:
    made = NodeDirectory("127.0.0.1", 0)
    host, port = made._server.server_address[:2]
    yield f"{host}:{port}"
    made._server.shutdown()
    made._server.server_close()


def put(directory: str, body: str, source: str = "127.0.0.1", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(directory, timeout=10, source_address=(source, 0))
    try:
        connection.request("PUT", PATH, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
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


def test_nobody_registers_a_node_from_another_host(directory: str) -> None:
    """Decode would take the KV cache from whoever did."""
    status, why = put(directory, node(0).model_dump_json(), source="127.0.0.2")
    assert (status, "its own host" in why) == (403, True)


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "many"}])
def test_a_body_that_cannot_be_read_is_answered(directory: str, headers: dict[str, str]) -> None:
    assert put(directory, "{}", **headers)[0] == 400

"""Which server is next, and how the servers are."""

import pytest

from kvbridge.config.schema import RouterTimeouts
from kvbridge.core.errors import NotReadyError
from kvbridge.core.ids import Role
from kvbridge.router.servers import LOST_AFTER, OpenAiServers, Server, Servers, ServerWatch


def servers(prefill: int = 2, decode: int = 2) -> Servers:
    made = Servers()
    made.use(Role.PREFILL, [f"http://p{number}" for number in range(prefill)])
    made.use(Role.DECODE, [f"http://d{number}" for number in range(decode)])
    for role in Role:
        for server in made.of(role):
            assert server.is_well()
    return made


def names(pair: tuple[Server | None, Server]) -> tuple[str, str]:
    prefill, decode = pair
    return (prefill.url if prefill else "", decode.url)


def test_equals_take_turns():
    made = servers(prefill=3)
    assert [names(made.choose_pair()) for _ in range(4)] == [
        ("http://p0", "http://d0"),
        ("http://p1", "http://d1"),
        ("http://p2", "http://d0"),
        ("http://p0", "http://d1"),
    ]


def test_only_those_that_are_well_and_have_not_failed_the_request():
    made = servers()
    first, second = made.of(Role.PREFILL)
    assert first.is_ill("/health answered 503")
    assert not first.is_ill("/health answered 503")  # no news
    assert made.choose_pair()[0] is second
    with pytest.raises(NotReadyError, match="http://p0: /health answered 503"):
        made.choose_pair({second})
    assert made.obstacles() == ()
    second.is_gone("nobody listens there")
    (obstacle,) = made.obstacles()
    assert "no prefill server is well" in obstacle
    assert made.choose_pair(alone=True)[0] is None


def test_a_server_is_lost_after_some_bad_checks_in_a_row():
    server = Server(Role.DECODE, "http://d")
    for _ in range(LOST_AFTER - 1):
        server.is_ill("slow")
    server.is_well()
    for _ in range(LOST_AFTER - 1):
        server.is_ill("slow")
    lost = server.lost
    assert not lost.is_set()
    server.is_ill("slow")
    assert lost.is_set()
    server.is_well()
    assert not server.lost.is_set()
    assert lost.is_set()  # whoever waits for the former one is told all the same


def test_an_empty_list_is_an_obstacle():
    made = Servers()
    assert [("prefill" in one, "engine_url" in one) for one in made.obstacles()] == [(True, True), (False, True)]


def test_a_process_of_both_roles_does_not_send_to_itself():
    made = Servers()
    for role in Role:
        made.use(role, ["http://a", "http://b"])
        for server in made.of(role):
            server.is_well()
    for _ in range(6):
        prefill, decode = names(made.choose_pair())
        assert {prefill, decode} == {"http://a", "http://b"}
    (_, other) = made.of(Role.DECODE)
    other.is_ill("out")
    made.of(Role.PREFILL)[1].is_ill("out")
    assert names(made.choose_pair()) == ("", "http://a")


@pytest.mark.asyncio
async def test_an_address_that_nobody_can_ask_is_a_server_that_is_not_well():
    """A node tells its engine's address. A wrong one must not end what looks after the server, unseen."""
    made, timeouts = Servers(), RouterTimeouts()
    made.use(Role.PREFILL, ["http://prefill:port"])
    (server,) = made.of(Role.PREFILL)
    upstream = OpenAiServers(timeouts)
    try:
        await ServerWatch(made, upstream, timeouts).look(server)
    finally:
        await upstream.close()
    assert "InvalidURL" in server.problem

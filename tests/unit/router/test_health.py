"""What is asked of servers goes on, whatever one of them or its address is."""

from __future__ import annotations

import pytest

from kvbridge.config.services import RouterTimeouts
from kvbridge.core.ids import Role
from kvbridge.router.servers import Servers, ServerWatch
from kvbridge.router.upstream import OpenAiServers

pytestmark = pytest.mark.asyncio


async def test_an_address_that_nobody_can_ask_is_a_server_that_is_not_well() -> None:
    """A node tells its engine's address. A wrong one must not end what looks after the server, unseen."""
    servers, timeouts = Servers(), RouterTimeouts()
    servers.use(Role.PREFILL, ["http://prefill:port"])
    (server,) = servers.of(Role.PREFILL)
    upstream = OpenAiServers(timeouts)
    try:
        await ServerWatch(servers, upstream.health, timeouts).look(server)
    finally:
        await upstream.close()
    assert "InvalidURL" in server.problem

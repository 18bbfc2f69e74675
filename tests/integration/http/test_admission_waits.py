"""Admission that waits, over a real socket: its answer, and a caller that does not wait for it."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.config.endpoints import HttpConfig
from kvbridge.core.prefixes import ANY_NAMESPACE, Namespaces
from kvbridge.http.server import HttpServer
from tests.helpers.openai_servers import few_lines
from tests.unit.http.services import FakeRooms, daemon_app

WAIT_S = 20.0


class SlowRooms(FakeRooms):
    """Admits when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.ended = asyncio.Event()
        self.given_back = asyncio.Event()
        self.cancelled = False
        self.stubborn = False
        """Admits all the same when it is cancelled, as it does when both happen at once."""

    async def admit(self, request: AdmissionRequest, may_name: Namespaces = ANY_NAMESPACE) -> RoomReport:
        self.asked.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            if not self.stubborn:
                raise
        finally:
            self.ended.set()
        return await super().admit(request, may_name)

    async def cancel(self, room: int, reason: str) -> RoomReport:
        report = await super().cancel(room, reason)
        self.given_back.set()
        return report


@pytest.fixture
def rooms() -> SlowRooms:
    return SlowRooms()


@pytest.fixture
async def server(rooms: SlowRooms) -> AsyncIterator[HttpServer]:
    started = HttpServer(daemon_app(rooms), HttpConfig(port=0), few_lines(), shutdown_s=5.0)
    yield started
    await started.stop()


def post(body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST /v1/requests HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def hang_up(server: HttpServer, rooms: SlowRooms) -> None:
    """Ask for a room with a wait, and close the connection while it waits."""
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(post({"room": 7, "prompt_tokens": 5, "wait_s": 60}))
    await asyncio.wait_for(rooms.asked.wait(), WAIT_S)
    writer.close()
    await asyncio.wait_for(rooms.ended.wait(), WAIT_S)


async def test_a_caller_that_hangs_up_ends_its_wait(server, rooms):
    await hang_up(server, rooms)
    assert rooms.cancelled
    assert rooms.rooms == {}


async def test_a_room_admitted_for_a_caller_that_hung_up_is_given_back(server, rooms):
    rooms.stubborn = True
    await hang_up(server, rooms)
    await asyncio.wait_for(rooms.given_back.wait(), WAIT_S)
    assert "left before it was told" in rooms.rooms[7].reason


async def test_nobody_waits_for_a_room_on_behalf_of_a_caller_that_hung_up(server, rooms):
    rooms.hold = asyncio.Event()
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /v1/requests/7?wait=5 HTTP/1.1\r\nHost: d\r\n\r\n")
    await asyncio.wait_for(rooms.waiting.wait(), WAIT_S)
    writer.close()
    await writer.wait_closed()
    await asyncio.wait_for(rooms.waited.wait(), WAIT_S)

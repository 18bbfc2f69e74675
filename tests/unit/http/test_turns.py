"""Requests take turns with the rest of the loop, and of a caller that has hung up meanwhile nothing is begun."""

import asyncio
import json
from collections.abc import Callable
from functools import partial

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import RequestResponseCycle
from uvicorn.server import ServerState

from kvbridge.http.connections import LONGEST_WAIT_S, MOST_WAITING, BoundedProtocol, Line, Turns
from tests.helpers.manual_clock import ManualClock
from tests.helpers.openai_servers import few_lines

POST = b"POST /v1/requests HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Loop:
    """Calls what is to be called soon when it is told to."""

    def __init__(self) -> None:
        self.soon: list[Callable[[], None]] = []

    def call_soon(self, do: Callable[[], None]) -> None:
        self.soon.append(do)

    def run_once(self) -> None:
        ready, self.soon = self.soon, []
        for do in ready:
            do()


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_who_asks_for_nothing_new_does_not_wait_behind_those_who_do(loop):
    turns, read = Turns(loop.call_soon), []
    for number in range(100):
        turns.wait(partial(read.append, f"room {number}"), Line.CREATES)
    turns.wait(partial(read.append, "health"), Line.OTHER)
    turns.wait(partial(read.append, "cancel"), Line.OTHER)
    loop.run_once()
    assert sorted(read) == ["health", "room 0", "room 1"]
    loop.run_once()
    assert read[3:] == ["cancel", "room 2"]


@pytest.mark.parametrize("line", [Line.CREATES, Line.OTHER])
def test_a_line_that_stands_takes_nobody_more(loop, line):
    clock, read = ManualClock(), []
    turns = Turns(loop.call_soon, clock)
    anybody = partial(read.append, "")
    burst = 3 * MOST_WAITING
    assert all(turns.wait(anybody, line) for _ in range(burst)), "however many come at once"
    clock.advance(LONGEST_WAIT_S[line])
    assert not turns.wait(anybody, line)
    for other in set(Line) - {line}:
        assert turns.wait(anybody, other)
    while len(read) <= burst - MOST_WAITING + 2:
        assert not turns.wait(anybody, line)
        loop.run_once()
    assert turns.wait(anybody, line), "fewer wait"
    while loop.soon:
        loop.run_once()
    assert len(read) == burst + 3


class Connection(asyncio.Transport):
    """The parts of a connection that a protocol uses."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.aborted, self.written = True, False, b""

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        self.aborted = True

    def write(self, data: bytes) -> None:
        self.written += data


async def never_answers(scope: Scope, receive: Receive, send: Send) -> None:
    await asyncio.Event().wait()


async def connection(loop: Loop, *, request_s: float = 3600.0) -> tuple[BoundedProtocol, Connection]:
    """One whose server has just read another request."""
    config = uvicorn.Config(never_answers, log_config=None)
    turns = Turns(loop.call_soon)
    turns.wait(bool, Line.CREATES)
    protocol = BoundedProtocol(config, ServerState(), turns, bool, request_s=request_s, seldom=few_lines())
    transport = Connection()
    protocol.connection_made(transport)
    return protocol, transport


async def answer(cycle: RequestResponseCycle) -> None:
    await cycle.send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await cycle.send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("first", [1, 5, 30, len(POST) - 2], ids=["a byte", "the method", "half a head", "the head"])
async def test_a_request_waits_among_its_kind_in_however_many_pieces_it_comes(loop, first):
    """A caller that sends the first byte of a POST apart does not wait where health checks do, nor does its body."""
    protocol, _ = await connection(loop)
    turns, asked = protocol._turns, []
    turns.wait = lambda _, line: not asked.append(line)
    protocol.data_received(POST[:first])
    whole_head = b"\r\n\r\n" in POST[:first]
    assert asked == ([Line.CREATES] if whole_head else [])
    if whole_head:
        protocol.take_turn()
    protocol.data_received(POST[first:])
    assert asked == ([Line.CREATES, Line.GOES_ON] if whole_head else [Line.CREATES])
    protocol.take_turn()
    assert protocol.cycle.body == b"{}"
    protocol.connection_lost(None)


@pytest.mark.parametrize("begun", [b"\x16\x03\x01\x02", b"\r\n", b"x" * 70_000], ids=["TLS", "a blank line", "no end"])
async def test_what_is_no_request_is_refused_though_its_head_does_not_end(loop, begun):
    protocol, transport = await connection(loop)
    protocol.data_received(begun)
    loop.run_once()
    assert transport.written.startswith(b"HTTP/1.1 400 ")
    assert transport.aborted


async def test_a_request_behind_another_waits_for_a_turn_of_its_own(loop):
    """Requests that come in one segment take no more of the loop than those that come one by one."""
    protocol, transport = await connection(loop)
    protocol.data_received(GET + POST)
    loop.run_once()
    first = protocol.cycle
    protocol._turns.wait(bool, Line.CREATES)
    await answer(first)
    assert protocol.cycle is first
    assert transport.written.startswith(b"HTTP/1.1 200 OK")
    loop.run_once()
    loop.run_once()
    assert protocol.cycle.scope["method"] == "POST"
    protocol.connection_lost(None)


async def test_what_comes_during_an_answer_waits_for_its_end(loop):
    protocol, transport = await connection(loop)
    protocol.data_received(GET)
    loop.run_once()
    first = protocol.cycle
    protocol.data_received(POST)
    protocol.data_received(b"x" * 70_000)
    assert not transport.reads, "no more is taken than that"
    while loop.soon:
        loop.run_once()
    assert protocol.cycle is first
    await answer(first)
    loop.run_once()
    assert protocol.cycle.scope["method"] == "POST"
    protocol.connection_lost(None)


async def test_nothing_is_begun_for_a_caller_that_has_hung_up(loop):
    protocol, _ = await connection(loop)
    protocol.data_received(POST)
    protocol.connection_lost(None)
    loop.run_once()
    assert protocol.cycle is None


async def test_a_request_for_which_too_many_wait_is_refused_unread(loop):
    protocol, transport = await connection(loop)
    turns = protocol._turns = Turns(loop.call_soon, clock := ManualClock())
    while turns.wait(bool, Line.CREATES):
        clock.advance(LONGEST_WAIT_S[Line.CREATES] / MOST_WAITING)
    protocol.data_received(POST)
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"\r\nRetry-After: 1\r\nConnection: close" in head
    assert json.loads(body)["code"] == "capacity"
    assert transport.aborted
    protocol.connection_lost(None)
    while loop.soon:
        loop.run_once()
    assert protocol.cycle is None


@pytest.mark.parametrize("arrived", [POST, POST[:-1]], ids=["whole", "not whole"])
async def test_the_wait_for_a_turn_is_not_the_callers(loop, arrived):
    """Its time for the request runs out while the request waits: whether it was all there is seen when it is read."""
    protocol, transport = await connection(loop)
    protocol.data_received(arrived)
    protocol._too_slow()
    assert not transport.aborted
    loop.run_once()
    assert transport.aborted == (arrived is not POST)
    protocol.connection_lost(None)

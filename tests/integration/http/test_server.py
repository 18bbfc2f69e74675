"""A real server on a real socket: its start, its address, its bounded end."""

import asyncio
import contextlib
import gc
import json
import resource
import socket
import ssl
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from kvbridge.api.client import DaemonClient
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.config.endpoints import HttpConfig
from kvbridge.core.errors import PeerError
from kvbridge.http import server as http_server
from kvbridge.http.server import HttpServer
from tests.helpers.openai_servers import few_lines
from tests.unit.http.services import FakeRooms, daemon_app

DATA = Path(__file__).parents[2] / "data"
TLS = {"tls_certificate_file": DATA / "tls-certificate.pem", "tls_key_file": DATA / "tls-key.pem"}


@asynccontextmanager
async def serving(rooms=None, *, shutdown_s=5.0, app=None, **more):
    """A server on a free port, stopped in the end."""
    app = app or daemon_app(rooms or FakeRooms(), tokens=("t",))
    server = HttpServer(app, HttpConfig(port=0, **more), few_lines(), shutdown_s=shutdown_s)
    yield server
    await server.stop()


def port_of(server: HttpServer) -> int:
    return int(server.url.rpartition(":")[2])


async def test_it_serves_on_a_free_port_and_ends():
    async with serving() as server, DaemonClient(token="t", timeout_s=20.0) as client:
        assert server.url.startswith("http://127.0.0.1:")
        assert (await client.admit(server.url, AdmissionRequest(room=5, prompt_tokens=2))).room == 5
        await server.stop()
        with pytest.raises(PeerError):
            await client.report(server.url, 5)
        await server.wait_ended()


@pytest.mark.parametrize("ends", [True, False])
async def test_a_request_in_progress_ends_before_the_server_does_or_is_cut_off(ends: bool):
    rooms = FakeRooms()
    rooms.hold = asyncio.Event()
    async with (
        serving(rooms, shutdown_s=5.0 if ends else 0.5) as server,
        DaemonClient(token="t", timeout_s=20.0) as client,
    ):
        await client.admit(server.url, AdmissionRequest(room=5, prompt_tokens=2))
        call = client.ask(RoomReport, "GET", f"{server.url}/v1/requests/5", params={"wait": 5.0})
        waiting = asyncio.create_task(call)
        await asyncio.wait_for(rooms.waiting.wait(), 20)
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0)
        if ends:
            rooms.hold.set()
            assert (await asyncio.wait_for(waiting, 20)).room == 5
        else:
            with pytest.raises(PeerError):  # and no answer, which it would have after its wait
                await asyncio.wait_for(waiting, 20)
        await asyncio.wait_for(stopping, 20)


async def test_a_proxy_from_the_environment_is_not_used(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://192.0.2.1:9")
    async with serving() as server, DaemonClient(token="t", timeout_s=20.0) as client:
        assert await client.incarnation(server.url)


SHORT = {"max_request_s": 0.5, "max_connections": 3}
HEAD = b"POST /v1/requests HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nContent-Type: application/json\r\n"


async def connected(server, trusted=None):
    return await asyncio.open_connection("127.0.0.1", port_of(server), ssl=trusted)


async def healthy_over_tls(server: HttpServer) -> bool:
    reader, writer = await connected(server, ssl.create_default_context(cafile=TLS["tls_certificate_file"]))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return b"200 OK" in answer


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """Return what came before the end of the connection."""
    with contextlib.suppress(ConnectionResetError):
        return await reader.read()
    return b""


HALF_A_BODY = HEAD + b'Content-Length: 21\r\n\r\n{"prompt'


WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("before", "begun"), [(b"", b""), (b"", HEAD), (b"", HALF_A_BODY), (WHOLE, HEAD), (WHOLE, HALF_A_BODY)]
)
async def test_a_caller_that_does_not_finish_its_request_is_cut_off(before: bytes, begun: bytes):
    """Half a request behind a whole one in one segment holds its connection no longer than half a request alone."""
    async with serving(**SHORT) as server:
        reader, writer = await connected(server)
        writer.write(before + begun)
        async with asyncio.timeout(20):
            if before:
                assert b"true" in await reader.readuntil(b"}")
            assert b"true" not in await ended(reader)
        writer.close()
        assert not server.state.connections


@pytest.mark.parametrize(("size_bytes", "keeps"), [(64 << 20, True), (0, False)], ids=["much", "little, then closed"])
async def test_a_caller_that_takes_nothing_of_its_answer_is_cut_off(size_bytes: int, keeps: bool):
    """An end of the connection waits for what was written to be sent, which would be for ever."""
    filled = asyncio.Event()

    async def long_answers(_scope: Scope, _receive: Receive, send: Send) -> None:
        headers = [] if keeps else [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        transport = protocol().transport
        while transport.get_write_buffer_size() == 0:  # until the system takes no more
            await send({"type": "http.response.body", "body": bytes(60_000), "more_body": True})
        await send({"type": "http.response.body", "body": bytes(size_bytes), "more_body": True})
        filled.set()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def protocol() -> Any:
        return next(iter(server.state.connections))

    async with serving(app=long_answers, **SHORT) as server:
        with socket.create_connection(("127.0.0.1", port_of(server))) as caller:
            caller.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(filled.wait(), 20)
            async with asyncio.timeout(20):
                while server.state.connections:  # noqa: ASYNC110 - uvicorn's own
                    await asyncio.sleep(0.01)


async def test_a_caller_that_drips_is_cut_off_too():
    async with serving(**SHORT) as server:
        reader, writer = await connected(server)
        ended = asyncio.create_task(reader.read())
        async with asyncio.timeout(20):
            for byte in HEAD * 10:
                if ended.done():
                    break
                writer.write(bytes([byte]))
                await asyncio.wait({ended}, timeout=0.02)
        assert ended.done()
        ended.exception()
        writer.close()


async def test_too_many_callers_are_turned_away_and_the_others_served():
    async with serving(max_request_s=30.0, max_connections=2) as server:
        held = [await connected(server) for _ in range(2)]
        async with asyncio.timeout(20):
            reader, writer = await connected(server)
            answer = await reader.read()
        writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 503 Service Unavailable"
        assert {b"Retry-After: 1", b"Connection: close", b"Content-Length: %d" % len(body)} < set(lines)
        problem = json.loads(body)
        assert (problem["code"], problem["status"], problem["retry_after_s"]) == ("capacity", 503, 1.0)
        assert "2 connections stand here, as many as may (http.max_connections)" in problem["detail"]
        held[0][1].write(WHOLE)
        async with asyncio.timeout(20):
            assert b"200 OK" in await held[0][0].readline()
        for _, each in held:
            each.close()


@pytest.mark.parametrize("encrypted", [True, False], ids=["https", "http"])
async def test_silent_callers_take_no_more_descriptors_than_the_limit(encrypted: bool):
    """They are counted when they are accepted: one that never begins its TLS handshake is a connection all the same."""
    async with serving(max_request_s=30.0, max_connections=10, **(TLS if encrypted else {})) as server:
        gc.collect()  # what earlier tests have left is not closed meanwhile
        before = open_descriptors()
        callers = [await connected(server) for _ in range(300)]
        ends = {asyncio.create_task(ended(reader)) for reader, _ in callers}
        async with asyncio.timeout(20):
            while sum(end.done() for end in ends) < 290:
                await asyncio.wait({end for end in ends if not end.done()}, return_when=asyncio.FIRST_COMPLETED)
            answers = {end.result()[:12] for end in ends if end.done()}
            assert answers == ({b""} if encrypted else {b"HTTP/1.1 503"})
            while open_descriptors() - before - len(callers) != 10:  # noqa: ASYNC110 - both ends are in this process
                await asyncio.sleep(0.01)
        for end in ends:
            end.cancel()
        for _, writer in callers:
            writer.close()


async def test_a_tls_handshake_has_a_deadline_and_its_connection_is_free_again():
    async with serving(max_request_s=2.0, max_connections=1, **TLS) as server:
        reader, writer = await connected(server)
        writer.write(b"\x16\x03\x01")  # the first bytes of a handshake that does not go on
        async with asyncio.timeout(20):
            assert await ended(reader) == b""
            writer.close()
            assert await healthy_over_tls(server)


async def test_a_process_out_of_descriptors_answers_again_when_it_has_some(monkeypatch: pytest.MonkeyPatch):
    """`accept` fails then, and the waiting connection stays where it is: looking at once again would only burn time."""
    monkeypatch.setattr(http_server, "ACCEPT_PAUSE_S", 0.05)
    async with serving() as server:
        loop, limit = asyncio.get_running_loop(), resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as caller:
            caller.setblocking(False)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
            try:
                await loop.sock_connect(caller, ("127.0.0.1", port_of(server)))
                await loop.sock_sendall(caller, WHOLE)
                answer = asyncio.create_task(loop.sock_recv(caller, 100))
                await asyncio.wait({answer}, timeout=0.2)
                assert not answer.done()
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limit)
            async with asyncio.timeout(20):
                assert b"200 OK" in await answer

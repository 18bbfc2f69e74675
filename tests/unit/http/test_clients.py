"""The way back: from an answer to the error that caused it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from kvbridge.api.client import BlockingClient, DaemonClient, DirectoryClient
from kvbridge.api.problems import error_of, problem_of
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.api.status import Readiness
from kvbridge.core import errors
from kvbridge.core.ids import Role
from kvbridge.core.session.tables import RoomState
from tests.helpers.later_release import later
from tests.unit.http.services import FakeRooms, FakeStatus, daemon_app


def answering(handler) -> DaemonClient:
    return DaemonClient(timeout_s=5.0, transport=httpx.MockTransport(handler))


def daemon(rooms: FakeRooms, status: FakeStatus | None = None, *, token: str = "t") -> DaemonClient:
    transport = httpx.ASGITransport(daemon_app(rooms, status, tokens=("t",)))
    return DaemonClient(token=token, timeout_s=5.0, transport=transport)


async def test_errors_survive_the_journey_and_those_of_another_process_become_a_peers():
    rooms = FakeRooms()
    async with daemon(rooms) as client:
        for code, kind in errors.errors_by_code().items():
            rooms.error = kind("what happened")
            with pytest.raises(errors.BridgeError) as back:
                await client.admit("http://d", AdmissionRequest(prompt_tokens=9))
            foreign = kind.http_status == 500 or code in {errors.UnauthorizedError.code, errors.NamespaceError.code}
            assert back.type is (errors.PeerError if foreign else kind), code
            assert code == errors.UnauthorizedError.code or "what happened" in str(back.value)
            if isinstance(rooms.error, errors.CapacityError):
                assert back.value.retry_after_s == rooms.error.retry_after_s


async def test_members_and_codes_of_later_releases_are_understood():
    problem = {"type": "t", "title": "t", "status": 418, "detail": "d", "code": "tea", "instance": "/", "pot": 1}
    assert type(error_of(418, httpx.Response(418, json=problem).content, source="d")) is errors.PeerError
    problem["code"] = "conflict"
    assert error_of(409, httpx.Response(409, json=problem).content, source="d").code == "conflict"


async def test_the_calls_of_a_daemon_and_that_it_is_not_ready_is_an_answer():
    status = FakeStatus()
    status.ready = Readiness(ready=False, reasons=("starting",))
    async with daemon(FakeRooms(), status) as client:
        assert (await client.admit("http://d/", AdmissionRequest(room=4, prompt_tokens=9))).room == 4
        assert (await client.report("http://d", 4)).state is RoomState.ADMITTED
        assert (await client.cancel("http://d", 4, "a & b", generation=1)).reason == "a & b"
        assert await client.incarnation("http://d/") == "incarnation-1"
        assert (await client.ask(Readiness, "GET", "http://d/ready")).reasons == ("starting",)


@pytest.mark.parametrize(
    ("token", "namespace", "cure"),
    [
        ("wrong", "", r"daemons\.token_file"),
        ("t", "acme", r"'acme'.*the daemons' http\.token_file needs namespaces=\*"),
    ],
)
async def test_a_daemon_that_refuses_our_token_is_not_the_callers_fault(token: str, namespace: str, cure: str):
    """Bootstrap has checked itself which namespaces its caller may name."""
    async with daemon(FakeRooms(), token=token) as client:
        with pytest.raises(errors.PeerError, match=cure):
            await client.admit("http://d", AdmissionRequest(prompt_tokens=9, namespace=namespace))
        if token == "wrong":
            with pytest.raises(errors.UnauthorizedError):
                await client.incarnation("http://d")


async def test_no_answer_is_a_deadline_with_a_name():
    def slow(request):
        raise httpx.ReadTimeout("slow", request=request)

    async with answering(slow) as client:
        with pytest.raises(errors.DeadlineError, match=r"within 5 s \(timeouts\.reserve_s\)"):
            await client.report("http://d", 1)
    async with DirectoryClient("http://b", timeout_s=3.0, transport=httpx.MockTransport(slow)) as directory:
        with pytest.raises(errors.DeadlineError, match=r"within 3 s"):
            await directory.instances()


@asynccontextmanager
async def listening(on_connection) -> AsyncIterator[str]:
    """A server that is no daemon; yields its URL."""
    handled: list[asyncio.Task[None]] = []
    server = await asyncio.start_server(
        lambda reader, writer: handled.append(asyncio.create_task(on_connection(reader, writer))), "127.0.0.1", 0
    )
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*handled)


async def slam(reader, writer):
    writer.close()
    await writer.wait_closed()


async def refuse(reader, writer):
    problem = problem_of(errors.CapacityError("full", retry_after_s=7.0), "/x").model_dump_json(exclude_none=True)
    await reader.readuntil(b"\r\n\r\n")
    writer.write(f"HTTP/1.1 503 no\r\nContent-Length: {len(problem)}\r\nConnection: close\r\n\r\n{problem}".encode())
    await writer.drain()
    await slam(reader, writer)


async def greet(reader, writer):
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = (await reader.readexactly(int(head.split("content-length: ")[1].split("\r\n")[0]))).decode()
    answer = json.dumps({"authorization": "authorization: bearer t" in head, "asked": json.loads(body), "later": 1})
    writer.write(f"HTTP/1.1 201 yes\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n{answer}".encode())
    await writer.drain()
    await slam(reader, writer)


async def silent(reader, writer):
    await reader.read()
    await slam(reader, writer)


async def blocking(on_connection, *, kind=dict, timeout_s=5.0):
    """Ask for a room from another thread, where nothing but the answer is waited for."""

    def ask(url):
        client = BlockingClient(token="t", timeout_s=timeout_s, timeout_key="this limit")
        return client.ask(kind, "POST", url, body=AdmissionRequest(prompt_tokens=9))

    async with listening(on_connection) as url:
        return await asyncio.to_thread(ask, url)


@pytest.mark.outside
async def test_a_blocking_call_says_and_understands_what_others_do():
    answer = await blocking(greet)
    assert answer == {"authorization": True, "asked": {"prompt_tokens": 9}, "later": 1}
    with pytest.raises(errors.ProtocolError, match="RoomReport"):
        await blocking(greet, kind=RoomReport)
    with pytest.raises(errors.CapacityError, match="full") as caught:
        await blocking(refuse)
    assert caught.value.retry_after_s == 7.0


@pytest.mark.outside
async def test_a_blocking_call_tells_silence_from_a_connection_closed_in_our_face():
    with pytest.raises(errors.DeadlineError, match=r"within 0\.1 s \(this limit\)"):
        await blocking(silent, timeout_s=0.1)
    with pytest.raises(errors.PeerError, match="failed"):
        await blocking(slam)


@pytest.mark.outside
async def test_over_real_sockets_only_a_refused_connection_proves_that_nobody_is_there():
    async with DaemonClient(timeout_s=5.0) as client:
        async with listening(slam) as url:
            with pytest.raises(errors.PeerError, match="failed"):
                await client.incarnation(url)
        assert await client.incarnation(url) == ""


async def test_what_a_later_release_adds_to_an_answer_is_ignored():
    report = RoomReport(room=4, generation=1, role=Role.PREFILL, state=RoomState.ADMITTED, prompt_tokens=9)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, json=later(report)))
    async with DaemonClient(timeout_s=5.0, transport=transport) as client:
        assert await client.report("http://d", 4) == report

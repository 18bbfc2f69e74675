"""A plain request for a room is answered without the framework, and every caller gets what the framework would have said."""

from __future__ import annotations

import json

import httpx
import pytest

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import errors_by_code
from kvbridge.core.prefixes import ANY_NAMESPACE
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.direct import Direct, DirectRoute
from tests.unit.http.services import FakeRooms, FakeStatus, settings

pytestmark = pytest.mark.asyncio

PLAIN = {"content-type": "application/json"}
BY_THE_FRAMEWORK = {"content-type": "application/json; charset=utf-8"}
"""Of the same meaning, and not what `Direct` looks for."""
BODY = {"room": 7, "prompt_tokens": 5, "client": "ü", "prefill": [{"endpoint": "tcp://10.0.0.7:7911"}]}


async def post(rooms: FakeRooms, content: bytes, headers: dict[str, str], status: FakeStatus | None = None):
    app = create_daemon_app(
        admission=rooms, requests=rooms, rooms=rooms, status=status or FakeStatus(), settings=settings()
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://daemon") as http:
        return await http.post("/v1/requests", content=content, headers={**headers, "x-request-id": "r"})


async def both(content: bytes, error: Exception | None = None):
    """Return both ways' answers, and what the service was asked either way."""
    found = []
    for headers in (PLAIN, BY_THE_FRAMEWORK):
        rooms, status = FakeRooms(), FakeStatus()
        rooms.error = error
        answer = await post(rooms, content, headers, status)
        found.append((answer.status_code, dict(answer.headers), answer.content, rooms.requests, status.answers))
    return found


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        {"prompt_tokens": 4096},
        {"prompt_tokens": 5.0},  # an integer, to JSON Schema
        {"prompt_tokens": 5, "page_hashes": "AAECAwQFBgcICQoLDA0ODw==", "retention": {"priority": 2, "for_s": 600}},
        {"prompt_tokens": 5, "wait_s": 1},
        {"prompt_tokens": "5"},
        {"prompt_tokens": 5, "prefix_tokens": 1},
        {"prompt_tokens": 0},
        {},
        [],
        None,
    ],
    ids=str,
)
async def test_both_ways_say_the_same(body):
    direct, framework = await both(json.dumps(body).encode())
    assert direct == framework


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b'\xef\xbb\xbf{"prompt_tokens": 5}',
        b'{"prompt_tokens": 5, "client": "\\ud800"}',
        b"NaN",
        b'{"prompt_tokens": 1, "prompt_tokens": 5}',
        b'{"prompt_tokens": 5, "wait_s": Infinity}',
        b"[" * 500,
    ],
    ids=lambda content: content[:24].decode("latin-1"),
)
async def test_both_ways_say_the_same_of_what_is_hardly_json(content):
    direct, framework = await both(content)
    assert direct == framework


@pytest.mark.parametrize("code", sorted(errors_by_code()))
async def test_both_ways_tell_errors_alike(code):
    direct, framework = await both(json.dumps(BODY).encode(), errors_by_code()[code]("no"))
    assert direct == framework
    assert direct[0] == errors_by_code()[code].http_status


class Framework:
    """Notes what reaches it, and gives no answer."""

    def __init__(self) -> None:
        self.messages: list[dict] = []

    async def __call__(self, _scope, receive, _send) -> None:
        while not self.messages or self.messages[-1].get("more_body"):
            self.messages.append(await receive())


async def call(framework: Framework, messages: list[dict], **changes) -> list[dict]:
    """Send a request in pieces; returns what was answered."""
    rooms, sent, left = FakeRooms(), [], list(messages)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"20")]
    scope = {"type": "http", "method": "POST", "path": "/v1/requests", "query_string": b"", "headers": headers}
    scope |= {"state": {"namespaces": ANY_NAMESPACE}, **changes}

    async def receive() -> dict:
        return left.pop(0)

    async def send(message: dict) -> None:
        sent.append(message)

    route = DirectRoute("/v1/requests", AdmissionRequest, rooms.admit)
    await Direct(framework, route=route)(scope, receive, send)
    return sent


WHOLE = {"type": "http.request", "body": b'{"prompt_tokens": 5}', "more_body": False}


async def test_a_plain_request_does_not_reach_the_framework():
    framework = Framework()
    sent = await call(framework, [WHOLE])
    assert sent[0]["status"] == 201
    assert not framework.messages


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "GET"},
        {"path": "/v1/requests/"},
        {"query_string": b"a=1"},
        {"headers": [(b"content-length", b"20")]},
        {"headers": [(b"content-type", b"application/json")]},
        {"headers": [(b"content-type", b"text/plain"), (b"content-length", b"20")]},
    ],
    ids=str,
)
async def test_what_is_not_plain_reaches_the_framework_untouched(changes):
    framework = Framework()
    assert not await call(framework, [WHOLE], **changes)
    assert framework.messages == [WHOLE]


async def test_a_body_in_pieces_reaches_the_framework_whole():
    pieces = [
        {"type": "http.request", "body": b'{"prompt_', "more_body": True},
        {"type": "http.request", "body": b'tokens": 5}', "more_body": False},
    ]
    framework = Framework()
    assert not await call(framework, pieces)
    assert framework.messages == pieces


async def test_a_caller_that_has_left_is_the_frameworks_to_notice():
    framework = Framework()
    assert not await call(framework, [{"type": "http.disconnect"}])
    assert framework.messages == [{"type": "http.disconnect"}]

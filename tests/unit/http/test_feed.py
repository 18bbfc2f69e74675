"""The stream of what changes: patches, bounded queues, listeners that do not keep up, and its end; over a real socket, too."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbridge.core.errors import CapacityError, NotReadyError
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.feed import Feed, difference
from kvbridge.http.live import events_router
from kvbridge.http.server import HttpServer
from tests.helpers.connection_limits import limits
from tests.unit.http.services import FakeRooms, FakeStatus, settings

INTERVAL_S = 0.01

values = st.recursive(
    st.integers() | st.text(max_size=3), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
)
documents = st.dictionaries(st.sampled_from("abcd"), values, max_size=4)


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396, section 2, as written there."""
    if not isinstance(patch, dict):
        return patch
    target = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        else:
            target[key] = merged(target.get(key), value)
    return target


@given(documents, documents)
def test_a_patch_makes_the_later_document_of_the_earlier_one(before: dict[str, Any], now: dict[str, Any]):
    assert merged(before, difference(before, now)) == now


def test_what_stays_is_not_told_again():
    assert difference({"a": {"b": 1, "c": [1]}, "d": 2}, {"a": {"b": 1, "c": [1, 2]}}) == {
        "a": {"c": [1, 2]},
        "d": None,
    }
    assert difference({"a": None}, {"a": None}) == {}


class Source:
    """A document that changes with each look; raises `error` once it is set."""

    def __init__(self) -> None:
        self.looks = 0
        self.error: Exception | None = None

    def __call__(self) -> dict[str, Any]:
        if self.error:
            raise self.error
        self.looks += 1
        return {"looks": self.looks, "same": "x" * 100}


def parse(message: bytes | None) -> tuple[str, dict[str, Any]]:
    assert message is not None
    event, data = message.decode().removesuffix("\n\n").split("\n")
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@pytest.mark.asyncio
async def test_a_listener_gets_a_snapshot_and_then_changes():
    feed = Feed(Source(), interval_s=INTERVAL_S)
    listener = feed.join()
    assert parse(await listener.next()) == ("snapshot", {"looks": 1, "same": "x" * 100})
    assert parse(await listener.next()) == ("change", {"looks": 2})
    later = feed.join()
    event, document = parse(await later.next())
    assert (event, document["same"]) == ("snapshot", "x" * 100)
    assert parse(await later.next()) == ("change", {"looks": document["looks"] + 1})
    feed.close()


@pytest.mark.asyncio
async def test_nobody_looks_while_nobody_listens():
    source = Source()
    feed = Feed(source, interval_s=INTERVAL_S)
    assert source.looks == 0
    feed.leave(feed.join())
    assert feed._task is not None
    await asyncio.wait_for(feed._task, 20)
    looks = source.looks
    assert looks <= 2
    feed.join()
    assert source.looks == looks + 1
    feed.close()


@pytest.mark.asyncio
async def test_a_listener_that_does_not_keep_up_is_cut_and_the_others_are_not():
    feed = Feed(Source(), interval_s=INTERVAL_S)
    slow, quick = feed.join(), feed.join()
    while len(feed) == 2:
        assert await quick.next() is not None
    assert await slow.next() is None
    assert await quick.next() is not None
    feed.close()


@pytest.mark.asyncio
async def test_so_many_may_listen_and_no_more():
    feed = Feed(Source(), max_listeners=2)
    first = feed.join()
    feed.join()
    with pytest.raises(CapacityError, match="2 listen already"):
        feed.join()
    feed.leave(first)
    feed.join()
    feed.close()


@pytest.mark.asyncio
async def test_its_end_ends_every_listener():
    feed = Feed(Source(), interval_s=INTERVAL_S)
    listener = feed.join()
    feed.close()
    feed.close()
    assert await listener.next() is None
    with pytest.raises(NotReadyError, match="ending"):
        feed.join()


@pytest.mark.asyncio
async def test_a_snapshot_that_fails_is_logged_and_ends_the_stream(capsys: pytest.CaptureFixture[str]):
    source = Source()
    feed = Feed(source, interval_s=INTERVAL_S)
    listener = feed.join()
    await listener.next()
    source.error = RuntimeError("the view is broken")
    assert await asyncio.wait_for(listener.next(), 20) is None
    assert "the view is broken" in "".join(capsys.readouterr())
    source.error = None
    assert parse(await feed.join().next())[0] == "snapshot"
    feed.close()


async def until(look: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not look():  # noqa: ASYNC110 - connections end in their own time
            await asyncio.sleep(INTERVAL_S)


async def serve(feed: Feed) -> HttpServer:
    app = create_daemon_app(
        admission=FakeRooms(),
        requests=FakeRooms(),
        rooms=FakeRooms(),
        status=FakeStatus(),
        settings=settings(tokens=("t",)),
    )
    app.include_router(events_router(feed))
    return await HttpServer.start(app, host="127.0.0.1", port=0, shutdown_s=60.0, limits=limits())


def client() -> httpx.AsyncClient:
    return httpx.AsyncClient(headers={"Authorization": "Bearer t"}, timeout=20.0, trust_env=False)


@pytest.mark.asyncio
@pytest.mark.outside
async def test_it_is_served_as_events_behind_the_token():
    feed = Feed(Source(), interval_s=INTERVAL_S)
    server = await serve(feed)
    async with client() as http:
        assert (await http.get(f"{server.url}/v1/events", headers={"Authorization": ""})).status_code == 401
        async with http.stream("GET", f"{server.url}/v1/events") as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["cache-control"] == "no-store"
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: snapshot"
            assert len(feed) == 1
        await until(lambda: not len(feed))  # the caller has gone
    feed.close()
    await server.stop()


@pytest.mark.asyncio
@pytest.mark.outside
async def test_open_streams_do_not_hold_up_the_end_of_the_server():
    feed = Feed(Source(), interval_s=INTERVAL_S)
    server = await serve(feed)
    async with client() as http, http.stream("GET", f"{server.url}/v1/events") as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        feed.close()
        async with asyncio.timeout(20.0):  # far below `shutdown_s`
            await server.stop()
        assert [line async for line in lines]  # what was sent, and then a proper end


@pytest.mark.asyncio
@pytest.mark.outside
async def test_a_reader_that_stops_reading_is_cut():
    class Large(Source):
        def __call__(self) -> dict[str, Any]:
            return {**super().__call__(), "noise": str(self.looks) * 500_000}

    feed = Feed(Large(), interval_s=INTERVAL_S)
    server = await serve(feed)
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as stuck:
        stuck.sendall(b"GET /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n\r\n")
        await until(lambda: len(feed) == 1)
        await until(lambda: not len(feed))
    feed.close()
    await server.stop()

"""The files of the status page: who gets them, with which headers, and that nothing in them comes from elsewhere."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.page import FILES, PAGE_PATHS
from tests.unit.http.services import FakeRooms, FakeStatus, settings


def client(*tokens: str) -> httpx.AsyncClient:
    app = create_daemon_app(
        admission=FakeRooms(),
        requests=FakeRooms(),
        rooms=FakeRooms(),
        status=FakeStatus(),
        settings=settings(tokens=tokens),
    )
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://d")


@pytest_asyncio.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client("t") as made:
        yield made


@pytest.mark.asyncio
@pytest.mark.parametrize("path", sorted(PAGE_PATHS))
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_every_file_is_open_and_runs_nothing_of_others(http: httpx.AsyncClient, path: str, method: str):
    answer = await http.request(method, path)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.asyncio
async def test_kinds_are_what_browsers_run(http: httpx.AsyncClient):
    kinds = {
        path: (await http.get(path)).headers["content-type"]
        for path in ("/", "/page/page.js", "/page/page.css", "/page/icon.svg")
    }
    assert kinds == {
        "/": "text/html; charset=utf-8",
        "/page/page.js": "text/javascript; charset=utf-8",
        "/page/page.css": "text/css; charset=utf-8",
        "/page/icon.svg": "image/svg+xml",
    }


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/__init__.py", "/page/../daemon_app.py", "/page/%2e%2e%2fserver.py"]
)
async def test_nothing_else_is_served(http: httpx.AsyncClient, path: str):
    assert (await http.get(path)).status_code == 401
    assert (await http.get(path, headers={"Authorization": "Bearer t"})).status_code == 404


@pytest.mark.asyncio
async def test_the_page_knows_whether_it_has_to_ask_for_a_token(http: httpx.AsyncClient):
    assert 'data-token="required"' in (await http.get("/")).text
    async with client() as open_daemon:
        assert 'data-token="none"' in (await open_daemon.get("/")).text


@pytest.mark.parametrize("name", sorted(FILES))
def test_nothing_comes_from_elsewhere_and_nothing_is_inline(name: str):
    content = FILES[name].read_text()
    urls = set(re.findall(r"https?://[^\s\"'<>)]+", content)) - {"http://www.w3.org/2000/svg"}
    assert urls == set()
    if name.endswith(".html"):
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", content)
    assert "innerHTML" not in content
    assert "eval(" not in content

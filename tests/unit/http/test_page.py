"""The files of the status page, their headers, and the document that it shows."""

import itertools
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi import FastAPI

from kvbridge.http.app import PAGE_FILES, PAGE_KEPT_S, PAGE_PATHS, page_router
from tests.helpers.manual_clock import ManualClock
from tests.unit.http.services import FakeRooms, daemon_app


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://d")


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with client(daemon_app(FakeRooms(), tokens=("t",))) as made:
        yield made


async def test_every_file_is_open_and_runs_nothing_of_others(http: httpx.AsyncClient):
    for method, path in itertools.product(("GET", "HEAD"), sorted(PAGE_PATHS)):
        answer = await http.request(method, path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path", ["/page/nothing.js", "/page/__init__.py", "/page/../daemon_app.py", "/page/%2e%2e%2fserver.py"]
)
async def test_nothing_else_is_served(http: httpx.AsyncClient, path: str):
    assert (await http.get(path)).status_code == 401
    assert (await http.get(path, headers={"Authorization": "Bearer t"})).status_code == 404


async def test_the_page_knows_whether_it_has_to_ask_for_a_token(http: httpx.AsyncClient):
    assert 'data-token="required"' in (await http.get("/")).text
    async with client(daemon_app(FakeRooms())) as open_daemon:
        assert 'data-token="none"' in (await open_daemon.get("/")).text


async def test_the_document_is_made_once_for_all_who_look_and_behind_the_token(http: httpx.AsyncClient):
    assert (await http.get("/v1/page", headers={"Authorization": ""})).status_code == 401
    for _ in range(3):
        answer = await http.get("/v1/page", headers={"Authorization": "Bearer t"})
        assert (answer.json()["made"], answer.json()["status"]["role"]) == (1, "prefill")
        assert answer.headers["cache-control"] == "no-store"


async def test_the_document_is_made_again_when_it_is_old():
    clock, made = ManualClock(), itertools.count()
    app = FastAPI()
    app.include_router(page_router(lambda: {"made": next(made)}, asks_token=False, clock=clock))
    seen = []
    async with client(app) as opened:
        for _ in range(5):
            seen.append((await opened.get("/v1/page")).json()["made"])
            clock.advance(PAGE_KEPT_S / 2)
    assert seen == [0, 0, 1, 1, 2]


def test_nothing_comes_from_elsewhere_and_nothing_is_inline():
    for name, file in PAGE_FILES.items():
        content = file.read_text()
        urls = set(re.findall(r"https?://[^\s\"'<>)]+", content)) - {"http://www.w3.org/2000/svg"}
        assert urls == set()
        assert not name.endswith(".html") or not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", content)
        assert "innerHTML" not in content
        assert "eval(" not in content

"""The page about the HTTP APIs lists what they have, and the codes of all errors."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fastapi import FastAPI

from kvbridge.api.directory import TICKET
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.stores.memory import MemoryStore
from kvbridge.core import errors
from kvbridge.core.errors import errors_by_code
from kvbridge.http.bootstrap_app import create_bootstrap_app
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.description import describe
from tests.helpers.manual_clock import ManualClock
from tests.unit.bootstrap.fleet import EXPIRE_AFTER_S, LIMITS, TIMES, FakeDaemons
from tests.unit.http.services import BOOTSTRAP_PAGE, FakeRooms, FakeStatus, settings

TEXT = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()


def bootstrap() -> FastAPI:
    daemons = FakeDaemons()
    store = MemoryStore(expire_after_s=EXPIRE_AFTER_S, rooms=TIMES, clock=ManualClock())
    directory = Directory(store, daemons)
    return create_bootstrap_app(
        directory=directory,
        pairing=PairingService(directory, store, daemons, **LIMITS),
        status=FakeStatus(BOOTSTRAP_PAGE),
        settings=settings(),
    )


def daemon() -> FastAPI:
    rooms = FakeRooms()
    return create_daemon_app(admission=rooms, requests=rooms, rooms=rooms, status=FakeStatus(), settings=settings())


def calls(app: FastAPI) -> set[tuple[str, str]]:
    paths = describe(app, token=False, open_paths=frozenset())["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def listed(*titles: str) -> set[tuple[str, str]]:
    chosen = [part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if part.startswith(titles)]
    assert len(chosen) == len(titles)
    return {
        (method, path) for part in chosen for method, path in re.findall(r"^\| `([A-Z]+) (\S+)` \|", part, re.MULTILINE)
    }


def test_it_lists_what_bootstrap_has() -> None:
    assert listed("Bootstrap", "All of them") == calls(bootstrap())


def test_it_lists_what_daemons_have() -> None:
    assert listed("Daemons", "All of them") == calls(daemon())


def test_it_has_every_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", TEXT, re.MULTILINE)
    # Others belong to what runs in an engine's process, such as kernels.
    known = {code: kind.http_status for code, kind in errors_by_code().items() if kind.__module__ == errors.__name__}
    assert {code: int(status) for code, status in rows} == known


def test_its_ticket_is_the_example_of_the_description() -> None:
    block = re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    assert json.loads(block[1]) == TICKET

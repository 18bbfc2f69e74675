"""The page about the HTTP APIs lists what they have, and the codes of all errors."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import FastAPI

from kvbridge.api.directory import Ticket
from kvbridge.http.app import describe
from tests.unit.http.services import FakeRooms, daemon_app
from tests.unit.http.test_bootstrap_app import Setup

TEXT = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text()


def calls(app: FastAPI) -> set[tuple[str, str]]:
    paths = describe(app, (), (), asks_token=False)["paths"]
    return {(method.upper(), path) for path, methods in paths.items() for method in methods}


def listed(*titles: str) -> set[tuple[str, str]]:
    chosen = [part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if part.startswith(titles)]
    assert len(chosen) == len(titles)
    return {
        (method, path) for part in chosen for method, path in re.findall(r"^\| `([A-Z]+) (\S+)` \|", part, re.MULTILINE)
    }


def test_it_lists_what_there_is() -> None:
    assert listed("Bootstrap", "All of them") == calls(Setup().app)
    assert listed("Daemons", "All of them") == calls(daemon_app(FakeRooms()))


def test_its_ticket_has_every_field() -> None:
    block = re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    assert Ticket.model_validate_json(block[1]).model_fields_set == set(Ticket.model_fields)

"""A client that is generated from what an application says of itself, without a word by hand, and then used.

The generator skips what it does not understand with a warning, so there must be none: everything has its function and its types.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from openapi_python_client import generate
from openapi_python_client.config import Config, ConfigFile, MetaType

from kvbridge.api.directory import NodeHeartbeat
from kvbridge.core.errors import CapacityError
from kvbridge.core.ids import Role
from kvbridge.core.prefixes import ModelIdentity
from kvbridge.http.daemon_app import create_daemon_app
from tests.unit.bootstrap.fleet import node
from tests.unit.http.services import FakeRooms, FakeStatus, settings
from tests.unit.http.test_bootstrap_app import Setup

pytestmark = pytest.mark.asyncio

HEADERS = {"authorization": "Bearer t"}


class Generated:
    """A generated package, and its client of an application."""

    def __init__(self, package: str, transport: httpx.AsyncBaseTransport, token: str = "t") -> None:
        self._package = package
        client = self._module("").AuthenticatedClient
        self._client = client(base_url="http://a", token=token, httpx_args={"transport": transport})

    def _module(self, path: str) -> Any:
        return importlib.import_module(f"{self._package}{path}")

    def model(self, name: str, value: dict[str, Any]) -> Any:
        return getattr(self._module(".models"), name).from_dict(value)

    async def call(self, operation: str, *path: object, **arguments: Any) -> Any:
        """Call an operation, as TAG.NAME; returns the status code and what was parsed."""
        answer = await self._module(f".api.{operation}").asyncio_detailed(*path, client=self._client, **arguments)
        return int(answer.status_code), answer.parsed

    def operations(self) -> set[str]:
        folder = Path(self._module("").__file__).parent / "api"
        return {f"{path.parent.name}.{path.stem}" for path in folder.glob("*/*.py") if path.stem != "__init__"}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def make(name: str, transport: httpx.AsyncBaseTransport, token: str = "t") -> Generated:
        async with httpx.AsyncClient(transport=transport, base_url="http://a", headers=HEADERS) as http:
            schema = (await http.get("/openapi.json")).json()
        source = tmp_path / f"{name}.json"
        source.write_text(json.dumps(schema))
        config = Config.from_sources(
            ConfigFile(post_hooks=[]), MetaType.NONE, source, "utf-8", overwrite=False, output_path=tmp_path / name
        )
        assert generate(config=config) == [], "what the generator does not understand, others do not either"
        monkeypatch.syspath_prepend(str(tmp_path))
        client = Generated(name, transport, token)
        paths = schema["paths"].values()
        assert client.operations() == {
            f"{each['tags'][0]}.{each['operationId']}" for path in paths for each in path.values()
        }
        return client

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] in {"of_a_daemon", "of_bootstrap"}]:
        del sys.modules[name]


async def test_a_client_of_a_daemon(made) -> None:
    rooms = FakeRooms()
    app = create_daemon_app(
        admission=rooms,
        requests=rooms,
        rooms=rooms,
        status=FakeStatus(),
        settings=settings(tokens=("t namespaces=acme,-",)),
    )
    client = await made("of_a_daemon", httpx.ASGITransport(app))
    keyed = {"page_hashes": base64.b64encode(bytes(16)).decode()}
    request = client.model("AdmissionRequest", {"room": 5, "prompt_tokens": 7, "namespace": "acme"} | keyed)
    status, report = await client.call("requests.admit_room", body=request)
    assert (status, report.room, report.state.value) == (201, 5, "admitted")
    assert [(asked.namespace, asked.page_hashes) for asked in rooms.requests] == [("acme", bytes(16))]
    other = client.model("AdmissionRequest", {"prompt_tokens": 7, "namespace": "globex"})
    status, problem = await client.call("requests.admit_room", body=other)
    assert (status, problem.code) == (403, "namespace_forbidden")
    status, page = await client.call("requests.list_rooms", limit=10)
    assert (status, [each.room for each in page.rooms], page.next_) == (200, [5], None)
    assert (await client.call("requests.get_room", 5))[1].room == 5
    status, problem = await client.call("requests.get_room", 6)
    assert (status, problem.code) == (404, "unknown_room")
    rooms.error = CapacityError("full", retry_after_s=2.5)
    status, problem = await client.call("requests.admit_room", body=request)
    assert (status, problem.code, problem.retry_after_s) == (503, "capacity", 2.5)
    page = (await client.call("operations.get_status"))[1]
    assert (page.bootstrap.state.value, page.pools.to_dict()) == ("none", {"full": {"free": 8}})
    assert (await client.call("operations.get_ready"))[1].ready


async def test_a_client_of_bootstrap(made) -> None:
    setup = Setup()
    client = await made("of_bootstrap", setup.transport)
    held = ModelIdentity(name="v4", revision="1")
    for registration in (node("p", Role.PREFILL, model_identity=held), node("d", Role.DECODE)):
        body = client.model("NodeRegistration", registration.model_dump(mode="json"))
        status, view = await client.call("directory.register_node", registration.instance, registration.node, body=body)
        assert (status, view.epoch) == (200, 1)
    beat = NodeHeartbeat(incarnation="p-incarnation-1", ready=True).model_dump(mode="json")
    body = client.model("NodeHeartbeat", beat)
    assert (await client.call("directory.send_heartbeat", "p", "node-0", body=body))[0] == 200
    assert (await client.call("directory.send_heartbeat", "q", "node-0", body=body))[1].code == "not_found"
    listing = (await client.call("directory.list_instances"))[1]
    assert [(each.instance, each.ready) for each in listing] == [("d", True), ("p", True)]
    assert [each.model_identity and each.model_identity.revision for each in listing] == [None, "1"]
    status, ticket = await client.call(
        "requests.pair_request", body=client.model("PairRequest", {"prompt_tokens": 300})
    )
    assert (status, ticket.decode.http_urls) == (201, ["http://d"])
    status, pair = await client.call("requests.get_pair", ticket.room)
    assert (status, pair.ticket.room) == (200, ticket.room)
    assert (await client.call("requests.cancel_pair", ticket.room))[1].state.value == "aborted"
    assert (await client.call("directory.deregister_node", "p", "node-0", incarnation="p-incarnation-1"))[0] == 204


async def test_a_client_with_a_wrong_token_is_told(made) -> None:
    app = create_daemon_app(
        admission=FakeRooms(),
        requests=FakeRooms(),
        rooms=FakeRooms(),
        status=FakeStatus(),
        settings=settings(tokens=("t",)),
    )
    client = await made("of_a_daemon", httpx.ASGITransport(app), token="x")
    status, problem = await client.call("operations.get_status")
    assert (status, problem.code) == (401, "unauthorized")

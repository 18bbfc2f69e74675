"""Bootstrap's endpoint, through its own client, with daemons behind it."""

import re
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from kvbridge.api.client import DirectoryClient
from kvbridge.api.directory import Load, NodeHeartbeat, PairReport, PairRequest, Ticket
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.pairing import PairingService
from kvbridge.bootstrap.store import MemoryStore
from kvbridge.core.errors import ConflictError, FeatureError, UnknownRoomError
from kvbridge.core.ids import Role
from kvbridge.core.session.tables import RoomState
from kvbridge.core.wire.messages import Features
from kvbridge.http.app import describe
from kvbridge.http.bootstrap_app import create_bootstrap_app
from tests.helpers.later_release import later
from tests.helpers.manual_clock import ManualClock
from tests.unit.bootstrap.fleet import EXPIRE_AFTER_S, LIMITS, TIMES, FakeDaemons, half, node
from tests.unit.http.services import BOOTSTRAP_PAGE, FakeRooms, FakeStatus, daemon_app, settings
from tests.unit.http.test_daemon_app import check_description


class Setup:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.daemons = FakeDaemons()
        store = MemoryStore(expire_after_s=EXPIRE_AFTER_S, rooms=TIMES, clock=self.clock)
        self.directory = Directory(store, self.daemons)
        pairing = PairingService(self.directory, store, self.daemons, **LIMITS)
        self.app = create_bootstrap_app(
            self.directory, pairing, FakeStatus(BOOTSTRAP_PAGE), settings(tokens=("t",), max_body_bytes=1 << 20)
        )
        self.transport = httpx.ASGITransport(self.app)


@pytest.fixture
def setup() -> Setup:
    return Setup()


@pytest.fixture
async def client(setup):
    async with DirectoryClient("http://bootstrap/", token="t", timeout_s=5.0, transport=setup.transport) as client:
        yield client


@pytest.fixture
async def http(setup):
    headers = {"authorization": "Bearer t"}
    async with httpx.AsyncClient(transport=setup.transport, base_url="http://bootstrap", headers=headers) as client:
        yield client


async def test_a_node_registers_lives_and_leaves(client, setup):
    view = await client.register(half("p 1", Role.PREFILL, 0))
    assert (view.node, view.epoch) == ("node-0", 1)
    beat = NodeHeartbeat(incarnation="p 1-0-incarnation-1", ready=True, load=Load(rooms=3))
    assert (await client.heartbeat("p 1", "node-0", beat)).load.rooms == 3
    (instance,) = await client.instances()
    assert (instance.instance, instance.complete) == ("p 1", False)
    await client.deregister("p 1", "node-0", "p 1-0-incarnation-1")
    assert await client.instances() == ()


async def test_a_body_must_agree_with_its_path(http):
    registration = node("p", Role.PREFILL).model_dump(mode="json")
    response = await http.put("/v1/instances/p/nodes/other", json=registration)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_input")


async def test_a_request_is_paired_reported_and_cancelled(client, http):
    for registration in (node("p", Role.PREFILL), node("d", Role.DECODE)):
        await client.register(registration)
    requests, wanted = f"{client.base_url}/v1/requests", PairRequest(room=7, prompt_tokens=300)
    ticket = await client.ask(Ticket, "POST", requests, wanted)
    assert (ticket.prefill.http_urls, ticket.decode.http_urls) == (("http://p",), ("http://d",))
    assert (await client.ask(PairReport, "GET", f"{requests}/7")).state is RoomState.ADMITTED
    with pytest.raises(ConflictError, match="room 7 is in use"):
        await client.ask(Ticket, "POST", requests, wanted)
    cancelled = await client.ask(PairReport, "DELETE", f"{requests}/7", params={"reason": "left"})
    assert cancelled.state is RoomState.ABORTED
    with pytest.raises(UnknownRoomError):
        await client.ask(PairReport, "GET", f"{requests}/8")
    response = await http.post("/v1/requests", json={"room": 9, "prompt_tokens": 300})
    assert (response.status_code, response.headers["location"]) == (201, "/v1/requests/9")


async def test_the_description_is_complete(http):
    schema = (await http.get("/openapi.json")).json()
    check_description(schema, {"PairRequest", "NodeRegistration", "NodeHeartbeat"})


async def test_what_a_later_release_adds_to_a_registration_and_a_heartbeat_is_ignored(http, client):
    registration = node("p", Role.PREFILL)
    answer = await http.put("/v1/instances/p/nodes/node-0", json=later(registration) | {"role": "prefill"})
    assert answer.status_code == 200, answer.text
    beat = NodeHeartbeat(incarnation=registration.incarnation, ready=True, load=Load(rooms=3))
    answer = await http.post("/v1/instances/p/nodes/node-0/heartbeat", json=later(beat))
    assert (answer.status_code, answer.json()["load"]["rooms"]) == (200, 3)
    described = (await http.get("/openapi.json")).json()["components"]["schemas"]
    may_grow = {kind for kind, schema in described.items() if schema.get("additionalProperties")}
    assert may_grow == {"NodeRegistration", "NodeHeartbeat"}
    answer = await http.post("/v1/requests", json={"prompt_tokens": 300, "of_a_later_release": 1})
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_input")


async def test_a_node_that_requires_what_this_bootstrap_lacks_is_refused_by_name(client):
    registration = node("p", Role.PREFILL).model_copy(update={"features": Features(requires=("later",))})
    with pytest.raises(FeatureError, match=r"requires feature 'later'.*upgrade this bootstrap"):
        await client.register(registration)
    assert await client.instances() == ()


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


async def test_the_page_about_the_apis_lists_what_there_is(setup: Setup):
    assert listed("Bootstrap", "All of them") == calls(setup.app)
    assert listed("Daemons", "All of them") == calls(daemon_app(FakeRooms()))


async def test_its_ticket_has_every_field():
    block = re.search(r"```json\n(.*?)```", TEXT, re.DOTALL)
    assert block is not None
    assert Ticket.model_validate_json(block[1]).model_fields_set == set(Ticket.model_fields)

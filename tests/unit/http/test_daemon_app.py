"""Each route of a daemon's endpoint, and what it answers when something is wrong."""

import asyncio
import base64
import itertools
import json
import re

import httpx
import pytest

from kvbridge.api.rooms import RoomQuery
from kvbridge.api.status import Readiness
from kvbridge.core.errors import CapacityError
from kvbridge.core.session.tables import RoomState
from kvbridge.http.bootstrap_app import create_bootstrap_app
from tests.unit.http.services import BOOTSTRAP_PAGE, FakeRooms, FakeStatus, daemon_app, settings

OF_ROUTER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

MEMBERS = {"type", "title", "status", "detail", "code", "instance"}


@pytest.fixture
def rooms() -> FakeRooms:
    return FakeRooms()


@pytest.fixture
def status() -> FakeStatus:
    return FakeStatus()


def caller(rooms, status, **changes) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(daemon_app(rooms, status, **changes))
    return httpx.AsyncClient(transport=transport, base_url="http://daemon")


@pytest.fixture
async def http(rooms, status):
    async with caller(rooms, status) as client:
        yield client


def problem(response: httpx.Response, status: int, code: str) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body.keys() - {"retry_after_s"} == MEMBERS
    assert (body["status"], body["code"]) == (status, code)
    assert body["type"] == f"urn:kvbridge:problem:{code}"
    return body


async def test_a_full_daemon_says_when_to_come_back(http, rooms):
    rooms.error = CapacityError("12 of 3 host pages are free", retry_after_s=2.2)
    response = await http.post("/v1/requests", json={"prompt_tokens": 5})
    body = problem(response, 503, "capacity")
    assert response.headers["retry-after"] == "3"
    assert (body["retry_after_s"], body["detail"], body["instance"]) == (2.2, str(rooms.error), "/v1/requests")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, "body.prompt_tokens: Field required"),
        ({"prompt_tokens": 1, "room": 2**53}, "body.room: Input should be less than or equal to 9007199254740991"),
        ({"prompt_tokens": 1, "extra": 1}, "body.extra: Extra inputs are not permitted"),
        ({"prompt_tokens": 512, "prefix_tokens": 256}, "body.prefix_tokens: unknown field; only decode"),
        ([], "body"),
        ({"prompt_tokens": "1000"}, "body.prompt_tokens: Input should be a valid integer, got '1000'"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[" * 2000, "not valid JSON"),
        ({"prompt_tokens": 5, "prefill": [{"endpoint": "tcp://h:1"}] * 33}, "at most 32 items"),
    ],
)
async def test_a_wrong_body_is_refused_with_its_faults(http, body, expected):
    content = body if isinstance(body, bytes) else json.dumps(body)
    response = await http.post("/v1/requests", content=content, headers={"content-type": "application/json"})
    assert expected in problem(response, 400, "invalid_input")["detail"]


async def test_a_wait_is_served_up_to_its_limit(http, rooms):
    await http.post("/v1/requests", json={"room": 3, "prompt_tokens": 5})
    assert (await http.get("/v1/requests/3?wait=2&until=committed&until=claimed")).status_code == 200
    await http.get("/v1/requests/3?wait=1.5")
    await http.get("/v1/requests/3?wait=0&until=committed")
    for query in ("wait=5.1", "wait=-1", "wait=nan", "wait=1&until=nowhere"):
        problem(await http.get(f"/v1/requests/3?{query}"), 400, "invalid_input")
    wanted = frozenset({RoomState.COMMITTED, RoomState.CLAIMED})
    assert rooms.waits == [(3, 2.0, wanted), (3, 1.5, frozenset())]


async def test_cancelling(http):
    await http.post("/v1/requests", json={"room": 3, "generation": 2, "prompt_tokens": 5})
    problem(await http.delete("/v1/requests/3?generation=1"), 409, "stale")
    assert (await http.get("/v1/requests/3")).json()["state"] == "admitted"
    answer = (await http.delete("/v1/requests/3?generation=2&reason=left")).json()
    assert (answer["state"], answer["reason"]) == ("aborted", "left")
    problem(await http.delete("/v1/requests/4"), 404, "unknown_room")


async def test_health_and_readiness(http, status):
    assert (await http.get("/health")).json() == {"alive": True}
    assert (await http.get("/ready")).status_code == (await http.head("/health")).status_code == 200
    status.ready = Readiness(ready=False, reasons=("rank pp0.tp0 is starting",))
    response = await http.get("/ready")
    assert (response.status_code, response.json()["reasons"]) == (503, ["rank pp0.tp0 is starting"])
    assert (await http.head("/ready")).status_code == 503


async def test_others_have_their_turn_while_a_long_page_of_metrics_is_made(http, status, monkeypatch):
    turns, seen = itertools.count(), []

    async def others():
        while True:
            seen.append(next(turns))
            await asyncio.sleep(0)

    def pieces():
        for _ in range(5):
            yield b"kvbridge_rooms 1\n"
            seen.append("piece")

    monkeypatch.setattr("kvbridge.http.app.TURN_S", 0.0)
    monkeypatch.setattr(status, "render_metrics", lambda _accept: (pieces(), "text/plain"))
    beside = asyncio.create_task(others())
    assert (await http.get("/metrics")).content.count(b"\n") == 5
    beside.cancel()
    assert [before for before, after in itertools.pairwise(seen) if before == after == "piece"] == []


async def test_requests_are_counted_by_the_template_of_their_route(http, status):
    assert ("/v1/requests", "POST", 201) in status.served
    assert ("/v1/requests/{room}", "GET", 200) in status.served
    await http.post("/v1/requests", json={"room": 3, "generation": 2, "prompt_tokens": 5})
    for path in ("/v1/requests/3", "/v1/requests/4", "/nowhere"):
        await http.get(path)
    assert status.answers == [
        ("/v1/requests", "POST", 201),
        ("/v1/requests/{room}", "GET", 200),
        ("/v1/requests/{room}", "GET", 404),
        ("other", "GET", 404),
    ]


@pytest.mark.parametrize("given", ["", "router-7/a.b:c", "x" * 129, "two words"])
async def test_a_request_has_an_id_that_is_the_callers_when_it_gives_one(http, given):
    answer = await http.get("/health", headers={"X-Request-Id": given.encode()})
    told = answer.headers["x-request-id"]
    assert told == given if given == "router-7/a.b:c" else re.fullmatch("[0-9a-f]{16}", told)


@pytest.mark.parametrize("given", [[], ["\u00e9"], [OF_ROUTER, OF_ROUTER], [OF_ROUTER]])
async def test_a_traceparent_is_taken_over_or_ignored_and_never_the_callers_fault(http, rooms, given):
    headers = [("traceparent", text.encode()) for text in given]
    assert (await http.post("/v1/requests", json={"room": 3, "prompt_tokens": 5}, headers=headers)).status_code == 201
    good = given == [OF_ROUTER]
    assert [trace and trace.traceparent for trace in rooms.traces] == [OF_ROUTER if good else None]


async def test_a_listing_and_a_timeline(http, rooms):
    for room in (3, 9):
        await http.post("/v1/requests", json={"room": room, "generation": 2, "prompt_tokens": 5})
    page = (await http.get("/v1/requests?state=admitted&state=failed&peer=d/n&client=a&after=7&limit=2")).json()
    assert ([report["room"] for report in page["rooms"]], page["next"]) == ([3, 9], None)
    wanted = frozenset({RoomState.ADMITTED, RoomState.FAILED})
    await http.get("/v1/requests")
    assert rooms.queries == [RoomQuery(state=wanted, peer="d/n", client="a", after=7, limit=2), RoomQuery()]
    assert (await http.get("/v1/requests/3/timeline")).json()["generation"] == 2
    assert (await http.get("/v1/requests/3/timeline?generation=1")).json()["generation"] == 1
    problem(await http.get("/v1/requests/4/timeline"), 404, "unknown_room")


async def test_unknown_routes_and_methods(http):
    assert "/nowhere" in problem(await http.get("/nowhere"), 404, "not_found")["detail"]
    response = await http.put("/v1/requests")
    problem(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "GET, POST"
    assert (await http.post("/ready")).headers["allow"] == "GET, HEAD"
    assert (await http.put("/v1/requests/7")).headers["allow"] == "DELETE, GET"


@pytest.mark.parametrize(
    ("method", "path", "fault"),
    [
        ("GET", "/v1/requests?limit=1&states=offered", "query.states: Extra inputs are not permitted"),
        ("DELETE", "/v1/prefixes?stroe=keep", "query.stroe"),
        ("POST", "/v1/requests?wait=1", "query.wait: unknown parameter; there are none here"),
    ],
)
async def test_a_parameter_that_is_not_there_is_not_passed_over(http, method, path, fault):
    """A caller that misspells one would else get an answer to another question."""
    body = {"json": {"prompt_tokens": 100}} if method == "POST" else {}
    assert fault in problem(await http.request(method, path, **body), 400, "invalid_input")["detail"]


async def test_a_long_body_is_refused_with_and_without_an_announced_length(http, rooms):
    async def pieces():
        for _ in range(5):
            yield b" " * 1000

    for content in (b"x" * 4097, pieces()):
        answer = await http.post("/v1/requests", content=content, headers={"content-type": "application/json"})
        problem(answer, 413, "body_too_large")
    assert rooms.rooms == {}


async def test_an_unforeseen_error_tells_nothing(http, rooms):
    rooms.error = RuntimeError("secret path /etc/x")
    body = problem(await http.post("/v1/requests", json={"prompt_tokens": 5}), 500, "internal")
    assert "secret" not in json.dumps(body)
    assert "reference" in body["detail"]


async def test_any_of_the_tokens_is_good_and_nothing_else(rooms, status):
    async with caller(rooms, status, tokens=("new", "old")) as http:
        for value in ("Bearer wrong", "Bearer older", "Basic old", "old", "Bearer", "Bearer ", "Bearer ol\xe9"):
            answer = await http.get("/status", headers={"authorization": value.encode("latin-1")})
            problem(answer, 401, "unauthorized")
        for token in ("new", "old"):
            assert (await http.get("/status", headers={"authorization": f"Bearer {token}"})).status_code == 200


def check_description(schema: dict, bodies: set[str]) -> None:
    """Every reference resolves, every operation has a name of its own, and what every one of them may answer is a problem."""
    names = schema["components"]["schemas"]
    assert bodies < names.keys()
    assert "HTTPValidationError" not in names
    assert schema["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    operations = [each for path in schema["paths"].values() for each in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    for operation in operations:
        answers = operation["responses"]
        assert answers["default"]["content"] == {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        }
        assert "422" not in answers
        assert ("Location" in answers.get("201", {}).get("headers", {})) is ("201" in answers)
    for reference in _references(schema):
        assert reference.removeprefix("#/components/schemas/") in names


async def test_the_description_is_complete(rooms, status):
    async with caller(rooms, status, tokens=("s3cret",)) as http:
        schema = (await http.get("/openapi.json", headers={"authorization": "Bearer s3cret"})).json()
    check_description(schema, {"AdmissionRequest", "Problem"})
    assert schema["security"] == [{"bearer": []}]
    assert schema["paths"]["/health"]["get"]["security"] == []
    post = schema["paths"]["/v1/requests"]["post"]
    for part, kind in ((post["responses"]["201"], "RoomReport"), (post["requestBody"], "AdmissionRequest")):
        assert part["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{kind}"}


def _references(value):
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


async def test_every_cached_prefix_can_be_dropped(http):
    answer = await http.delete("/v1/prefixes")
    dropped = {"dropped_pages": 12, "read_pages": 3}
    stored = {"outcome": "dropped", "objects": 7, "reason": ""}
    assert (answer.status_code, answer.json()) == (200, {**dropped, "store": stored})
    kept = await http.delete("/v1/prefixes", params={"store": "keep"})
    assert kept.json()["store"]["outcome"] == "kept"
    problem(await http.delete("/v1/prefixes", params={"store": "some"}), 400, "invalid_input")


KEYS = bytes(range(32))
TOKENS = ("plain", "tenant namespaces=acme", "router namespaces=*")


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def keyed(namespace: str | None = None, keys: bytes | None = KEYS) -> dict:
    named = {} if namespace is None else {"namespace": namespace}
    hashes = {} if keys is None else {"page_hashes": base64.b64encode(keys).decode()}
    return {"prompt_tokens": 700, **named, **hashes}


@pytest.mark.parametrize(
    ("token", "namespace", "keys", "code"),
    [
        ("plain", None, KEYS, 201),
        ("plain", "acme", KEYS, 403),
        ("tenant", "acme", KEYS, 201),
        ("tenant", "globex", KEYS, 403),
        ("tenant", None, KEYS, 403),
        ("tenant", None, None, 201),
        ("router", "globex", KEYS, 201),
        ("tenant namespaces=acme", "acme", KEYS, 401),
    ],
)
async def test_a_token_says_which_namespaces_its_bearer_may_name(rooms, status, token, namespace, keys, code):
    async with caller(rooms, status, tokens=TOKENS) as http:
        response = await http.post("/v1/requests", json=keyed(namespace, keys), headers=bearer(token))
    assert response.status_code == code, response.text
    if code == 403:
        assert response.json()["code"] == "namespace_forbidden"
        assert "may name" in response.json()["detail"]
        assert not rooms.rooms


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"page_hashes": "not base64!"}, "body.page_hashes: no base64"),
        ({"page_hashes": "AAEC"}, "body.page_hashes: page keys have 16 bytes each, these are 3 bytes in all"),
        (keyed(keys=bytes(16) * 65_537), "more than any prompt has keys"),
        ({"namespace": "a b"}, "body.namespace"),
    ],
    ids=["not base64", "not whole", "too many", "no name"],
)
async def test_what_are_no_keys_and_no_names_is_refused(rooms, status, change, fault):
    async with caller(rooms, status, max_body_bytes=1 << 22) as http:
        answer = await http.post("/v1/requests", json=keyed() | change)
    assert fault in problem(answer, 400, "invalid_input")["detail"]


async def test_bootstrap_hands_on_what_its_caller_may_name():
    class Pairing:
        def __init__(self) -> None:
            self.asked: list[tuple[str, bool, bool]] = []

        async def pair(self, request, may_name):
            self.asked.append((request.namespace, "acme" in may_name, "" in may_name))
            may_name.require(request.namespace, keyed=bool(request.page_hashes))
            raise AssertionError("only refusals are asked for here")

    pairing = Pairing()
    app = create_bootstrap_app(None, pairing, FakeStatus(BOOTSTRAP_PAGE), settings(TOKENS))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bootstrap") as http:
        for token in ("plain", "tenant"):
            answer = await http.post("/v1/requests", json=keyed("globex"), headers=bearer(token))
            assert (answer.status_code, answer.json()["code"]) == (403, "namespace_forbidden")
    assert pairing.asked == [("globex", False, True), ("globex", True, False)]

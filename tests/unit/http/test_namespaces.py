"""Page keys and namespaces in requests: what is taken, and who may name what."""

from __future__ import annotations

import base64

import httpx
import pytest

from kvbridge.http.bootstrap_app import create_bootstrap_app
from tests.unit.http.services import BOOTSTRAP_PAGE, FakeRooms, FakeStatus, daemon_app, settings

pytestmark = pytest.mark.asyncio

KEYS = bytes(range(32))
TOKENS = ("plain", "tenant namespaces=acme", "router namespaces=*")


@pytest.fixture
def rooms() -> FakeRooms:
    return FakeRooms()


def daemon(rooms, *, tokens=TOKENS, token="router", **changes) -> httpx.AsyncClient:
    app = daemon_app(rooms, tokens=tokens, **changes)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://daemon", headers=headers)


def body(namespace: str | None = None, keys: bytes | None = KEYS, **fields) -> dict:
    named = {} if namespace is None else {"namespace": namespace}
    keyed = {} if keys is None else {"page_hashes": base64.b64encode(keys).decode()}
    return {"prompt_tokens": 700, **named, **keyed, **fields}


@pytest.mark.parametrize(
    ("token", "namespace", "keys", "status"),
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
async def test_a_token_says_which_namespaces_its_bearer_may_name(rooms, token, namespace, keys, status):
    async with daemon(rooms, token=token) as http:
        response = await http.post("/v1/requests", json=body(namespace, keys))
    assert response.status_code == status, response.text
    if status == 403:
        assert response.json()["code"] == "namespace_forbidden"
        assert "may name" in response.json()["detail"]
        assert not rooms.rooms


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"page_hashes": "not base64!"}, "body.page_hashes: no base64"),
        ({"page_hashes": "AAEC"}, "body.page_hashes: page keys have 16 bytes each, these are 3 bytes in all"),
        ({"namespace": "a b"}, "body.namespace"),
    ],
)
async def test_what_are_no_keys_and_no_names_is_refused(rooms, change, fault):
    async with daemon(rooms) as http:
        response = await http.post("/v1/requests", json=body() | change)
    assert (response.status_code, response.json()["code"]) == (400, "invalid_input")
    assert fault in response.json()["detail"]


async def test_more_keys_than_any_prompt_has_are_refused(rooms):
    async with daemon(rooms, max_body_bytes=1 << 22) as http:
        answer = await http.post("/v1/requests", json=body(keys=bytes(16) * 65_537))
    assert answer.status_code == 400
    assert "more than any prompt has keys" in answer.json()["detail"]


async def test_bootstrap_hands_on_what_its_caller_may_name():
    class Pairing:
        def __init__(self) -> None:
            self.asked: list[tuple[str, bool, bool]] = []

        async def pair(self, request, may_name):
            self.asked.append((request.namespace, "acme" in may_name, "" in may_name))
            may_name.require(request.namespace, keyed=bool(request.page_hashes))
            raise AssertionError("only refusals are asked for here")

    pairing = Pairing()
    app = create_bootstrap_app(
        directory=None, pairing=pairing, status=FakeStatus(BOOTSTRAP_PAGE), settings=settings(TOKENS), page=dict
    )
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://bootstrap") as http:
        for token in ("plain", "tenant"):
            answer = await http.post("/v1/requests", json=body("globex"), headers={"Authorization": f"Bearer {token}"})
            assert (answer.status_code, answer.json()["code"]) == (403, "namespace_forbidden")
    assert pairing.asked == [("globex", False, True), ("globex", True, False)]

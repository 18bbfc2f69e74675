"""The HTTP APIs of running daemons against their own description: what /openapi.json says is what is answered.

Requests are drawn from the description, right and wrong ones, some with rooms and nodes that exist. Nothing may be
answered with 5xx but with 503, and every answer has the form that the description gives it. `make fuzz-http` does the
same for longer (`FUZZ_EXAMPLES`).
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi import checks

from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.geometry.models import preset
from tests.helpers.cluster import DaemonProcess
from tests.helpers.live_rooms import LiveCluster, http, live_cluster

pytestmark = pytest.mark.thorough

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
"""For each operation: right requests and wrong ones."""
CHECKS = [
    checks.response_schema_conformance,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
]
CALL_S = 20.0
ROOMS = "/v1/requests/{room}"
NODES = "/v1/instances/{instance}/nodes/{node}"


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    # Rooms are admitted by the hundred here, and none of them is meant to go anywhere.
    short = {
        "timeouts": {"offer_s": 0.5, "handshake_s": 0.5, "room_keep_s": 120.0, "control_delivery_s": 20.0},
        "http": {"port": 0, "max_wait_s": 0.2},
    }
    with live_cluster(prefill=short, decode=short) as running:
        yield running


class Endpoint:
    def __init__(self, live: LiveCluster, side: str) -> None:
        self.daemon: DaemonProcess = getattr(live.cluster, side)
        self.side = side
        self.control = live.address
        self.rooms: list[int] = [0]
        self.answers: Counter[tuple[str, int]] = Counter()
        self.schema = schemathesis.openapi.from_dict(http("GET", self.daemon, "/openapi.json").json())

    def planted(self, case: Case, number: int) -> None:
        """Put what exists into a request that was drawn, so that it gets behind the first look."""
        path, body = case.operation.path, case.body
        if path == ROOMS:
            case.query.pop("wait", None)  # most numbers are longer than is served, and refused for that
            case.path_parameters["room"] = self.rooms[number % len(self.rooms)]
        elif path == "/v1/requests" and isinstance(body, dict):
            body.pop("room", None)
            body |= {"prompt_tokens": 1 + number % 2_000, "max_new_tokens": number % 100}
            if self.side != "bootstrap":
                body |= {"prefill": [self.control] if self.side == "decode" else [], "wait_s": 0}
            else:
                body.pop("fingerprint", None)
        elif path.startswith(NODES):
            case.path_parameters |= {"instance": "drawn", "node": f"node-{number % 3}"}
            if isinstance(body, dict) and case.method == "PUT":
                body |= self._registration(f"node-{number % 3}", f"{number % 5:016x}")
            elif isinstance(body, dict):
                body["incarnation"] = f"{number % 5:016x}"

    def _registration(self, node: str, incarnation: str) -> dict[str, Any]:
        geometry = preset("tiny-v4")
        return {
            "instance": "drawn",
            "node": node,
            "role": "prefill",
            "incarnation": incarnation,
            "ready": False,
            "http_url": "http://127.0.0.1:1",
            "control": self.control,
            "pp_size": 1,
            "tp_size": 3,
            "ranks": [{"pp": 0, "tp": int(node[-1])}],
            "fingerprint": fingerprint(geometry),
            "geometry": geometry.model_dump(mode="json"),
        }

    def ask(self, case: Case, session: requests.Session) -> None:
        response = case.call(base_url=self.daemon.url, session=session, timeout=CALL_S)
        self.answers[case.operation.label, response.status_code] += 1
        told = (case.as_curl_command(), response.status_code, response.text)
        assert response.status_code < 500 or response.status_code == 503, told
        case.validate_response(response, checks=CHECKS)
        if response.status_code == 201:
            self.rooms.append(int(response.json()["room"]))


def try_out(endpoint: Endpoint, operation: APIOperation, mode: GenerationMode, session: requests.Session) -> None:
    """Draw requests of one operation; they are not made smaller when one fails: the message names the request."""
    plants, turns = mode is GenerationMode.POSITIVE, itertools.count()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode), number=st.integers(0, 10_000))
    def holds(case: Case, number: int) -> None:
        if plants and next(turns) % 2 == 0:
            endpoint.planted(case, number)
        endpoint.ask(case, session)

    holds()


@pytest.mark.timeout(120 + 4 * EXAMPLES)
@pytest.mark.parametrize("side", ["prefill", "decode", "bootstrap"])
def test_an_api_keeps_to_its_description(live: LiveCluster, side: str) -> None:
    endpoint = Endpoint(live, side)
    with requests.Session() as session:
        for operation in (found.ok() for found in endpoint.schema.get_all_operations()):
            if operation.body or operation.path_parameters or operation.query:
                for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                    try_out(endpoint, operation, mode, session)
            else:
                endpoint.ask(operation.Case(), session)
    for wanted in (("POST /v1/requests", 201), ("POST /v1/requests", 400), (f"GET {ROOMS}", 200), ("GET /status", 200)):
        assert endpoint.answers[wanted], f"nothing was answered like {wanted}: {endpoint.answers}"
    assert http("GET", endpoint.daemon, "/health").status_code == 200
    assert "request_failed" not in endpoint.daemon.log_path.read_text(), "an error that nobody foresaw"

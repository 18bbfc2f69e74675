"""One request's trace over all processes, as a collector receives it."""

import json
import secrets
from collections.abc import Iterator
from itertools import pairwise

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, http, live_cluster, metric
from tests.helpers.span_collector import Collector, ReceivedSpan, span_collector

TOKENS = 1000
ROUTER_SPAN = "00f067aa0ba902b7"
LATER_NS = 3_000_000
"""Two processes of a host look at its clock one after another."""

BELOW = {
    ("kvbridge-bootstrap", "pair"): "",
    ("kvbridge-bootstrap", "reserve"): "pair",
    ("kvbridge-prefill", "room"): "reserve",
    ("kvbridge-prefill", "admission"): "room",
    ("kvbridge-prefill", "offer"): "room",
    ("kvbridge-prefill", "publish"): "room",
    ("kvbridge-prefill", "send"): "commit",
    ("kvbridge-prefill", "order"): "send",
    ("kvbridge-prefill", "plan"): "order",
    ("kvbridge-prefill", "submit"): "order",
    ("kvbridge-prefill", "wait"): "order",
    ("kvbridge-decode", "room"): "reserve",
    ("kvbridge-decode", "admission"): "room",
    ("kvbridge-decode", "offer"): "room",
    ("kvbridge-decode", "commit"): "room",
    ("kvbridge-decode", "verify"): "commit",
    ("kvbridge-decode", "claim"): "room",
    ("kvbridge-decode", "use"): "room",
}
"""By service and name of a span: the name of the one that it is a part of."""
OUTLIVES = {("kvbridge-prefill", "room"), ("kvbridge-decode", "room")}
"""They begin while the request that makes them is served, and go on after it."""
OUTRUNS = {("kvbridge-prefill", "send"): ("decode", "offer")}
"""Begins when the offer is there, and the span above it when decode hears of that: not before the offer is all that is certain."""


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with span_collector() as running:
        yield running


@pytest.fixture(scope="module")
def live(collector: Collector) -> Iterator[LiveCluster]:
    telemetry = {"telemetry": {"log_format": "json", "traces": {"endpoint": collector.url, "sampled_ratio": 0.0}}}
    with live_cluster(
        prefill=telemetry, decode=telemetry | {"integrity": {"digest": "crc32c"}}, bootstrap=telemetry
    ) as running:
        yield running
        running.no_traceback()


@pytest.fixture(autouse=True)
def _engines_let_go(live: LiveCluster) -> Iterator[None]:
    yield
    live.detach()


def ask(live: LiveCluster, traceparent: str) -> int:
    """Pair a request on behalf of a router; returns the room."""

    def look() -> int | None:
        answer = http(
            "POST",
            live.cluster.bootstrap,
            "/v1/requests",
            headers={"traceparent": traceparent},
            json={"prompt_tokens": TOKENS, "max_new_tokens": 8},
        )
        assert answer.status_code in {201, 503}, answer.text
        return int(answer.json()["room"]) if answer.is_success else None

    return int(eventually("a ticket", look))


def cross(live: LiveCluster, room: int) -> tuple[str, str]:
    """Take a paired room through its life; returns what both engines are told to go on with."""
    assert live.reader is not None
    begun = live.sender.begin(room, prompt_tokens=TOKENS)
    begun.publish(TOKENS)
    begun.finish()
    claimed = live.reader.claim(room, timeout_s=20.0)
    claimed.release()
    return begun.traceparent, claimed.traceparent


def exported(live: LiveCluster) -> float:
    return metric(live.decode, "kvbridge_trace_spans_total", outcome="exported")


def lines(live: LiveCluster, room: int) -> list[dict[str, str]]:
    found = [line for daemon in live.cluster.all() for line in daemon.log_path.read_text().splitlines() if "{" in line]
    return [line for line in map(json.loads, found) if line.get("room") == room and line["event"] == "room_ended"]


def test_a_request_is_one_trace_over_all_processes(live: LiveCluster, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    room = ask(live, f"00-{trace_id}-{ROUTER_SPAN}-01")
    told_prefill, told_decode = cross(live, room)
    wanted = set(BELOW)
    collector.wait(
        "the whole trace", lambda spans: {(s.service, s.name) for s in spans if s.trace_id == trace_id} >= wanted
    )

    spans = collector.of(trace_id)

    def one(service: str, name: str) -> ReceivedSpan:
        (found,) = [span for span in spans if (span.service, span.name) == (f"kvbridge-{service}", name)]
        return found

    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), "every span has an id of its own"
    assert {(span.service, span.name) for span in spans} == wanted
    for span in spans:
        assert span.begin_ns <= span.end_ns
        assert span.room == room
        assert not span.error
        above = BELOW[span.service, span.name]
        if not above:
            assert span.parent_id == ROUTER_SPAN
            continue
        parent = by_id[span.parent_id]
        assert parent.name == above
        earlier = OUTRUNS.get((span.service, span.name))
        assert span.begin_ns >= (one(*earlier) if earlier else parent).begin_ns - LATER_NS
        assert span.end_ns <= parent.end_ns + LATER_NS or (span.service, span.name) in OUTLIVES

    ordered = [one("decode", name) for name in ("admission", "offer", "commit", "claim", "use")]
    assert all(later.begin_ns >= earlier.end_ns for earlier, later in pairwise(ordered[1:]))
    steps = [next(span for span in spans if span.name == name) for name in ("plan", "submit", "wait")]
    assert [step.begin_ns for step in steps] == sorted(step.begin_ns for step in steps)
    assert {span.attributes["kvbridge.role"] for span in spans if span.name == "reserve"} == {"prefill", "decode"}
    moved = one("decode", "room").attributes["kvbridge.bytes"]
    assert sum(span.attributes["kvbridge.bytes"] for span in spans if span.name == "order") == moved > 0
    assert one("prefill", "order").attributes["kvbridge.rank"] == "pp0.tp0"
    # Engines are told the span of their node's room.
    assert told_prefill == f"00-{trace_id}-{one('prefill', 'room').span_id}-01"
    assert told_decode == f"00-{trace_id}-{one('decode', 'room').span_id}-01"
    resource = one("decode", "room").resource
    assert (resource["kvbridge.instance"], resource["kvbridge.node"]) == ("decode-0", "node-0")
    assert resource["process.pid"] == live.decode.endpoint().pid

    eventually("both ends in the logs", lambda: len(lines(live, room)) == 2)
    assert {line["trace_id"] for line in lines(live, room)} == {trace_id}
    for daemon, name in (
        (live.decode, "kvbridge_admission_to_claim_seconds"),
        (live.prefill, "kvbridge_phase_duration_seconds"),
    ):
        page = http("GET", daemon, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
        families = {family.name: family for family in text_string_to_metric_families(page.text)}
        shown = {sample.exemplar.labels["trace_id"] for sample in families[name].samples if sample.exemplar}
        assert trace_id in shown
    eventually("all counted", lambda: exported(live) == sum(s.service == "kvbridge-decode" for s in collector.spans))
    assert set(collector.paths) == {"/v1/traces"}

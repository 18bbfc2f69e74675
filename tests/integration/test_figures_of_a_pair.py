"""Metrics and logs of a real pair, compared with the bytes that went over and with the time."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from kvbridge.core.geometry.models import preset
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
from kvbridge.telemetry.metrics import PHASES
from tests.contract.harness import BACKENDS, require_library
from tests.helpers.cluster import Cluster, DaemonProcess, cluster, eventually, live_rows_only
from tests.helpers.live_rooms import CLAIM_S, check_rows, http, write
from tests.helpers.matrices import kept
from tests.helpers.rank_harness import Case

TINY = preset("tiny-v4")
CASES = (Case(700), Case(130, (57,)), Case(1023, (333, 777)))
SCRAPE = {"Accept": "application/openmetrics-text; version=1.0.0"}

Page = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(daemon: DaemonProcess) -> Page:
    answer = http("GET", daemon, "/metrics", headers=SCRAPE)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def total(page: Page, name: str, **labels: str) -> float:
    return sum(value for (found, has), value in page.items() if found == name and labels.items() <= dict(has).items())


def lines(daemon: DaemonProcess) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log(10_000).splitlines() if line.startswith("{")]


def of(found: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in found if line["event"] == event]


def move(running: Cluster, case: Case, engines: tuple[PrefillEngine, DecodeEngine], request_id: str) -> dict[str, Any]:
    """One request from its ticket to its release; returns what went over, measured here."""
    sender, reader = engines
    asked = {"prompt_tokens": case.tokens, "max_new_tokens": 1}
    headers = {"X-Request-Id": request_id}
    answer = http("POST", running.bootstrap, "/v1/requests", json=asked, headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (201, request_id)
    room = answer.json()["room"]
    write(sender, room, case)
    claimed = reader.claim(room, timeout_s=CLAIM_S)
    check_rows(reader, claimed)
    claimed.release()
    return {
        "room": room,
        "bytes": {kind.value: amount.bytes for kind, amount in claimed.amounts.items()},
        "rows": {kind.value: amount.lane_rows for kind, amount in claimed.amounts.items()},
    }


@pytest.fixture(scope="module", params=[kept("local", True), kept("mooncake", False)])
def run(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    require_library(BACKENDS[request.param])
    level = {"telemetry": {"log_level": "info"}}
    with cluster(
        {"preset": "tiny-v4"}, transport=request.param, prefill=level | live_rows_only(request.param), decode=level
    ) as running:
        with (
            PrefillEngine.attach(running.prefill.runtime_dir) as sender,
            DecodeEngine.attach(running.decode.runtime_dir) as reader,
        ):
            moved = [move(running, case, (sender, reader), f"test-{number}") for number, case in enumerate(CASES)]
            eventually(
                "everything released",
                lambda: total(scrape(running.decode), "kvbridge_rooms_ended_total", state="completed") == len(CASES),
            )
            pages = {role: scrape(getattr(running, role)) for role in ("prefill", "decode", "bootstrap")}
        running.stop()
        logs = {role: lines(getattr(running, role)) for role in ("prefill", "decode", "bootstrap")}
        yield {"moved": moved, "pages": pages, "logs": logs, "transport": request.param}


SIDES = (("prefill", "sent", "decode-0/node-0"), ("decode", "received", "prefill-0/node-0"))


def test_bytes_are_those_that_the_oracle_counts(run: dict[str, Any]) -> None:
    for role, direction, peer in SIDES:
        page, way = run["pages"][role], {"direction": direction, "transport": run["transport"]}
        for component in TINY.components:
            due = sum(moved["bytes"].get(component.kind.value, 0) for moved in run["moved"])
            shown = total(page, "kvbridge_transferred_bytes_total", component=component.kind.value, **way)
            assert shown == due, (role, component.kind)
            # The oracle knows rows; pages are moved with what separates their blocks.
            rows = sum(len(component.layers) * component.live_rows(case.tokens).count for case in CASES)
            assert rows == sum(moved["rows"].get(component.kind.value, 0) for moved in run["moved"])
            padding = component.page_bytes() - component.lane_block_bytes
            pages = rows // component.slots_per_page + len(component.layers) * len(CASES)
            assert rows * component.row_bytes <= shown <= rows * component.row_bytes + pages * padding
        everything = total(page, "kvbridge_transferred_bytes_total")
        assert everything == total(page, "kvbridge_transferred_bytes_total", **way)
        assert everything == total(page, "kvbridge_peer_transferred_bytes_total", peer=peer, **way)
        assert everything == total(page, "kvbridge_peer_transferred_bytes_total")


def test_every_phase_of_both_roles_is_there_and_the_whole(run: dict[str, Any]) -> None:
    for role, unused in (("prefill", {"digest"}), ("decode", {"verify", "verify_busy"})):
        for phase in PHASES[role]:  # type: ignore[index] - a Role is its text
            counted = total(run["pages"][role], "kvbridge_phase_duration_seconds_count", phase=phase)
            assert counted == (0 if phase in unused else len(CASES)), phase
    decode = run["pages"]["decode"]
    assert total(decode, "kvbridge_admission_to_claim_seconds_count") == len(CASES)
    whole_s = total(decode, "kvbridge_admission_to_claim_seconds_sum")
    parts_s = sum(
        total(decode, "kvbridge_phase_duration_seconds_sum", phase=phase)
        for phase in ("admit_to_commit", "commit_to_claim")
    )
    assert whole_s == pytest.approx(parts_s, rel=1e-6)


def test_the_logs_tell_of_each_room_on_every_daemon_under_the_callers_id(run: dict[str, Any]) -> None:
    for role, _, peer in SIDES:
        ended = of(run["logs"][role], "room_ended")
        assert [line["request_id"] for line in ended] == [f"test-{number}" for number in range(len(CASES))]
        assert [line["room"] for line in ended] == [moved["room"] for moved in run["moved"]]
        assert [line["bytes"] for line in ended] == [sum(moved["bytes"].values()) for moved in run["moved"]]
        assert {line["peer_name"] for line in ended} == {peer}
        assert {line["state"] for line in ended} == {"completed"}

"""A real Prometheus beside real daemons: every panel's query and every rule is evaluated and has data."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import pytest

from deploy.grafana.build import BOARDS
from deploy.grafana.panels import ANNOTATIONS, INSTANCE, ROLE, Panel, Query
from kvbridge.core.errors import BridgeError
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import CALL_S, LiveCluster, all_free, http, live_cluster, metric, status
from tests.operate.prometheus import PrometheusServer, prometheus
from tests.operate.queries import expression
from tests.operate.rules import promtool, rules

TOKENS = 1000
SCRAPE_S = 1.0
DATA_WITHIN_S = 60.0
REQUEST_SLOTS = 8
"""Of the pools of `cluster`: so many rooms fit, of whatever length."""
RULES_WITHOUT_DATA: dict[str, str] = {}
"""Recording rules that need more than rooms which pass, and what."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass
class Watched:
    live: LiveCluster
    server: PrometheusServer
    rooms: int = 0
    provoked: set[str] = field(default_factory=set)
    """Alerts that a test has set off on purpose; they stay for a quarter of an hour."""

    def cross(self) -> None:
        """A room that bootstrap has paired, from end to end."""
        self.live.cross(TOKENS, int(self.live.ticket(TOKENS)["room"]))
        self.rooms += 1


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    """Rooms have passed, one was given up, one was refused, one has waited."""
    with (
        live_cluster(decode={"integrity": {"digest": "crc32c"}}) as live,
        prometheus(live.cluster.all(), scrape_s=SCRAPE_S) as server,
    ):
        made = Watched(live, server)
        made.cross()
        given_up = live.pair(TOKENS)
        assert http("DELETE", live.decode, f"/v1/requests/{given_up}?reason=test").is_success
        assert http("POST", live.decode, "/v1/requests", json={"prompt_tokens": 2**40}).status_code == 400
        _wait_for_pages(live)
        yield made


def _wait_for_pages(live: LiveCluster) -> None:
    """A request has to wait on decode until another gives its pages back."""
    for daemon in (live.prefill, live.decode):
        all_free(daemon)
    held = [live.pair(TOKENS) for _ in range(REQUEST_SLOTS)]
    with ThreadPoolExecutor(1) as beside:
        waiting = beside.submit(live.admit_on_decode, TOKENS, wait_s=20)
        eventually("waiting", lambda: metric(live.decode, "kvbridge_admission_waiting_requests"))
        for room in held:
            assert http("DELETE", live.decode, f"/v1/requests/{room}").is_success
        assert http("DELETE", live.decode, f"/v1/requests/{waiting.result(CALL_S)}").is_success


def test_every_query_of_every_panel_returns_data(watched: Watched) -> None:
    panels = [(board.uid, panel) for board in BOARDS for panel in board.panels]
    lacking: dict[str, Query] = {
        f"{uid}: {panel.title}: {query.expr}": query
        for uid, panel in panels
        if not panel.empty_unless
        for query in panel.queries
    }

    def look() -> bool:
        watched.cross()
        for name, query in list(lacking.items()):
            if watched.server.query(expression(query.expr)):
                del lacking[name]
        return not lacking

    with suppress(AssertionError):
        eventually("data", look, DATA_WITHIN_S, pause_s=1.0)
    assert not lacking, "no data:\n" + "\n".join(lacking)


def test_queries_that_may_be_empty_are_right_nevertheless(watched: Watched) -> None:
    panels: list[Panel] = [panel for board in BOARDS for panel in board.panels if panel.empty_unless]
    assert panels
    for expr in [*(query.expr for panel in panels for query in panel.queries), *(expr for _, expr, _ in ANNOTATIONS)]:
        watched.server.query(expression(expr))


def test_variables_have_values(watched: Watched) -> None:
    """`label_values(metric, label)` of each variable, as Grafana asks for it."""
    for variable in (ROLE, INSTANCE, *(each for board in BOARDS for each in board.variables)):
        selector, _, label = variable.values.removeprefix("label_values(").removesuffix(")").rpartition(", ")
        asked = f"count by ({label}) ({expression(selector)})"
        found = eventually(asked, partial(watched.server.query, asked), DATA_WITHIN_S)
        assert all(sample["metric"][label] for sample in found)


def test_every_rule_is_evaluated_and_no_alert_fires(watched: Watched) -> None:
    wanted = {rule["record"] for rule in rules() if "record" in rule} - set(RULES_WITHOUT_DATA)

    def look() -> bool:
        watched.cross()
        wanted.difference_update({name for name in wanted if watched.server.query(name)})
        return not wanted

    with suppress(AssertionError):
        eventually("recorded", look, DATA_WITHIN_S, pause_s=1.0)
    assert not wanted, f"nothing recorded: {sorted(wanted)}"
    found = watched.server.rules()
    assert len(found) == len(rules())
    assert not [(rule["name"], rule["lastError"]) for rule in found if rule["health"] != "ok"]
    assert set(watched.server.firing()) <= watched.provoked


def test_figures_are_those_of_the_daemons(watched: Watched) -> None:
    """What Prometheus has of a counter is what the daemon says: nothing is lost or doubled on the way."""
    watched.cross()
    labels = {"state": "completed", "code": ""}
    said = metric(watched.live.decode, "kvbridge_rooms_ended_total", **labels)
    assert said == watched.rooms
    expr = 'sum(kvbridge_rooms_ended_total{state="completed"} and on (instance) kvbridge_build_info{role="decode"})'
    eventually("scraped", lambda: [float(each["value"][1]) for each in watched.server.query(expr)] == [said])


@pytest.mark.parametrize("role", ["bootstrap", "prefill", "decode"])
def test_promtool_likes_the_metrics(watched: Watched, role: str) -> None:
    daemon = getattr(watched.live.cluster, role)
    promtool("check", "metrics", given=http("GET", daemon, "/metrics").text)


def test_a_rank_worker_that_is_killed_is_told_of(watched: Watched) -> None:
    assert not watched.server.firing()
    watched.provoked.add("KvbridgeWorkerDied")
    pid = int(status(watched.live.prefill)["ranks"][0]["pid"])
    os.kill(pid, signal.SIGKILL)
    notes = eventually(
        "the alert", lambda: watched.server.firing().get("KvbridgeWorkerDied"), DATA_WITHIN_S, pause_s=0.5
    )
    assert notes["summary"] == "A rank worker of prefill-0/node-0 died: killed"
    assert set(watched.server.firing()) == {"KvbridgeWorkerDied"}
    watched.live.detach()

    def look() -> bool:
        with suppress(BridgeError, AssertionError):
            watched.cross()
            return True
        return False

    eventually("rooms cross again", look, DATA_WITHIN_S, pause_s=0.5)

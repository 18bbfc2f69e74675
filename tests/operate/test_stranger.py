"""The way of somebody who has the wheel and nothing else: a pair, a request, its page, its metrics, a fault, the alert, the cure.

Owns: that way, from end to end, in one test. Must not know: the checkout, but for the alert's runbook, which is compared with it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.helpers.browser import Browser, browser
from tests.helpers.cluster import eventually
from tests.helpers.distribution import Installed, build, copy_checkout, install, stranger_environment
from tests.helpers.tried_cluster import END_S, TriedCluster, short_folder
from tests.operate.prometheus import PrometheusServer, prometheus
from tests.operate.queries import expression
from tests.operate.rules import write_faster

SCRAPE_S = 0.5
FACTOR = 60
"""A minute of the rules takes a second, which is two scrapes."""
DATA_S = 60.0
ALERT_S = 60.0
READY_S = "60"
BOARDS = ("kvbridge-overview", "kvbridge-fleet", "kvbridge-pools")
EMPTY_WHEN_WELL = re.compile("ALERTS|quarantine|refused|failures|admission_wait|kvbridge_router_")
"""No router runs here."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    build("--wheel", str(copy_checkout(tmp_path_factory.mktemp("source"))), "--outdir", str(folder))
    return install(next(folder.glob("*.whl")), folder / "venv")


@dataclass(frozen=True)
class Address:
    """A daemon, for Prometheus."""

    url: str


def test_from_a_wheel_to_an_alert_and_back(installed: Installed, tmp_path: Path) -> None:
    with short_folder() as folder:
        tried = TriedCluster(folder / "c", (installed.program("kvbridge"),), stranger_environment())
        assert f"next: kvbridge up {tried.folder}" in tried.init()
        with tried.up() as up:
            assert tried.run("wait", str(tried.folder), "--timeout", READY_S).returncode == 0
            faster = write_faster(tmp_path, FACTOR, sorted((installed.share / "prometheus").glob("[ar]*.yaml")))
            with (
                prometheus(map(Address, map(tried.url, tried.ports)), scrape_s=SCRAPE_S, rule_files=faster) as server,
                browser() as tab,
            ):
                tried.move_a_request()
                the_page_shows_a_room(tab, tried)
                boards_have_data(server, installed.share / "grafana")
                a_daemon_dies_and_comes_back(server, tried, installed.share / "docs")
            up.send_signal(signal.SIGINT)
            assert up.wait(END_S) == 1, "a daemon had died"
        assert "Traceback" not in tried.said("")


def the_page_shows_a_room(tab: Browser, tried: TriedCluster) -> None:
    answer = httpx.post(f"{tried.url('bootstrap')}/v1/requests", json={"prompt_tokens": 1000}, trust_env=False)
    assert answer.status_code == 201, answer.text
    room = answer.json()["room"]
    tab.size(1280)
    tab.open(tried.url("decode") + "/")
    tab.live()
    assert tab.text("#readiness") == "Ready"
    tab.until("the room", lambda: str(room) in tab.texts(".rooms tbody button"))
    assert tab.errors() == []
    gone = httpx.delete(f"{tried.url('bootstrap')}/v1/requests/{room}", trust_env=False)
    assert gone.is_success, gone.text


def boards_have_data(server: PrometheusServer, boards: Path) -> None:
    lacking = {expr for board in BOARDS for expr in queries(json.loads((boards / f"{board}.json").read_text()))}
    assert len(lacking) > 20

    def look() -> bool:
        lacking.difference_update({expr for expr in lacking if server.query(expr)})
        return not lacking

    try:
        eventually("data", look, DATA_S, pause_s=SCRAPE_S)
    except AssertionError:
        raise AssertionError("no data:\n" + "\n".join(sorted(lacking))) from None


def queries(board: dict) -> Iterator[str]:
    """Of each panel of a board that has data when all is well."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            if not EMPTY_WHEN_WELL.search(target["expr"]):
                yield expression(target["expr"])


def a_daemon_dies_and_comes_back(server: PrometheusServer, tried: TriedCluster, docs: Path) -> None:
    eventually("quiet", lambda: not server.firing(), ALERT_S, pause_s=SCRAPE_S)
    pid = json.loads((tried.folder / "run" / "decode" / "daemon.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    summary = f"127.0.0.1:{tried.ports['decode']} does not answer"

    def told() -> dict[str, str] | None:
        """Of this one: on a busy machine another may have been too slow for a scrape."""
        found = server.firing().get("KvbridgeDaemonDown", {})
        return found if found.get("summary") == summary else None

    notes = eventually("the alert", told, ALERT_S, pause_s=SCRAPE_S)
    file, _, anchor = notes["runbook_url"].partition("#")
    sections = (docs / Path(file).name).read_text().split("\n## ")
    (section,) = (each for each in sections if each.lower().startswith(f"{anchor}\n"))
    assert "**Cure.** Start it again" in section
    again = re.search(r"to have it again: kvbridge (\w+) --config (\S+)", tried.said("to have it again"))
    assert again
    with running(tried, again[1], "--config", again[2]):
        assert tried.run("wait", str(tried.folder), "--timeout", READY_S).returncode == 0
        eventually("all resolved", lambda: not server.firing(), ALERT_S, pause_s=SCRAPE_S)
        tried.move_a_request()


@contextmanager
def running(tried: TriedCluster, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is told to end, and does, with its context."""
    with tried.start(*arguments, said=tried.folder / "again") as process:
        try:
            yield process
        finally:
            process.terminate()
            assert process.wait(END_S) == 0

"""A real Prometheus of a test's own: its configuration, process and HTTP API.

Every wait has a deadline; the port is chosen by the system; `stop` leaves nothing.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from kvbridge.daemon.children import ChildProcess
from tests.helpers.cluster import eventually
from tests.operate.rules import RULE_FILES, command

CALL_S = 20.0
START_S = 60.0

Sample = dict[str, Any]


class Scraped(Protocol):
    """A daemon, as far as Prometheus knows it."""

    @property
    def url(self) -> str:
        """Where it serves now."""


class PrometheusServer:
    """One server that scrapes daemons every `scrape_s` seconds, and evaluates rules as often."""

    def __init__(self, folder: Path, *, scrape_s: float, rule_files: Sequence[Path] = RULE_FILES) -> None:
        self._folder = folder
        self._targets = folder / "targets.json"
        self._process = ChildProcess("prometheus", folder / "prometheus.log", ends_with_us=True)
        interval = f"{round(scrape_s * 1000)}ms"
        self._config = {
            "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
            "rule_files": [str(path) for path in rule_files],
            "scrape_configs": [
                {"job_name": "kvbridge", "file_sd_configs": [{"files": [str(self._targets)], "refresh_interval": "1s"}]}
            ],
        }
        self._client = httpx.Client(timeout=CALL_S, trust_env=False, verify=False)
        self.url = ""

    def start(self, daemons: Iterable[Scraped]) -> None:
        """Start, and scrape these daemons."""
        watched = list(daemons)
        self.watch(watched)
        file = self._folder / "prometheus.yaml"
        file.write_text(yaml.safe_dump(self._config))
        self._process.launch(
            [
                command("prometheus"),
                f"--config.file={file}",
                f"--storage.tsdb.path={self._folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
                f"--web.console.templates={self._folder}",
                f"--web.console.libraries={self._folder}",
            ]
        )
        self.url = eventually("prometheus listens", self._address, START_S)
        eventually("every daemon scraped", lambda: len(self._up()) == len(watched), START_S)

    def watch(self, daemons: Iterable[Scraped]) -> None:
        """Scrape these from now on, at the addresses that they have now."""
        addresses = [daemon.url.removeprefix("http://") for daemon in daemons]
        partial = self._targets.with_suffix(".tmp")
        partial.write_text(json.dumps([{"targets": addresses}]))
        partial.rename(self._targets)

    def query(self, expr: str) -> list[Sample]:
        """Evaluate now; the samples that are numbers. Fails when Prometheus says that the expression is wrong."""
        answer = self._client.get(f"{self.url}/api/v1/query", params={"query": expr}).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        return [sample for sample in answer["data"]["result"] if not math.isnan(float(sample["value"][1]))]

    def rules(self) -> list[dict[str, Any]]:
        """Every rule as Prometheus has evaluated it last."""
        groups = self._client.get(f"{self.url}/api/v1/rules").json()["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def firing(self) -> dict[str, dict[str, str]]:
        """Alerts that fire now: name to annotations (of one of its kind)."""
        found = self._client.get(f"{self.url}/api/v1/alerts").json()["data"]["alerts"]
        return {alert["labels"]["alertname"]: alert["annotations"] for alert in found if alert["state"] == "firing"}

    def _up(self) -> list[Sample]:
        answer = self._client.get(f"{self.url}/-/ready")
        return self.query("up == 1") if answer.is_success else []

    def stop(self) -> None:
        """End the process."""
        self._client.close()
        self._process.stop()

    def _address(self) -> str:
        self._process.check_running()
        found = re.search(r'msg="Listening on" address=(\S+)', self._process.log(1000))
        return f"http://{found[1]}" if found else ""


@contextmanager
def prometheus(
    daemons: Iterable[Scraped], *, scrape_s: float = 1.0, rule_files: Sequence[Path] = RULE_FILES
) -> Iterator[PrometheusServer]:
    """A running server; ended, and its folder removed, afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    server = PrometheusServer(folder, scrape_s=scrape_s, rule_files=rule_files)
    try:
        server.start(daemons)
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)

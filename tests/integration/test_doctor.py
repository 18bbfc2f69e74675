"""The doctor beside a pair that runs: it finds the daemons, reaches them, and does not disturb them."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.cluster import Cluster, DaemonProcess, cluster

LIMIT_S = 90.0


def doctor(daemon: DaemonProcess, *flags: str) -> tuple[int, list[dict[str, Any]]]:
    config = str(daemon.folder / "config.yaml")
    command = [sys.executable, "-m", "kvbridge", "doctor", "--config", config, "--role", daemon.role, "--json", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.stdout, ended.stderr
    return ended.returncode, json.loads(ended.stdout)["findings"]


def said_by(check: str, findings: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["level"], each["what"]) for each in findings if each["check"] == check]


def refused(live: Cluster) -> str:
    lines = [line for line in live.prefill.log().splitlines() if "frame_refused" in line]
    # On a slow machine a message may come twice before it is acknowledged.
    return "\n".join(line for line in lines if json.loads(line)["kind"] != "duplicate")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pair_that_runs_is_found_reached_and_not_disturbed() -> None:
    with cluster({"preset": "tiny-v4"}, bootstrap={"directory": {"expire_after_s": 300}}) as live:
        _, findings = doctor(live.decode)
        assert not [
            each for each in findings if each["level"] == "breaks" and each["check"].startswith(("reach.", "network."))
        ]
        ((level, what),) = said_by("reach.control", findings)
        assert level == "fine"
        assert "prefill-0/node-0" in what
        assert "handshake not encrypted" in what
        ((level, what),) = said_by("reach.peers", findings)
        assert (level, "prefill-0/node-0" in what) == ("fine", True)
        assert ("warning", "no engine is attached") in said_by("running.node", findings)
        assert refused(live) == ""
        live.check_running()
        assert live.pair(100)["decode"]["instance"] == "decode-0"

        live.prefill.kill()
        code, findings = doctor(live.decode)
        assert code == 1
        assert [level for level, _ in said_by("reach.control", findings)] == ["breaks"]
        assert [level for level, _ in said_by("reach.peers", findings)] == ["breaks"]

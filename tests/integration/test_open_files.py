"""How many files a daemon may open: all that the system allows, whatever limit the shell that started it has."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from kvbridge.cli.local_cluster import DaemonProcess
from tests.helpers.cluster import daemon_config

pytestmark = pytest.mark.thorough


def limits(pid: int) -> tuple[str, str]:
    (line,) = [line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if line.startswith("Max open")]
    soft, hard = line.split()[3:5]
    return soft, hard


def started(folder: Path, ulimit: str) -> DaemonProcess:
    daemon = DaemonProcess("prefill", "prefill", folder)
    config = daemon_config(
        {"preset": "tiny-gqa"},
        instance="p",
        runtime_dir=daemon.runtime_dir,
        transport="local",
        pools={"device": {"full": 8}},
    )
    (folder / "config.yaml").write_text(json.dumps(config))
    command = f"ulimit {ulimit} && exec {sys.executable} -m kvbridge prefill --config {folder}/config.yaml"
    daemon.launch(["sh", "-c", command])
    return daemon


def test_a_daemon_raises_its_soft_limit_and_its_workers_have_it_too() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    daemon = started(folder, "-Sn 256 && ulimit -Hn 16384")
    try:
        daemon.wait_ready()
        assert limits(daemon.endpoint().pid) == ("16384", "16384")
        assert limits(daemon.get("/status")["ranks"][0]["pid"]) == ("16384", "16384")
        assert "connections_limited" not in daemon.log()
    finally:
        daemon.stop()
        shutil.rmtree(folder)

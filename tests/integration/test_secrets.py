"""Daemons that are given their secrets in every way, made to fail in every way, and searched for them afterwards."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from kvbridge.cli.main import app
from kvbridge.control.keys import generate_keys, write_keys
from tests.helpers import zygote
from tests.helpers.cluster import DaemonProcess, daemon_config, eventually
from tests.helpers.live_rooms import bearer, ends, frames_refused, http
from tests.helpers.raw_peers import RawDecode

pytestmark = pytest.mark.thorough

TOKENS = {
    "bootstrap": "in-a-variable-Zx0Y2n5cR8tK1wLp",
    "prefill": "in-the-file-itself-Ae9sDfGbJu7",
    "decode": "in-a-flag-q7VHm3Zx0Y2n5cR8tK1w",
    "to bootstrap": "in-a-token-file-and-wrong-5cR8tK",
}
POOLS = {"device": {"full": 8, "swa": 8, "request": 2}}


@dataclass
class Searched:
    folder: Path
    bootstrap: DaemonProcess
    prefill: DaemonProcess
    decode: DaemonProcess
    secrets: list[str] = field(default_factory=list)
    server_key: str = ""

    def all(self) -> tuple[DaemonProcess, ...]:
        return self.bootstrap, self.prefill, self.decode

    def headers(self, daemon: DaemonProcess) -> dict[str, str]:
        return bearer(TOKENS[str(daemon.role)])

    def clean(self, where: str, text: str) -> None:
        assert text, where
        for secret in self.secrets:
            assert secret not in text, f"a secret shows in {where}"


def launch(daemon: DaemonProcess, *flags: str, **environment: str) -> None:
    daemon.folder.mkdir(parents=True)
    file = daemon.folder / "config.yaml"
    file.write_text(json.dumps(daemon.config))
    command = [sys.executable, "-m", "kvbridge", daemon.role, "--config", str(file), *daemon.arguments, *flags]
    daemon.launch(command, environment=environment)


@pytest.fixture(scope="module")
def executed() -> Iterator[None]:
    """A forked process would show the command line and the environment of the one that it was forked from."""
    with zygote.executed():
        yield


@pytest.fixture(scope="module")
def searched(executed: None) -> Iterator[Searched]:
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    prefill_keys, decode_keys = generate_keys(), generate_keys()
    write_keys(prefill_keys, folder / "p.key")
    write_keys(decode_keys, folder / "d.key")
    (folder / "token").write_text(TOKENS["to bootstrap"] + "\n")
    found = Searched(
        folder,
        *(DaemonProcess(role, role, folder / role[0]) for role in ("bootstrap", "prefill", "decode")),
        secrets=[*TOKENS.values(), prefill_keys.secret, decode_keys.secret],
        server_key=prefill_keys.public,
    )
    try:
        found.bootstrap.config = {"http": {"port": 0}, "telemetry": {"log_level": "debug", "log_format": "console"}}
        found.bootstrap.arguments = ("--endpoint-dir", str(found.bootstrap.runtime_dir))
        launch(found.bootstrap, KVBRIDGE_HTTP__TOKEN=TOKENS["bootstrap"], KVBRIDGE_DAEMONS__TOKEN=TOKENS["prefill"])
        link = {"url": found.bootstrap.url, "token_file": str(folder / "token"), "heartbeat_interval_s": 0.2}
        for daemon, form in ((found.prefill, "console"), (found.decode, "json")):
            curve = {"secret_key_file": str(folder / f"{daemon.role[0]}.key")}
            daemon.config = daemon_config(
                {"preset": "tiny-v4"},
                instance=f"{daemon.role}-0",
                runtime_dir=daemon.runtime_dir,
                transport="local",
                pools=POOLS | ({"host": {"pages": 8}} if daemon is found.decode else {}),
                bootstrap=link,
                control={"curve": curve},
                telemetry={"log_level": "debug", "log_format": form},
                timeouts={"handshake_s": 1.0},
            )
        found.prefill.config["http"]["token"] = TOKENS["prefill"]
        launch(found.prefill, KVBRIDGE_TELEMETRY__LOG_LEVEL="debug")
        launch(found.decode, "--set", f"http.token={TOKENS['decode']}")
        for daemon in (found.prefill, found.decode):
            daemon.endpoint()
            eventually(f"{daemon.name} lacks nothing but bootstrap's consent", partial(refused_only, daemon))
        make_mistakes(found)
        yield found
    finally:
        for daemon in (found.decode, found.prefill, found.bootstrap):
            daemon.stop()
        shutil.rmtree(folder, ignore_errors=True)


def refused_only(daemon: DaemonProcess) -> bool:
    """Whether a node could admit rooms, and is not ready only because bootstrap would not have it."""
    reasons = http("GET", daemon, "/ready").json()["reasons"]
    return len(reasons) == 1 and reasons[0].startswith("bootstrap refuses this node: ")


def make_mistakes(found: Searched) -> None:
    """Wrong tokens, wrong keys, requests that cannot be, rooms that fail, a bootstrap that refuses."""
    for daemon in found.all():
        basic = {"Authorization": f"Basic {TOKENS['prefill']}"}
        for headers in ({}, bearer("x"), bearer(TOKENS["to bootstrap"]), basic):
            assert http("GET", daemon, "/status", headers=headers).status_code == 401
        right = found.headers(daemon)
        for content in (b"{", b'{"prompt_tokens": "many"}', b"[" * 10_000):
            answer = http("POST", daemon, "/v1/requests", content=content, headers=right)
            assert answer.status_code == 400
            found.clean("a problem", answer.text)
        assert http("GET", daemon, "/nowhere", headers=right).status_code == 404
    control = found.prefill.endpoint().control
    assert control is not None
    with RawDecode(control.endpoint, keys=generate_keys(), server_key=found.server_key):
        headers = found.headers(found.prefill)
        eventually("a stranger", lambda: frames_refused(found.prefill, "unauthenticated", headers))
    address = {"endpoint": control.endpoint, "public_key": control.public_key}  # whose list does not name decode's key
    body = {"prompt_tokens": 100, "prefill": [address]}
    headers = found.headers(found.decode)
    room = http("POST", found.decode, "/v1/requests", json=body, headers=headers).json()["room"]
    ends(found.decode, room, "failed", "deadline", headers)


def test_secrets_are_nowhere_to_be_seen(searched: Searched) -> None:
    """A flag shows in the process list for as long as the process lives: tokens belong into files. Workers get nothing."""
    for daemon in searched.all():
        assert daemon.process is not None
        searched.clean(f"the log of {daemon.name}", daemon.log_path.read_text())
        for path in ("/status", "/metrics", "/ready", "/health", "/version", "/openapi.json"):
            answer = http("GET", daemon, path, headers=searched.headers(daemon))
            searched.clean(f"{path} of {daemon.name}", answer.text + str(answer.headers))
        arguments = ["config", "show", "--role", daemon.role, "--config", str(daemon.folder / "config.yaml")]
        searched.clean(f"config show of {daemon.name}", CliRunner().invoke(app, arguments).output)
        process = psutil.Process(daemon.process.pid)
        if daemon is not searched.decode:
            searched.clean(f"the arguments of {daemon.name}", " ".join(process.cmdline()))
        for worker in process.children(recursive=True):
            searched.clean(f"the arguments of {daemon.name}'s worker", " ".join(worker.cmdline()))
            searched.clean(f"the environment of {daemon.name}'s worker", str(worker.environ()))
            assert not [name for name in worker.environ() if name.startswith("KVBRIDGE_")]
        files = [path for path in daemon.runtime_dir.iterdir() if path.is_file()]
        assert files
        for path in files:
            searched.clean(str(path), path.read_text())

"""A bootstrap, prefill and decode daemons as real processes on loopback, for integration tests, faults and benchmarks.

Every wait has a deadline; every port is chosen by the system; leaving the context ends every process and shows the log of one
that failed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvbridge.daemon.announce import DaemonEndpoint, read_endpoint

START_S = 60.0
STOP_S = 20.0


def eventually(what: str, look: Callable[[], Any], timeout_s: float = 20.0, pause_s: float = 0.02) -> Any:
    """Return the first true value of `look`, or fail after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        found = look()
        if found:
            return found
        time.sleep(pause_s)
    raise AssertionError(f"{what}: not within {timeout_s} s")


@dataclass
class DaemonProcess:
    """One daemon and its folder: config, log, sockets."""

    role: str
    name: str
    folder: Path
    config: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    arguments: tuple[str, ...] = ()

    @property
    def runtime_dir(self) -> Path:
        """Where its sockets and its endpoint file are."""
        return self.folder / "run"

    @property
    def log_path(self) -> Path:
        return self.folder / "log.jsonl"

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.runtime_dir / "daemon.json").unlink(missing_ok=True)
        file = self.folder / "config.yaml"
        file.write_text(json.dumps(self.config))
        command = [sys.executable, "-m", "kvbridge", self.role, "--config", str(file), *self.arguments]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=clean_environment()
            )

    def endpoint(self) -> DaemonEndpoint:
        """Wait for its doors."""

        def look() -> DaemonEndpoint | None:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log()}")
            return read_endpoint(self.runtime_dir)

        return eventually(f"doors of {self.name}", look, START_S)

    @property
    def url(self) -> str:
        return self.endpoint().http_url

    def wait_ready(self) -> None:
        url = self.url
        last: list[str] = []

        def look() -> bool:
            if self.process is not None and self.process.poll() is not None:
                raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log()}")
            response = httpx.get(f"{url}/ready", timeout=5)
            last[:] = [response.text]
            return response.status_code == 200

        try:
            eventually(f"{self.name} ready", look, START_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; last answer {last}; log:\n{self.log()}") from error

    def log(self, lines: int = 60) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def get(self, path: str) -> Any:
        response = httpx.get(f"{self.url}{path}", timeout=10)
        response.raise_for_status()
        return response.json()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(STOP_S)

    def stop(self) -> int:
        """SIGTERM, then the exit code."""
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(STOP_S)
        return self.process.returncode


@dataclass
class Cluster:
    """All daemons of a test."""

    folder: Path
    bootstrap: DaemonProcess
    prefill: DaemonProcess
    decode: DaemonProcess
    others: list[DaemonProcess] = field(default_factory=list)

    def all(self) -> list[DaemonProcess]:
        return [self.bootstrap, self.prefill, self.decode, *self.others]

    def wait_ready(self) -> None:
        for daemon in (*self.all()[1:], self.bootstrap):  # bootstrap is ready when the others have told it
            daemon.wait_ready()

    def pair(self, prompt_tokens: int, **fields: Any) -> dict[str, Any]:
        """Ask bootstrap for a pair; returns the ticket."""
        body = {"prompt_tokens": prompt_tokens, **fields}
        response = httpx.post(f"{self.bootstrap.url}/v1/requests", json=body, timeout=20)
        assert response.status_code == 201, response.text
        return response.json()


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of kvbridge, so that tests do not depend on them."""
    return {key: value for key, value in os.environ.items() if not key.startswith("KVBRIDGE_")}


def daemon_config(
    model: Mapping[str, Any], *, instance: str, runtime_dir: Path, transport: str, pp: int = 1, tp: int = 1, **more: Any
) -> dict[str, Any]:
    """A daemon's configuration with free ports."""
    return {
        "instance": instance,
        "model": dict(model),
        "parallelism": {"pp_size": pp, "tp_size": tp},
        "transports": transport_section(transport),
        "http": {"port": 0},
        "control": {"bind": "tcp://127.0.0.1:0"},
        "runtime_dir": str(runtime_dir),
        "telemetry": {"log_format": "json"},
        **more,
    }


def transport_section(transport: str) -> dict[str, Any]:
    """The `transports` section for one backend on loopback."""
    return (
        {"order": [transport], "nixl": {"ucx_tls": "tcp", "ucx_net_devices": "lo"}}
        if transport == "nixl"
        else {"order": [transport]}
    )


@contextmanager
def cluster(
    model: Mapping[str, Any],
    *,
    transport: str = "local",
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    pages: Mapping[str, int] | None = None,
    host_pages: int = 64,
    prefill_pp: int = 1,
    prefill_tp: int = 1,
    decode_pp: int = 1,
    decode_tp: int = 1,
    wait: bool = True,
) -> Iterator[Cluster]:
    """Start bootstrap, one prefill and one decode daemon; end them all at exit."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    device = dict(pages or {"full": 64, "swa": 16, "request": 8})
    bootstrap = DaemonProcess(
        "bootstrap", "bootstrap", folder / "b", {"http": {"port": 0}, "telemetry": {"log_format": "json"}}
    )
    bootstrap.arguments = ("--endpoint-dir", str(bootstrap.runtime_dir))
    started = [bootstrap]
    try:
        bootstrap.start()
        url = bootstrap.url
        link = {"bootstrap": {"url": url, "heartbeat_interval_s": 0.5}}
        p = DaemonProcess("prefill", "prefill", folder / "p", {})
        p.config = daemon_config(
            model,
            instance="prefill-0",
            runtime_dir=p.runtime_dir,
            transport=transport,
            pp=prefill_pp,
            tp=prefill_tp,
            pools={"device": device},
            **link,
        ) | dict(prefill or {})
        d = DaemonProcess("decode", "decode", folder / "d", {})
        host: dict[str, Any] = {"pages": host_pages}
        d.config = daemon_config(
            model,
            instance="decode-0",
            runtime_dir=d.runtime_dir,
            transport=transport,
            pp=decode_pp,
            tp=decode_tp,
            pools={"device": device, "host": host},
            **link,
        ) | dict(decode or {})
        for daemon in (p, d):
            started.append(daemon)
            daemon.start()
        made = Cluster(folder, bootstrap, p, d)
        if wait:
            made.wait_ready()
        yield made
        started = made.all()
    finally:
        for daemon in reversed(started):
            daemon.stop()
        shutil.rmtree(folder, ignore_errors=True)

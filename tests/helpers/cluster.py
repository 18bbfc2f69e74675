"""A bootstrap, prefill and decode daemons as real processes on loopback, and daemons that a test changes before they start."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from subprocess import Popen
from typing import Any

from kvbridge.api.directory import PairRequest
from kvbridge.cli.local_cluster import (
    START_S,
    Cluster as ClusterOfProcesses,
    DaemonProcess,
    daemon_config,
    plan_cluster,
    transport_section,
)
from tests.helpers.faulty_transport import FaultySettings
from tests.helpers.zygote import FORKED, installed

__all__ = ["START_S", "Cluster", "DaemonProcess", "cluster", "daemon_config", "eventually", "transport_section"]


def eventually(what: str, look: Callable[[], Any], timeout_s: float = 60.0, pause_s: float = 0.02) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        found = look()
        if found:
            return found
        time.sleep(pause_s)
    raise AssertionError(f"{what}: not within {timeout_s} s")


class Cluster(ClusterOfProcesses):
    def pair(self, prompt_tokens: int, **more: Any) -> dict[str, Any]:
        return self.ticket(PairRequest(prompt_tokens=prompt_tokens, **more)).model_dump(mode="json")


def live_rows_only(transport: str) -> dict[str, Any]:
    """Return the section of a prefill daemon that sends nothing but live rows, also where dead bytes would save operations."""
    return {"transports": transport_section(transport) | {"mooncake": {"operation_cost_bytes": 0}}}


@contextmanager
def cluster(
    model: Mapping[str, Any],
    *,
    transport: str = "local",
    prefill: Mapping[str, Any] | None = None,
    decode: Mapping[str, Any] | None = None,
    pages: Mapping[str, int] | None = None,
    host_pages: int = 64,
    device_layout: str | None = None,
    prefill_pp: int = 1,
    prefill_tp: int = 1,
    decode_pp: int = 1,
    decode_tp: int = 1,
    bootstrap: Mapping[str, Any] | None = None,
    faults: Mapping[str, Any] | None = None,
    wait: bool = True,
    change: Callable[[DaemonProcess], DaemonProcess] | None = None,
) -> Iterator[Cluster]:
    """Start three daemons. `faults`: of prefill's transports; `change`: makes another of each daemon (`mutated`)."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    pools = {"device": dict(pages or {"full": 64, "swa": 16, "request": 8})}
    pools |= {"device_layout": device_layout} if device_layout else {}
    common = {"model": model, "transport": transport}
    planned = plan_cluster(
        folder,
        bootstrap=dict(bootstrap or {}),
        prefill=daemon_config(**common, instance="prefill-0", pp=prefill_pp, tp=prefill_tp, pools=pools)
        | dict(prefill or {}),
        decode=daemon_config(
            **common, instance="decode-0", pp=decode_pp, tp=decode_tp, pools=pools | {"host": {"pages": host_pages}}
        )
        | dict(decode or {}),
    )
    if faults:
        planned.prefill = mutated(planned.prefill, worker_code=faulty_worker(faults))
    made = Cluster(**{field.name: getattr(planned, field.name) for field in fields(planned)})
    if change is not None:
        made.bootstrap, made.prefill, made.decode = map(change, made.all())
    try:
        made.start()
        if wait:
            made.wait_ready()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


_AS_DAEMON = "from kvbridge.cli.main import main; main()"
_AS_WORKER = """
import os, sys
from kvbridge.worker.process import main
code = main()
sys.stderr.flush()
os._exit(code)
"""
_WORKER_TOO = """
import sys
from kvbridge import processes
of_module = processes.module_command
def module_command(module, *arguments):
    if module != "kvbridge.worker.process":
        return of_module(module, *arguments)
    return [sys.executable, "-c", {code!r}, *arguments]
processes.module_command = module_command
"""


class MutatedDaemon(DaemonProcess):
    """A daemon process that runs code of a test first, or whose rank workers do."""

    daemon_code = ""
    worker_code = ""

    def launch(
        self, command: Sequence[str], *, piped: bool = False, environment: Mapping[str, str] | None = None
    ) -> Popen[bytes]:
        assert list(command[1:4]) == ["-P", "-m", "kvbridge"]
        code = FORKED + self.daemon_code
        if self.worker_code:
            code += _WORKER_TOO.format(code=FORKED + self.worker_code + _AS_WORKER)
        return super().launch([command[0], "-c", code + _AS_DAEMON, *command[4:]], piped=piped, environment=environment)


def faulty_worker(faults: Mapping[str, Any]) -> str:
    return installed("faulty_transport", FaultySettings.model_validate(faults).model_dump_json())


def mutated(daemon: DaemonProcess, *, daemon_code: str = "", worker_code: str = "") -> DaemonProcess:
    if not daemon_code and not worker_code:
        return daemon
    changed = MutatedDaemon(daemon.role, daemon.name, daemon.folder, daemon.config, ends_with_us=True)
    changed.arguments = daemon.arguments
    changed.daemon_code, changed.worker_code = daemon_code, worker_code
    return changed

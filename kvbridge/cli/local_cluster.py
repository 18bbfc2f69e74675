"""Bootstrap, a prefill and a decode daemon as child processes on loopback, with free ports: for the demo, tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvbridge.api.client import BlockingClient
from kvbridge.api.directory import PairReport, PairRequest, Ticket
from kvbridge.api.endpoint_file import ENDPOINT_FILE, DaemonEndpoint, read_endpoint
from kvbridge.api.rooms import RoomReport
from kvbridge.api.status import Readiness
from kvbridge.core.errors import BridgeError, DeadlineError, PeerError, RoomFailedError
from kvbridge.pool.memory.leftovers import sweep
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.processes import ChildProcess, module_command, stop_all, wait_for

START_S = 60.0
CALL_S = 20.0

Section = dict[str, Any]
"""A section of a configuration file."""


class DaemonProcess(ChildProcess):
    """One daemon and its folder: configuration, log, sockets."""

    def __init__(
        self, role: str, name: str, folder: Path, config: Section | None = None, *, ends_with_us: bool = False
    ) -> None:
        super().__init__(name, folder / "log.jsonl", ends_with_us=ends_with_us)
        self.role, self.folder = role, folder
        self.config: Section = config or {}
        self.arguments: tuple[str, ...] = ()
        self.last_answer = "none"
        """Its last answer about its readiness."""

    @property
    def runtime_dir(self) -> Path:
        """Directory of its sockets and its endpoint file."""
        return self.folder / "run"

    def start(self) -> None:
        """Write the configuration and start the process, for the first time or again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.runtime_dir / ENDPOINT_FILE).unlink(missing_ok=True)
        file = self.folder / "config.yaml"
        file.write_text(json.dumps(self.config, indent=2) + "\n")  # every JSON document is YAML
        self.launch(module_command("kvbridge", self.role, "--config", str(file), *self.arguments))

    def endpoint(self, timeout_s: float = START_S) -> DaemonEndpoint:
        """Wait until its HTTP API answers, and return its endpoints. Raises PeerError when it ends, DeadlineError."""
        found = lambda: read_endpoint(self.runtime_dir)  # noqa: E731 - one line, used once
        return wait_for(f"endpoint of {self.name}", found, timeout_s=timeout_s, watched=[self])

    @property
    def url(self) -> str:
        """URL of its HTTP API."""
        return self.endpoint().http_url

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON document at a path of its HTTP API."""
        return calls().ask(dict[str, Any], "GET", f"{self.url}{path}")

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Wait until it can admit rooms. Raises what `wait_all_ready` does."""
        wait_all_ready([self], timeout_s=timeout_s)

    def is_ready(self) -> bool:
        """Whether it serves and can admit rooms now."""
        endpoint = read_endpoint(self.runtime_dir)
        if endpoint is None:
            return False
        try:
            found = calls().ask(Readiness, "GET", f"{endpoint.http_url}/ready")
        except BridgeError as error:
            self.last_answer = str(error)
            return False
        self.last_answer = found.model_dump_json()
        # A node that has lost bootstrap is ready, with this as a reason.
        return found.ready and not found.reasons


@dataclass
class Cluster:
    """One bootstrap, prefill and decode daemon, and the daemons that a test adds."""

    folder: Path
    bootstrap: DaemonProcess
    prefill: DaemonProcess
    decode: DaemonProcess
    others: list[DaemonProcess] = field(default_factory=list)

    def all(self) -> list[DaemonProcess]:
        """Every daemon."""
        return [self.bootstrap, self.prefill, self.decode, *self.others]

    def start(self) -> None:
        """Start every process. Returns while nodes still start."""
        self.bootstrap.start()
        url = self.bootstrap.url
        for daemon in self.all()[1:]:
            daemon.config = {"bootstrap": {"url": url, "heartbeat_interval_s": 0.5}, **daemon.config}
            daemon.start()

    def wait_ready(self) -> None:
        """Wait until requests can be paired. Raises what `wait_all_ready` does."""
        wait_all_ready(self.all(), timeout_s=START_S)

    def check_running(self) -> None:
        """Raise PeerError when a daemon has ended."""
        for daemon in self.all():
            daemon.check_running()

    def ticket(self, request: PairRequest) -> Ticket:
        """Ask bootstrap for a pair. Raises CapacityError when there is none now."""
        return calls().ask(Ticket, "POST", f"{self.bootstrap.url}/v1/requests", body=request)

    def cancel(self, room: int, reason: str) -> None:
        """Cancel a paired room, and wait until its pages are free on both ends."""
        calls().ask(PairReport, "DELETE", f"{self.bootstrap.url}/v1/requests/{room}", params={"reason": reason})
        for daemon in (self.prefill, self.decode):
            wait_ended(daemon, room)

    def stop(self, *, timeout_s: float = 20.0, force_after_s: float | None = None) -> None:
        """End nodes, then bootstrap, and remove the files of killed ones. Harmless when stopped.

        Open rooms keep daemons draining; `force_after_s` cuts that short, and ends all of them together.
        """
        nodes = self.all()[1:]
        if force_after_s is None:
            stop_all(nodes, timeout_s=timeout_s)
        stop_all(self.all(), timeout_s=timeout_s, hurry_after_s=force_after_s)
        sweep([DEFAULT_DIRECTORY])


LOG_JSON: Final[Section] = {"telemetry": {"log_format": "json"}}


def plan_cluster(
    folder: Path, *, prefill: Section, decode: Section, bootstrap: Section | None = None, ends_with_us: bool = False
) -> Cluster:
    """Return a cluster in `folder`, not started, from the configurations of its daemons (`daemon_config`).

    Socket paths are long: keep the folder's path short. `ends_with_us`: daemons get SIGTERM when the thread that starts them
    ends.
    """

    def daemon(role: str, name: str, config: Section) -> DaemonProcess:
        made = DaemonProcess(role, name, folder / role[0], config, ends_with_us=ends_with_us)
        if role == "bootstrap":
            made.arguments = ("--endpoint-dir", str(made.runtime_dir))
        else:
            made.config = {"runtime_dir": str(made.runtime_dir), **config}
        return made

    return Cluster(
        folder,
        daemon("bootstrap", "bootstrap", {"http": {"port": 0}, **LOG_JSON, **(bootstrap or {})}),
        daemon("prefill", "the prefill daemon", prefill),
        daemon("decode", "the decode daemon", decode),
    )


def daemon_config(
    model: Mapping[str, Any],
    *,
    instance: str,
    transport: str,
    pp: int = 1,
    tp: int = 1,
    runtime_dir: Path | None = None,
    **more: Any,  # noqa: ANN401 - sections of the file
) -> Section:
    """Return a node daemon's configuration on loopback with free ports; `more` replaces sections."""
    return {
        **({} if runtime_dir is None else {"runtime_dir": str(runtime_dir)}),
        "instance": instance,
        "model": dict(model),
        "parallelism": {"pp_size": pp, "tp_size": tp},
        "transports": transport_section(transport),
        "http": {"port": 0},
        **LOG_JSON,
        **more,
    }


def transport_section(transport: str) -> Section:
    """Return the `transports` section that allows one backend, on loopback."""
    section: Section = {"order": [transport]}
    if transport == "nixl":
        # By default UCX reads the peer's memory directly on one host, which needs rights that containers lack.
        section["nixl"] = {"ucx_tls": "tcp", "ucx_net_devices": "lo"}
    return section


@cache
def calls() -> BlockingClient:
    """Return the client for all daemons: making one costs tens of milliseconds, for certificates."""
    return BlockingClient(timeout_s=CALL_S, timeout_key="a limit of this command")


def wait_ended(daemon: DaemonProcess, room: int) -> None:
    """Wait until a room is over on a daemon. Raises RoomFailedError when it is not in time."""
    report = calls().ask(RoomReport, "GET", f"{daemon.url}/v1/requests/{room}", params={"wait": CALL_S / 2})
    if not report.state.final:
        raise RoomFailedError(f"room {room} is still '{report.state}' on {daemon.name} after {CALL_S / 2:g} s")


def wait_all_ready(
    daemons: Sequence[DaemonProcess], *, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Wait until all can admit rooms, and call `check` meanwhile.

    Raises PeerError when one ends, DeadlineError with their last answers and logs, and the errors of `check`.
    """
    waiting = list(daemons)

    def look() -> bool:
        check()
        waiting[:] = [daemon for daemon in waiting if not daemon.is_ready()]
        return not waiting

    try:
        wait_for("daemons ready", look, timeout_s=timeout_s, watched=daemons)
    except DeadlineError as error:
        said = [f"{each.name}: last answer {each.last_answer}; its log ends:\n{each.log()}" for each in waiting]
        raise DeadlineError("\n".join([str(error), *said])) from error


def check_workers(daemons: Iterable[DaemonProcess]) -> None:
    """Raise PeerError when a rank worker of a daemon does not work. A daemon that does not serve yet has none."""
    for daemon in daemons:
        if read_endpoint(daemon.runtime_dir) is None:
            continue
        try:
            ranks = daemon.get("/status")["ranks"]
        except BridgeError:
            continue  # `wait_for` watches its process
        for rank in ranks:
            if rank["error"]:
                raise PeerError(f"{daemon.name}: {rank['error']}")


def used_pages(daemon: DaemonProcess) -> dict[str, int]:
    """Return the pages of each space that are not available. Cached pages that nobody reads are available."""
    status = daemon.get("/status")
    pools, available = status["pools"], status["available_pages"]
    return {space: sum(map(int, states.values())) - int(available[space]) for space, states in pools.items()}

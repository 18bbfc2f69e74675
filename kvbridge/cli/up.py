"""`kvbridge up`: the cluster of a directory in the foreground, for trying. `kvbridge wait`: for scripts that need daemons."""

from __future__ import annotations

import importlib.metadata
import itertools
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.text import Text

from kvbridge.api.client import BlockingClient
from kvbridge.api.endpoint_file import read_endpoint
from kvbridge.api.status import Readiness
from kvbridge.cli.config import EXIT_FAILED, ROLES, DaemonRole, fail
from kvbridge.cli.signals import Interrupts
from kvbridge.config.endpoints import LogFormat
from kvbridge.config.loading import load_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.addresses import SERVER_URL
from kvbridge.core.errors import BridgeError, ConfigError, DeadlineError, PeerError
from kvbridge.daemon.memory import memory_directory
from kvbridge.pool.memory.leftovers import Verdict, sweep
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.processes import ChildProcess, module_command, wait_for

START_S = 60.0
LOOK_S, ASK_S = 0.1, 0.5
CALL_S, WAIT_CALL_S = 2.0, 5.0
QUIET_S = 15.0
"""Interval at which the reasons are printed while there is no pair."""
GRACE_S = 5.0
"""A daemon that was told to end is killed so long after its own limits."""
COLOURS = ("cyan", "green", "magenta", "yellow", "blue")
ROOT = Path(__file__).parents[2]


class ConfiguredDaemon(ChildProcess):
    """One daemon of the directory: its configuration file, its process, and its log."""

    def __init__(self, path: Path, role: DaemonRole) -> None:
        """Raises ConfigError for a file that is wrong."""
        super().__init__(path.stem, path.parent / "logs" / f"{path.stem}.log", ends_with_us=True)
        self.role, self.path = role, path
        try:
            config = load_config(role.schema, file=path, environment={}, roles=ROLES)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        assert isinstance(config, PrefillConfig | DecodeConfig | BootstrapConfig)
        http = config.http
        if not http.port:
            raise ConfigError(f"{path}: http.port is 0, a port that is chosen at each start: give it a number")
        self.config = config
        host = f"[{http.host}]" if ":" in http.host else http.host
        self.url = http.advertised(f"{'http' if http.tls_key_file is None else 'https'}://{host}:{http.port}")
        """URL of its HTTP API."""
        alone = path.parent / "run" / self.name
        self.endpoint_dir = alone if isinstance(config, BootstrapConfig) else config.runtime_dir
        timeouts = [getattr(config.timeouts, f"shutdown{part}_s", 0.0) for part in ("", "_rooms", "_close")]
        self.limit_s = sum(timeouts) + GRACE_S
        """Longest time that it may take to end."""
        self.told_to_end = False
        """Whether its end needs no report: it was told to end, or its end was reported."""
        self._shown_bytes = 0

    def start(self) -> None:
        """Start the process. Its log is of this run alone, and for people unless the configuration says otherwise."""
        self.log_path.unlink(missing_ok=True)
        command = module_command("kvbridge", self.role, "--config", str(self.path))
        if self.role is DaemonRole.BOOTSTRAP:
            command += ["--endpoint-dir", str(self.endpoint_dir)]
        if self.config.telemetry.log_format is LogFormat.AUTO:
            command += ["--set", "telemetry.log_format=console"]
        self.launch(command)

    @property
    def running_pid(self) -> int | None:
        """The process that runs with this configuration already."""
        endpoint = read_endpoint(self.endpoint_dir)
        return endpoint.pid if endpoint is not None and Path(f"/proc/{endpoint.pid}").exists() else None

    @property
    def serves(self) -> bool:
        """Whether the process at its address is this one, and not one that was there before."""
        endpoint = read_endpoint(self.endpoint_dir)
        return endpoint is not None and self.process is not None and endpoint.pid == self.process.pid

    @property
    def ended_in_peace(self) -> bool:
        """Whether it ended as told. Ctrl-C may have ended it before it had begun, or come before its start."""
        code = None if self.process is None else self.process.returncode
        return code == 0 or (self.told_to_end and code in {None, -signal.SIGTERM})

    def new_lines(self) -> list[str]:
        """Return the whole lines that it has logged since the last call."""
        if self.process is None:
            return []
        with self.log_path.open("rb") as log:
            log.seek(self._shown_bytes)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._shown_bytes += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


def read_cluster(folder: Path) -> list[ConfiguredDaemon]:
    """Return the daemons of ROLE.yaml and ROLE-ANYTHING.yaml, bootstrap first. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory; `kvbridge init {folder}` makes one that can be run")
    found = []
    for role in (DaemonRole.BOOTSTRAP, DaemonRole.PREFILL, DaemonRole.DECODE):
        paths = [*folder.glob(f"{role}.yaml"), *sorted(folder.glob(f"{role}-*.yaml"))]
        if not paths:
            raise ConfigError(f"{folder} has no {role}.yaml; `kvbridge init` writes one for each role")
        found += [ConfiguredDaemon(path, role) for path in paths]
    return found


def named_daemons(target: str) -> Iterator[tuple[str, ConfiguredDaemon | None]]:
    """Yield the URLs that a URL, a runtime directory or the directory of a cluster stands for. Raises ConfigError."""
    folder = Path(target)
    if target.startswith(("http://", "https://")):
        yield target.rstrip("/"), None
    elif "://" in target:
        raise ConfigError(f"'{target}' is neither a URL that begins with http:// or https:// nor a directory")
    elif not folder.is_dir() and ":" in target and re.fullmatch(SERVER_URL, f"http://{target}"):
        raise ConfigError(f"'{target}' is no directory; did you mean http://{target}?")
    elif folder.is_dir() and (endpoint := read_endpoint(folder)) is not None:
        yield endpoint.http_url, None
    else:
        yield from ((daemon.url, daemon) for daemon in read_cluster(folder))


def wait(
    targets: Annotated[
        list[str], typer.Argument(metavar="URL|DIR...", help="Daemons, as http://127.0.0.1:7900; or the DIR of `up`.")
    ],
    timeout_s: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Longest wait.")] = 60.0,
) -> None:
    """Wait until daemons are ready: all that are named, or the cluster of a directory.

    A node is ready when it can admit requests, bootstrap when it has a pair.

    Exit codes: 0: all are ready; 1: not in time (standard error says why);
    2: wrong arguments.
    """
    try:
        waiting = [url for target in targets for url, _ in named_daemons(target)]
    except BridgeError as error:
        fail(error)
    calls = BlockingClient(timeout_s=WAIT_CALL_S, timeout_key="a limit of this command")
    deadline_s = time.monotonic() + timeout_s
    next_word_s = time.monotonic() + QUIET_S
    while unready := {url: reason for url in waiting if (reason := why_not_ready(calls, url))}:
        waiting = list(unready)
        if time.monotonic() >= deadline_s:
            for url, reason in unready.items():
                typer.echo(f"{url} is not ready after {timeout_s:g} s: {reason}", err=True)
            raise typer.Exit(EXIT_FAILED)
        if time.monotonic() >= next_word_s:
            next_word_s = time.monotonic() + QUIET_S
            typer.echo("; ".join(f"{url} is not ready yet: {reason}" for url, reason in unready.items()), err=True)
        time.sleep(LOOK_S)


def why_not_ready(calls: BlockingClient, url: str) -> str:
    """Ask a daemon whether it can serve requests. Return why not; empty when it can."""
    try:
        found = calls.ask(Readiness, "GET", f"{url}/ready")
    except BridgeError as error:
        return str(error)
    return "" if found.ready else "; ".join(found.reasons) or "it gives no reason"


def up(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Its *.yaml are run; logs go to DIR/logs.")]) -> None:
    """Run the whole cluster of a directory that `kvbridge init` wrote, in the foreground.

    Runs ROLE.yaml and any ROLE-NAME.yaml, and shows their logs. Says when there is
    a pair, and what to try next. When a daemon dies, its last lines are shown and
    the others go on. Ctrl-C drains and ends all; once more: at once; a third time:
    by force.

    Exit codes: 0: all ended as told; 1: one did not, or could not start;
    2: a configuration is wrong.
    """
    try:
        daemons = read_cluster(folder.absolute())
        if running := [f"{each.name} (pid {pid})" for each in daemons if (pid := each.running_pid)]:
            fail(ConfigError(f"{folder} runs already: {', '.join(running)}"), EXIT_FAILED)
        (folder.absolute() / "logs").mkdir(exist_ok=True)
    except OSError as error:
        fail(ConfigError(f"{error.filename} cannot be made: {error.strerror}"))
    except BridgeError as error:
        fail(error)
    with Interrupts() as interrupts:
        run = ForegroundCluster(daemons, Console(highlight=False, soft_wrap=True), interrupts)
        try:
            run.start()
            run.watch()
        except DeadlineError as error:
            run.tell(str(error), "bold red")
        except PeerError:
            pass  # a daemon has ended: `run.end` prints it with the others' ends
        except KeyboardInterrupt:
            run.tell_draining()
        finally:
            interrupts.only_counted()
            run.end()
    if not all(each.ended_in_peace for each in daemons):
        raise typer.Exit(EXIT_FAILED)


class ForegroundCluster:
    """The daemons, from their start to their end."""

    def __init__(self, daemons: Sequence[ConfiguredDaemon], console: Console, interrupts: Interrupts) -> None:
        self._daemons, self._console, self._interrupts = daemons, console, interrupts
        self._bootstraps = [each for each in daemons if each.role is DaemonRole.BOOTSTRAP]
        self._nodes = [each for each in daemons if each.role is not DaemonRole.BOOTSTRAP]
        self._calls = BlockingClient(timeout_s=CALL_S, timeout_key="a limit of this command")
        self._begun_s = self._told_s = time.monotonic()
        self._was_ready = False
        self._lacking = "nothing is known yet"
        """The reasons why requests are not served."""

    def tell(self, text: str, style: str = "bold") -> None:
        """Print a line of our own among the lines of the daemons."""
        self._console.print(text, style=style, markup=False)

    def start(self) -> None:
        """Start bootstraps, and then nodes when all bootstraps serve. Raises PeerError when one ends, DeadlineError."""
        for daemon in (*self._bootstraps, *self._nodes):
            if daemon in self._nodes:
                serve = lambda: all(each.serves for each in self._bootstraps)  # noqa: E731 - one line, used once
                wait_for("bootstrap", serve, timeout_s=START_S, watched=self._bootstraps)
            with self._interrupts.held():
                daemon.start()

    def watch(self) -> None:
        """Show the daemons' logs until every daemon has ended, or one has ended before there was a pair."""
        for turn in itertools.count():
            ended = self._show()
            if len(ended) == len(self._daemons) or (ended and not self._was_ready):
                return
            if not turn % round(ASK_S / LOOK_S):
                self._ask()
            time.sleep(LOOK_S)

    def tell_draining(self) -> None:
        """Say that Ctrl-C has begun a drain, and how long it may take. The daemons log what they wait for."""
        running = [each for each in self._daemons if each.running]
        for each in self._daemons:
            each.told_to_end = True
        limit_s = max((each.limit_s for each in running), default=0.0)
        names = ", ".join(each.name for each in running) or "nothing runs yet"
        self.tell(f"told to end: {names}; at most {limit_s:g} s (once more: at once)")

    def end(self) -> None:
        """End nodes, then bootstraps. A second signal cuts their drain short; a third one, or their time limit, kills them."""
        for part in (self._nodes, self._bootstraps):
            running = [each for each in part if each.running]
            self._told_s = time.monotonic()
            deadline_s = self._told_s + max((each.limit_s for each in running), default=0.0)
            _terminate(running)
            at_once = False
            while any(each.running for each in running):
                if self._interrupts.more and not at_once:
                    at_once = True
                    deadline_s = time.monotonic() + GRACE_S
                    _terminate(running)  # which cuts their drain short
                if self._interrupts.more > 1 or time.monotonic() > deadline_s:
                    self._kill([each for each in running if each.running])
                self._show()
                if time.monotonic() - self._told_s >= QUIET_S:
                    self._told_s = time.monotonic()
                    left = ", ".join(each.name for each in running if each.running)
                    self.tell(f"still ending: {left} (once more: at once)")
                time.sleep(LOOK_S)
        self._show()

    def _kill(self, daemons: Sequence[ConfiguredDaemon]) -> None:
        """Kill daemons that do not end, and remove their files in shared memory."""
        for daemon in daemons:
            daemon.kill()
            self.tell(f"{daemon.name} did not end in time and was killed", "bold red")
        removed = [each for each in sweep(shared_directories(daemons)) if each.verdict is Verdict.REMOVED]
        if removed:
            size = decimal(sum(each.size_bytes for each in removed))
            self.tell(f"removed from shared memory: {len(removed)} files, {size}", "")

    def _show(self) -> list[ConfiguredDaemon]:
        """Show new lines and ends; return the daemons that have ended."""
        width = max(len(each.name) for each in self._daemons)
        for daemon, colour in zip(self._daemons, itertools.cycle(COLOURS), strict=False):
            prefix = Text(f"{daemon.name:{width}} | ", style=colour)
            for line in daemon.new_lines():
                self._console.print(prefix + Text(line))
        ended = [daemon for daemon in self._daemons if not daemon.running]
        for daemon in (each for each in ended if not each.told_to_end):
            daemon.told_to_end = True
            try:
                daemon.check_running()
            except PeerError as error:
                self.tell(str(error), "bold red")
            if self._was_ready:
                self.tell(f"the others go on; to start it again: kvbridge {daemon.role} --config {daemon.path}")
        return ended

    def _ask(self) -> None:
        reasons = {
            each.name: "not serving yet" if each.running and not each.serves else why_not_ready(self._calls, each.url)
            for each in self._daemons
        }
        lacking = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        if self._lacking and not lacking:
            again = "again " if self._was_ready else ""
            self.tell(f"ready {again}after {time.monotonic() - self._begun_s:.1f} s", "bold green")
            if not self._was_ready:
                self.tell(next_steps(self._daemons), "")
            self._was_ready = True
        elif lacking and (not self._lacking or time.monotonic() - self._told_s >= QUIET_S):
            still = "yet" if not self._was_ready else "any more"
            self.tell(f"not ready {still}: {lacking}", "bold yellow")
        elif lacking:
            return
        self._lacking, self._told_s = lacking, time.monotonic()


def _terminate(daemons: Sequence[ConfiguredDaemon]) -> None:
    for daemon in daemons:
        if daemon.running:
            daemon.told_to_end = True
            daemon.kill(signal.SIGCONT)  # a stopped process would not get SIGTERM
            daemon.kill(signal.SIGTERM)


def shared_directories(daemons: Sequence[ConfiguredDaemon]) -> list[Path]:
    """Return the directories of the daemons' files in shared memory."""
    found = [DEFAULT_DIRECTORY]
    for config in (daemon.config for daemon in daemons):
        if not isinstance(config, BootstrapConfig):
            found += [memory_directory(config), Path(config.transports.local.proof_directory)]
    return found


def next_steps(daemons: Sequence[ConfiguredDaemon]) -> str:
    """Return commands that move a request through the first pair, for another terminal."""
    bootstrap = daemons[0]
    prefill = next(each.config for each in daemons if isinstance(each.config, PrefillConfig))
    decode = next(each.config for each in daemons if isinstance(each.config, DecodeConfig))
    token = bootstrap.config.http.token_file
    shown = f' -H "authorization: Bearer $(head -n 1 {token})"' if token else ""
    body = '{"prompt_tokens": 1000, "max_new_tokens": 64}'
    read = 'import json, sys; print(json.load(sys.stdin)["room"])'
    return f"""try, in another terminal, a request and the two engines that serve it:
  room=$(curl -s -X POST {bootstrap.url}/v1/requests{shown} -H 'content-type: application/json' -d '{body}' \\
    | {sys.executable} -c '{read}')
  {sys.executable} {_example("decode_engine")} {decode.runtime_dir} $room &
  {sys.executable} {_example("prefill_engine")} {prefill.runtime_dir} $room 1000; wait
Ctrl-C drains and ends all"""


def _example(name: str) -> Path:
    """Return the path of an example: beside the installed files, or in the checkout."""
    file = f"{name}.py"
    installed = [each for each in importlib.metadata.files("kvbridge") or () if each.match(f"kvbridge/examples/{file}")]
    return Path(str(installed[0].locate())).resolve() if installed else ROOT / "examples" / file

"""`kvbridge up`: the cluster of a directory in the foreground, for trying. `kvbridge wait`: for scripts that need daemons."""

from __future__ import annotations

import importlib.metadata
import itertools
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.config.services import BootstrapConfig
from kvbridge.core.errors import BridgeError, ConfigError, DeadlineError, PeerError
from kvbridge.daemon.memory import memory_directory
from kvbridge.pool.memory.leftovers import Verdict, sweep
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from kvbridge.processes import ChildProcess, module_command, wait_for

START_S = 60.0
LOOK_S, ASK_S = 0.1, 0.5
CALL_S, WAIT_CALL_S = 2.0, 5.0
QUIET_S = 15.0
"""While there is no pair, the reasons are told at this interval."""
GRACE_S = 5.0
"""How long after its own limits a daemon that was told to end is killed."""
COLOURS = ("cyan", "green", "magenta", "yellow", "blue")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ConfiguredDaemon:
    """One file of the directory."""

    name: str
    """The file's, as `prefill` or `prefill-1`."""
    role: DaemonRole
    path: Path
    config: PrefillConfig | DecodeConfig | BootstrapConfig

    @property
    def url(self) -> str:
        """Where others reach its HTTP API."""
        http = self.config.http
        scheme = "http" if http.tls_key_file is None else "https"
        host = f"[{http.host}]" if ":" in http.host else http.host
        return http.advertised(f"{scheme}://{host}:{http.port}")


def read_cluster(folder: Path) -> list[ConfiguredDaemon]:
    """Return the daemons of ROLE.yaml and ROLE-ANYTHING.yaml, bootstrap first. Raises ConfigError for what is wrong or missing."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory; `kvbridge init {folder}` makes one that can be run")
    found = []
    for role in (DaemonRole.BOOTSTRAP, DaemonRole.PREFILL, DaemonRole.DECODE):
        paths = [*folder.glob(f"{role}.yaml"), *sorted(folder.glob(f"{role}-*.yaml"))]
        if not paths:
            raise ConfigError(f"{folder} has no {role}.yaml; `kvbridge init` writes one for each role")
        found += [_read(path, role) for path in paths]
    return found


def _read(path: Path, role: DaemonRole) -> ConfiguredDaemon:
    try:
        config = load_config(role.schema, file=path, environment={}, roles=ROLES)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    assert isinstance(config, PrefillConfig | DecodeConfig | BootstrapConfig)
    if not config.http.port:
        raise ConfigError(f"{path}: http.port is 0, a port that is chosen at each start: give it a number")
    return ConfiguredDaemon(path.stem, role, path, config)


def wait(
    targets: Annotated[
        list[str], typer.Argument(metavar="URL|DIR...", help="Daemons, as http://127.0.0.1:7900; or what `up` runs.")
    ],
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0, metavar="SECONDS", help="Wait at most so long.")
    ] = 60.0,
) -> None:
    """Wait until daemons are ready: all that are named, or the cluster of a directory.

    A node is ready when it can admit requests, bootstrap when it has a pair.

    Exit codes: 0: all are ready; 1: not in time (standard error says why);
    2: wrong arguments.
    """
    try:
        waiting = [url for target in targets for url in _urls(target)]
    except BridgeError as error:
        fail(error)
    calls = BlockingClient(timeout_s=WAIT_CALL_S, timeout_key="a limit of this command")
    deadline_s = time.monotonic() + timeout_s
    next_word_s = time.monotonic() + QUIET_S
    while True:
        unready = {url: reason for url in waiting if (reason := why_not_ready(calls, url))}
        if not unready:
            return
        if time.monotonic() >= deadline_s:
            break
        waiting = list(unready)
        if time.monotonic() >= next_word_s:
            next_word_s = time.monotonic() + QUIET_S
            typer.echo("; ".join(f"{url} is not ready yet: {reason}" for url, reason in unready.items()), err=True)
        time.sleep(LOOK_S)
    for url, reason in unready.items():
        typer.echo(f"{url} is not ready after {timeout_s:g} s: {reason}", err=True)
    raise typer.Exit(EXIT_FAILED)


def why_not_ready(calls: BlockingClient, url: str) -> str:
    """Ask a daemon whether it can serve requests; return why not, nothing when it can."""
    try:
        found = calls.ask(Readiness, "GET", f"{url}/ready")
    except BridgeError as error:
        return str(error)
    return "" if found.ready else "; ".join(found.reasons) or "it gives no reason"


def _urls(target: str) -> list[str]:
    if target.startswith(("http://", "https://")):
        return [target.rstrip("/")]
    if "://" in target:
        raise ConfigError(f"'{target}' is neither a URL that begins with http:// or https:// nor a directory")
    return [daemon.url for daemon in read_cluster(Path(target))]


def up(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The configurations; logs go to DIR/logs.")],
) -> None:
    """Run the whole cluster of a directory that `kvbridge init` wrote, in the foreground.

    Runs ROLE.yaml and any ROLE-NAME.yaml, and shows what they log. Says when
    there is a pair, and what to try next. A daemon that dies is told with its last
    lines, and the others go on. Ctrl-C drains and ends all; once more: at once;
    a third time: by force.

    Exit codes: 0: all ended in peace; 1: one did not, or could not start;
    2: a configuration is wrong.
    """
    try:
        daemons = read_cluster(folder.absolute())
        (folder.absolute() / "logs").mkdir(exist_ok=True)
    except OSError as error:
        fail(ConfigError(f"{error.filename} cannot be made: {error.strerror}"))
    except BridgeError as error:
        fail(error)
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(each.name) for each in daemons)
    shown = [
        ShownDaemon(each, console, Text(f"{each.name:{width}} | ", style=colour))
        for each, colour in zip(daemons, itertools.cycle(COLOURS), strict=False)
    ]
    with Interrupts() as interrupts:
        run = ForegroundCluster(shown, console, interrupts)
        try:
            run.start()
            run.watch()
        except DeadlineError as error:
            console.print(str(error), style="bold red", markup=False)
        except PeerError:
            pass  # a daemon that has ended, which is told with the others' ends
        except KeyboardInterrupt:
            run.tell_draining()
        finally:
            interrupts.only_counted()
            run.end()
    if not all(each.ended_in_peace for each in shown):
        raise typer.Exit(EXIT_FAILED)


class ShownDaemon(ChildProcess):
    """One daemon, its log, and how much of the log has been shown."""

    def __init__(self, configured: ConfiguredDaemon, console: Console, prefix: Text) -> None:
        super().__init__(configured.name, configured.path.parent / "logs" / f"{configured.name}.log", ends_with_us=True)
        self.configured = configured
        self.told_to_end = False
        """Whether its end is no news."""
        self._console = console
        self._prefix = prefix
        self._shown_bytes = 0

    def start(self) -> None:
        """Start the process; its log is of this run alone, and for people unless the configuration says otherwise."""
        self.log_path.unlink(missing_ok=True)
        command = module_command("kvbridge", self.configured.role, "--config", str(self.configured.path))
        if self.configured.role is DaemonRole.BOOTSTRAP:
            command += ["--endpoint-dir", str(self.endpoint_dir)]
        if self.configured.config.telemetry.log_format is LogFormat.AUTO:
            command += ["--set", "telemetry.log_format=console"]
        self.launch(command)

    @property
    def endpoint_dir(self) -> Path:
        """Where it says that it serves."""
        config = self.configured.config
        if isinstance(config, BootstrapConfig):
            return self.configured.path.parent / "run" / self.name
        return config.runtime_dir

    @property
    def serves(self) -> bool:
        """Whether it is this process that answers at its address, and not one that was there before."""
        endpoint = read_endpoint(self.endpoint_dir)
        return endpoint is not None and self.process is not None and endpoint.pid == self.process.pid

    @property
    def ended_in_peace(self) -> bool:
        """Whether nothing is wrong with its end: it obeyed, or Ctrl-C came before it had begun, or before it was started."""
        code = None if self.process is None else self.process.returncode
        return code == 0 or (self.told_to_end and code in {None, -signal.SIGTERM})

    @property
    def limit_s(self) -> float:
        """How long it may take to end."""
        timeouts = self.configured.config.timeouts
        both = ("shutdown_s", "shutdown_rooms_s", "shutdown_close_s")
        return float(sum(getattr(timeouts, name, 0.0) for name in both)) + GRACE_S

    def show(self) -> None:
        """Print the whole lines that it has logged since the last call."""
        if self.process is None:
            return
        with self.log_path.open("rb") as log:
            log.seek(self._shown_bytes)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._shown_bytes += len(whole) + len(newline)
        for line in whole.decode(errors="replace").splitlines():
            self._console.print(self._prefix + Text(line))


class ForegroundCluster:
    """The daemons, from their start to their end."""

    def __init__(self, daemons: Sequence[ShownDaemon], console: Console, interrupts: Interrupts) -> None:
        self._daemons = daemons
        self._console = console
        self._interrupts = interrupts
        self._calls = BlockingClient(timeout_s=CALL_S, timeout_key="a limit of this command")
        self._begun_s = self._told_s = time.monotonic()
        self._was_ready = False
        self._lacking = "nothing is known yet"
        """What keeps requests from being served."""

    def start(self) -> None:
        """Start bootstraps, and nodes when these serve. Raises PeerError when one ends, DeadlineError."""
        bootstraps = [each for each in self._daemons if each.configured.role is DaemonRole.BOOTSTRAP]
        for daemon in self._daemons:
            if daemon.configured.role is not DaemonRole.BOOTSTRAP:
                wait_for(
                    "bootstrap", lambda: all(each.serves for each in bootstraps), timeout_s=START_S, watched=bootstraps
                )
            with self._interrupts.held():
                daemon.start()

    def watch(self) -> None:
        """Show what happens until every daemon has ended, or one has before there was a pair."""
        for turn in itertools.count():
            ended = self._show()
            if len(ended) == len(self._daemons) or (ended and not self._was_ready):
                return
            if not turn % round(ASK_S / LOOK_S):
                self._ask()
            time.sleep(LOOK_S)

    def tell_draining(self) -> None:
        """Say what Ctrl-C has begun, and how long that may take; the daemons log what they wait for."""
        running = [each for each in self._daemons if each.running]
        for each in self._daemons:
            each.told_to_end = True
        limit_s = max((each.limit_s for each in running), default=0.0)
        names = ", ".join(each.name for each in running) or "nothing runs yet"
        self._console.print(f"told to end: {names}; at most {limit_s:g} s (once more: at once)", style="bold")

    def end(self) -> None:
        """End nodes, then bootstraps: in peace; told again, at once; by force when told a third time or it takes too long."""
        for directory in (False, True):
            part = [each for each in self._daemons if (each.configured.role is DaemonRole.BOOTSTRAP) is directory]
            running = [each for each in part if each.running]
            self._told_s = time.monotonic()
            deadline_s = self._told_s + max((each.limit_s for each in running), default=0.0)
            self._signal(running, signal.SIGTERM)
            at_once = False
            while any(each.running for each in running):
                if self._interrupts.more and not at_once:
                    at_once = True
                    deadline_s = time.monotonic() + GRACE_S
                    self._signal(running, signal.SIGTERM)  # which cuts their drain short
                if self._interrupts.more > 1 or time.monotonic() > deadline_s:
                    self._kill([each for each in running if each.running])
                self._show()
                if time.monotonic() - self._told_s >= QUIET_S:
                    self._told_s = time.monotonic()
                    left = ", ".join(each.name for each in running if each.running)
                    self._console.print(f"still ending: {left} (once more: at once)", style="bold", markup=False)
                time.sleep(LOOK_S)
        self._show()

    def _kill(self, daemons: Sequence[ShownDaemon]) -> None:
        """Kill what does not end, and remove what it leaves in shared memory."""
        for daemon in daemons:
            daemon.kill()
            self._console.print(f"{daemon.name} did not end in time and was killed", style="bold red", markup=False)
        removed = [each for each in sweep(shared_directories(daemons)) if each.verdict is Verdict.REMOVED]
        if removed:
            size = decimal(sum(each.size_bytes for each in removed))
            self._console.print(f"removed from shared memory: {len(removed)} files, {size}", markup=False)

    @staticmethod
    def _signal(daemons: Sequence[ShownDaemon], number: signal.Signals) -> None:
        for daemon in daemons:
            if daemon.running:
                daemon.told_to_end = True
                daemon.kill(signal.SIGCONT)  # a stopped one would not hear the rest
                daemon.kill(number)

    def _show(self) -> list[ShownDaemon]:
        """Show what is new; return the daemons that have ended."""
        for daemon in self._daemons:
            daemon.show()
        ended = [daemon for daemon in self._daemons if not daemon.running]
        for daemon in ended:
            if not daemon.told_to_end:
                daemon.told_to_end = True
                try:
                    daemon.check_running()
                except PeerError as error:
                    self._console.print(str(error), style="bold red", markup=False)
                if self._was_ready:
                    command = f"kvbridge {daemon.configured.role} --config {daemon.configured.path}"
                    self._console.print(f"the others go on; to have it again: {command}", style="bold", markup=False)
        return ended

    def _ask(self) -> None:
        reasons = {
            each.name: "not serving yet"
            if each.running and not each.serves
            else why_not_ready(self._calls, each.configured.url)
            for each in self._daemons
        }
        lacking = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
        if self._lacking and not lacking:
            again = "again " if self._was_ready else ""
            self._console.print(f"ready {again}after {time.monotonic() - self._begun_s:.1f} s", style="bold green")
            if not self._was_ready:
                self._console.print(next_steps([each.configured for each in self._daemons]), markup=False)
            self._was_ready = True
        elif lacking and (not self._lacking or time.monotonic() - self._told_s >= QUIET_S):
            still = "yet" if not self._was_ready else "any more"
            self._console.print(f"not ready {still}: {lacking}", style="bold yellow", markup=False)
        elif lacking:
            return
        self._lacking, self._told_s = lacking, time.monotonic()


def shared_directories(daemons: Sequence[ShownDaemon]) -> list[Path]:
    """Return where daemons make their files in shared memory."""
    found = [DEFAULT_DIRECTORY]
    for daemon in daemons:
        config = daemon.configured.config
        if not isinstance(config, BootstrapConfig):
            found += [memory_directory(config), Path(config.transports.local.proof_directory)]
    return found


def next_steps(daemons: Sequence[ConfiguredDaemon]) -> str:
    """Return commands that move a request through the first pair, to be copied into another terminal."""
    bootstrap = daemons[0]
    prefill, decode = (
        next(each.config for each in daemons if isinstance(each.config, kind)) for kind in (PrefillConfig, DecodeConfig)
    )
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
    """Return where an example is: beside the installed files, or in the checkout that this runs from."""
    file = f"{name}.py"
    installed = [each for each in importlib.metadata.files("kvbridge") or () if each.match(f"kvbridge/examples/{file}")]
    return Path(str(installed[0].locate())).resolve() if installed else ROOT / "examples" / file

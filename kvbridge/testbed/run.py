"""What every run of a cluster with engine processes has: its folder, its processes, and their end.

Owns: the folder, the daemons and the engine processes, for as long as the run lasts. Must not know: what is asked of them.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import TypeAdapter

from kvbridge.cli.local_cluster import ClusterSpec, DaemonProcess, check_workers, plan_cluster, wait_all_ready
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import FrozenModel
from kvbridge.daemon.children import stop_all
from kvbridge.testbed.engines.messages import Attached
from kvbridge.testbed.engines.processes import SCRATCH, EngineProcess, Reports
from kvbridge.testbed.options import CommandOptions
from kvbridge.testbed.progress import ShownProgress
from kvbridge.testbed.signals import interrupts_ignored

START_S = 180.0
FREE_S = 10.0
"""After the last release, every page is available within this time."""
LOOK_S = 0.1
STOP_S, FORCE_S = 8.0, 1.0
"""How long daemons may take to end, and how soon they are forced to after a run that was cut short."""
ENGINE_STOP_S = 3.0


class ClusterRun(ABC):
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(
        self,
        package: str,
        options: CommandOptions,
        progress: ShownProgress,
        *,
        events: TypeAdapter[Any],
        spec: Callable[[Path], ClusterSpec],
    ) -> None:
        """`package` has the parts that engine processes run; `events` validates what they report; `spec` is of a folder."""
        self.folder = Path(tempfile.mkdtemp(prefix=f"kvbridge-{package.rpartition('.')[2]}-"))
        self.cluster = plan_cluster(self.folder, spec(self.folder))
        """Not started; it ends with the run."""
        self.progress = progress
        self.reports = Reports(silence_s=options.patience_s)
        self.engines: dict[str, EngineProcess] = {}
        self.completed = False
        """Whether everything was done; what is left may be ended by force otherwise."""
        self.seconds: dict[str, float] = {}
        """How long each part took."""
        self._package = package
        self._events = events
        self._keep_logs = options.keep_logs
        self._attached: set[str] = set()

    @abstractmethod
    def handle(self, engine: EngineProcess, event: FrozenModel) -> None:
        """Take in what an engine process reports, other than that it has attached."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process, keep the logs if that was asked, remove the folder. Ctrl-C has to wait for it (seconds)."""
        with ExitStack() as last:
            last.enter_context(interrupts_ignored())
            last.callback(shutil.rmtree, self.folder, ignore_errors=True)
            if self._keep_logs is not None:
                ignored = shutil.ignore_patterns("run", SCRATCH)
                last.callback(shutil.copytree, self.folder, self._keep_logs, dirs_exist_ok=True, ignore=ignored)
            force_s = None if self.completed else FORCE_S
            last.callback(self.cluster.stop, timeout_s=STOP_S, force_after_s=force_s)
            for engine in self.engines.values():
                engine.dismiss()
            stop_all(self.engines.values(), timeout_s=ENGINE_STOP_S)

    @contextmanager
    def causes_named(self) -> Iterator[None]:
        """Inside, an error gives way to the end of a daemon, which is then the cause of what was noticed first."""
        try:
            yield
        except BridgeError:
            self.cluster.check_running()
            raise

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Note how long it takes what is done inside, however it ends."""
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = round(time.monotonic() - begun_s, 2)

    def start_engines(self, job: FrozenModel, names: Mapping[str, str]) -> None:
        """Start an engine process for each part; `names` are for messages."""
        job_file = self.folder / "job.json"
        job_file.write_text(job.model_dump_json(indent=2))
        for part, name in names.items():
            self.engines[part] = engine = EngineProcess(
                self._package, part, name, self.folder, events=self._events, reports=self.reports.queue
            )
            engine.start(job_file)

    def wait_ready(self) -> None:
        """Wait until requests can be paired. Raises PeerError when a daemon or a rank worker cannot, DeadlineError."""
        nodes = [self.cluster.prefill, self.cluster.decode]
        wait_all_ready(self.cluster.all(), timeout_s=START_S, check=lambda: check_workers(nodes))

    def wait_attached(self) -> None:
        """Wait until the engines of both nodes have attached."""
        while not {"prefill", "decode"} <= self._attached:
            self.next_report()
        self.progress.stage("daemons are ready, engines have attached")

    def next_report(self, wait_s: float = math.inf) -> None:
        """Wait for the next report, up to `wait_s`, and take it in. Raises what `Reports.next` does, for ended daemons too."""
        reported = self.reports.next(self.engines.values(), check=self.cluster.check_running, wait_s=wait_s)
        if reported is None:
            return
        engine, event = reported
        if isinstance(event, Attached):
            self._attached.add(engine.part)
        self.handle(engine, event)

    def wait_free(self) -> int:
        """Return how many pages are not available some time after the last release."""
        deadline_s = time.monotonic() + FREE_S
        while True:
            left = sum(sum(used_pages(daemon).values()) for daemon in (self.cluster.prefill, self.cluster.decode))
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(LOOK_S)


def used_pages(daemon: DaemonProcess) -> dict[str, int]:
    """Return how many pages of each space are not available: what is cached and read by nobody is not used."""
    status = daemon.get("/status")
    pools, available = status["pools"], status["available_pages"]
    return {space: sum(map(int, states.values())) - int(available[space]) for space, states in pools.items()}

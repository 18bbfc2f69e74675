"""One replay from its first process to its report.

Owns: the folder, the daemons, the engine processes and the requests, all for as long as the replay lasts. Must not know:
terminals, exit codes, how the report looks.

It plays the router: it asks bootstrap for a pair for each request that is due, obeys Retry-After, and hands the room to the
prefill engine. The engines tell what becomes of it; the cache itself never comes through here.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbridge.api.directory import PairRequest
from kvbridge.cli.progress import ShownProgress
from kvbridge.cli.signals import interrupts_ignored
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, PeerError
from kvbridge.core.ids import FrozenModel
from kvbridge.daemon.children import stop_all, wait_for
from kvbridge.testbed.cluster import Cluster, DaemonProcess, first_worker_error, plan_cluster
from kvbridge.testbed.engines.processes import SCRATCH, EngineProcess, Reports
from kvbridge.testbed.replay.job import EVENTS, Arrived, Computed, Finished, Ready, Released, RoomEnded, Serve
from kvbridge.testbed.replay.ledger import Ledger, Request
from kvbridge.testbed.replay.plan import ReplayOptions, ReplayPlan
from kvbridge.testbed.replay.report import Ending, ReplayReport, Sample

MODULE = "kvbridge.testbed.replay"
"""What engine processes run."""
START_S = 180.0
FREE_S = 10.0
"""After the last release, every page is free within this time."""
STOP_S, HURRY_S = 8.0, 1.0
ENGINE_STOP_S = 3.0
LOOK_S = 0.1
RETRY_S = 1.0
"""After an answer that does not say when to come again."""
DETAIL_S = 5.0
SENT_AWAY = (CapacityError, PeerError, DeadlineError)
"""Answers after which the same request may be let in; every other one is about the request itself."""


class Replay:
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: ReplayOptions, progress: ShownProgress) -> None:
        """Raises InvalidInputError for a trace or options that cannot be replayed."""
        self._options = options
        self._progress = progress
        self._plan = ReplayPlan.of(options)
        self._ledger = Ledger(self._plan)
        self._folder = Path(tempfile.mkdtemp(prefix="kvbridge-replay-"))
        self._reports = Reports(silence_s=options.patience_s)
        self._engines: dict[str, EngineProcess] = {}
        self._cluster: Cluster | None = None
        self._ready: set[str] = set()
        self._whole = False
        self._pool_bytes = 0
        self._pages_left = 0
        self._seconds: dict[str, float] = {}
        self._begun_s = 0.0
        self._heard_s = 0.0
        self._detailed_s = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    # ------------------------------------------------------------------ the whole

    def run(self) -> None:
        """Run everything. Raises PeerError or DeadlineError with what a reader needs to find the cause."""
        begun_s = time.monotonic()
        try:
            cluster = self._start()
            self._seconds["start"] = round(time.monotonic() - begun_s, 2)
            self._serve(cluster)
            self._pages_left = self._wait_free(cluster)
        except BridgeError:
            if self._cluster is not None:
                self._cluster.check_running()  # a daemon that has died is the cause of whatever was noticed first
            raise
        self._whole = True
        self._progress.stage("ending all processes")

    def report(self, ending: Ending, problem: str = "") -> ReplayReport:
        """Return what is known so far."""
        if self._begun_s:
            self._seconds.setdefault("replay", round(time.monotonic() - self._begun_s, 2))
        return self._ledger.report(
            ending,
            problem,
            pool_bytes=self._pool_bytes,
            pages_left=self._pages_left,
            seconds=self._seconds,
        )

    def _close(self) -> None:
        """End every process, keep the logs if that was asked, remove the folder."""
        with ExitStack() as last:
            last.enter_context(interrupts_ignored())
            last.callback(shutil.rmtree, self._folder, ignore_errors=True)
            if self._options.keep_logs is not None:
                last.callback(self._keep_logs, self._options.keep_logs)
            if self._cluster is not None:
                last.callback(self._cluster.stop, timeout_s=STOP_S, hurry_after_s=None if self._whole else HURRY_S)
            for engine in self._engines.values():
                engine.dismiss()
            stop_all(self._engines.values(), timeout_s=ENGINE_STOP_S)

    # ------------------------------------------------------------------ start

    def _start(self) -> Cluster:
        plan, options = self._plan, self._options
        cluster = plan_cluster(self._folder, plan.cluster_spec(f"replay-{secrets.token_hex(4)}"))
        self._pool_bytes = plan.check_memory(cluster)
        self._progress.stage(
            f"{len(plan.requests)} requests of {plan.geometry.name} over {options.transport}; starting 3 daemons with pools "
            f"of {self._pool_bytes / 1e9:.1f} GB"
        )
        self._cluster = cluster
        cluster.start()
        self._wait_ready(cluster)
        job_file = self._folder / "job.json"
        job_file.write_text(plan.job(cluster).model_dump_json(indent=2))
        for part, name in (("prefill", "the prefill engine"), ("decode", "the decode engine")):
            self._engines[part] = engine = EngineProcess(
                MODULE, part, name, self._folder, events=EVENTS, reports=self._reports.queue
            )
            engine.start(job_file)
        while self._ready < self._engines.keys():
            self._handle(*self._reports.next(self._engines.values(), check=cluster.check_running))
        self._progress.stage("daemons are ready, engines have attached")
        self._progress.bars(
            {
                "written (tokens)": sum(request.input_length for request in plan.requests),
                "served (requests)": len(plan.requests),
            }
        )
        return cluster

    def _wait_ready(self, cluster: Cluster) -> None:
        def look() -> bool:
            if why := first_worker_error([cluster.prefill, cluster.decode]):
                raise PeerError(why)
            return all(daemon.is_ready() for daemon in cluster.all())

        wait_for("daemons ready", look, timeout_s=START_S, watched=cluster.all())

    # ------------------------------------------------------------------ requests

    def _serve(self, cluster: Cluster) -> None:
        self._begun_s = self._heard_s = time.monotonic()
        while not self._ledger.all_ended:
            now_s = time.monotonic()
            for request in self._ledger.due(now_s - self._begun_s):
                self._admit(cluster, request)
            if self._ledger.sample_due(now_s - self._begun_s):
                self._sample(cluster)
            self._next(cluster)
        self._seconds["replay"] = round(time.monotonic() - self._begun_s, 2)

    def _next(self, cluster: Cluster) -> None:
        """Take in what is reported until something else is due."""
        now_s = time.monotonic()
        wait_s = min(LOOK_S, max(0.0, self._begun_s + self._ledger.next_due_s() - now_s))
        reported = self._reports.take(self._engines.values(), wait_s)
        if reported is not None:
            self._heard_s = time.monotonic()
            self._handle(*reported)
            return
        cluster.check_running()
        if not self._ledger.in_flight:
            self._heard_s = now_s
        if now_s - self._heard_s > self._options.patience_s:
            raise self._reports.silent(self._engines.values())

    def _admit(self, cluster: Cluster, request: Request) -> None:
        """Ask for a pair and hand the room to the prefill engine, or note when to ask again."""
        asked = PairRequest(
            prompt_tokens=request.facts.input_length, max_new_tokens=request.facts.output_length, client="replay"
        )
        asked_s = time.monotonic() - self._begun_s
        try:
            room = int(cluster.ticket(asked).room)
        except SENT_AWAY as error:
            retry_s = error.retry_after_s if isinstance(error, CapacityError) else RETRY_S
            self._ledger.sent_away(request, error.code, str(error), now_s=asked_s, retry_s=retry_s)
            return
        except BridgeError as error:
            self._ledger.turned_down(request, str(error))
            return
        self._ledger.admitted(request, room, asked_s=asked_s, now_s=time.monotonic() - self._begun_s)
        self._engines["prefill"].order(
            Serve(
                number=request.number,
                room=room,
                prompt_tokens=request.facts.input_length,
                output_tokens=request.facts.output_length,
            )
        )

    def _handle(self, engine: EngineProcess, event: FrozenModel) -> None:
        match event:
            case Ready():
                self._ready.add(engine.part)
            case Computed():
                self._progress.advance("written (tokens)", event.tokens)
            case Finished():
                begun_s, finished_s = event.begun_s - self._begun_s, event.finished_s - self._begun_s
                self._ledger.finished(event.number, begun_s=begun_s, finished_s=finished_s)
            case Arrived():
                self._ledger.arrived(event)
            case Released():
                self._ledger.released(event.number, event.released_s - self._begun_s)
                self._progress.advance("served (requests)", 1)
                self._detail()
            case RoomEnded():
                self._ledger.failed(event.room, event.reason)
            case _:
                pass

    def _detail(self) -> None:
        if time.monotonic() - self._detailed_s > DETAIL_S:
            self._detailed_s = time.monotonic()
            self._progress.detail(self._ledger.in_words())

    # ------------------------------------------------------------------ pools

    def _sample(self, cluster: Cluster) -> None:
        used = {daemon.role: _used_pages(daemon) for daemon in (cluster.prefill, cluster.decode)}
        at_s = round(time.monotonic() - self._begun_s, 2)
        self._ledger.sample(Sample(at_s=at_s, in_flight=self._ledger.in_flight, used_pages=used))

    def _wait_free(self, cluster: Cluster) -> int:
        """Return how many pages are not free some time after the last release."""
        deadline_s = time.monotonic() + FREE_S
        while True:
            left = sum(sum(_used_pages(daemon).values()) for daemon in (cluster.prefill, cluster.decode))
            if not left or time.monotonic() > deadline_s:
                return left
            time.sleep(LOOK_S)

    def _keep_logs(self, target: Path) -> None:
        shutil.copytree(self._folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run", SCRATCH))


def _used_pages(daemon: DaemonProcess) -> dict[str, int]:
    pools = daemon.get("/status")["pools"]
    return {
        space: sum(int(pages) for state, pages in states.items() if state != "free") for space, states in pools.items()
    }

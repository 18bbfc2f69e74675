"""One replay from its first process to its report.

Owns: the requests, and what is asked of the daemons and engines for them. Must not know: terminals, exit codes, how the report
looks.

It plays the router: it asks bootstrap for a pair for each request that is due, obeys Retry-After, and hands the room to the
prefill engine. The engines tell what becomes of it; the cache itself never comes through here.
"""

from __future__ import annotations

import secrets
import time

from kvbridge.api.directory import PairRequest
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, PeerError
from kvbridge.core.ids import FrozenModel
from kvbridge.testbed.cluster import Cluster
from kvbridge.testbed.engines.messages import Attached, Computed, Finished, RoomEnded
from kvbridge.testbed.engines.processes import EngineProcess
from kvbridge.testbed.progress import ShownProgress
from kvbridge.testbed.replay.job import EVENTS, Arrived, Released, Serve
from kvbridge.testbed.replay.ledger import Ledger, Request
from kvbridge.testbed.replay.options import ReplayOptions
from kvbridge.testbed.replay.plan import ReplayPlan
from kvbridge.testbed.replay.report import Ending, ReplayReport, Sample
from kvbridge.testbed.run import LOOK_S, ClusterRun, used_pages, wait_free, wait_ready

RETRY_S = 1.0
"""After an answer that does not say when to come again."""
DETAIL_S = 5.0
SENT_AWAY = (CapacityError, PeerError, DeadlineError)
"""Answers after which the same request may be let in; every other one is about the request itself."""


class Replay(ClusterRun):
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: ReplayOptions, progress: ShownProgress) -> None:
        """Raises InvalidInputError for a trace or options that cannot be replayed."""
        self._options = options
        self._plan = ReplayPlan.of(options)
        super().__init__("kvbridge.testbed.replay", options, progress, events=EVENTS)
        self._ledger = Ledger(self._plan)
        self._ready: set[str] = set()
        self._pool_bytes = 0
        self._pages_left = 0
        self._seconds: dict[str, float] = {}
        self._begun_s = 0.0
        self._heard_s = 0.0
        self._detailed_s = 0.0

    # ------------------------------------------------------------------ the whole

    def run(self) -> None:
        """Run everything. Raises PeerError or DeadlineError with what a reader needs to find the cause."""
        begun_s = time.monotonic()
        with self.causes_named():
            cluster = self._start()
            self._seconds["start"] = round(time.monotonic() - begun_s, 2)
            self._serve(cluster)
            self._pages_left = wait_free(cluster)
        self.completed = True
        self.progress.stage("ending all processes")

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

    # ------------------------------------------------------------------ start

    def _start(self) -> Cluster:
        plan, options = self._plan, self._options
        cluster = self.plan_cluster(plan.cluster_spec(f"replay-{secrets.token_hex(4)}"))
        self._pool_bytes = plan.check_memory(cluster)
        self.progress.stage(
            f"{len(plan.requests)} requests of {plan.geometry.name} over {options.transport}; starting 3 daemons with pools "
            f"of {self._pool_bytes / 1e9:.1f} GB"
        )
        cluster.start()
        wait_ready(cluster)
        self.start_engines(plan.job(cluster), {"prefill": "the prefill engine", "decode": "the decode engine"})
        while self._ready < self.engines.keys():
            self._handle(*self.reports.next(self.engines.values(), check=cluster.check_running))
        self.progress.stage("daemons are ready, engines have attached")
        self.progress.bars(
            {
                "written (tokens)": sum(request.input_length for request in plan.requests),
                "served (requests)": len(plan.requests),
            }
        )
        return cluster

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
        reported = self.reports.take(self.engines.values(), wait_s)
        if reported is not None:
            self._heard_s = time.monotonic()
            self._handle(*reported)
            return
        cluster.check_running()
        if not self._ledger.in_flight:
            self._heard_s = now_s
        if now_s - self._heard_s > self._options.patience_s:
            raise self.reports.silent(self.engines.values())

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
        self.engines["prefill"].order(
            Serve(
                number=request.number,
                room=room,
                prompt_tokens=request.facts.input_length,
                output_tokens=request.facts.output_length,
            )
        )

    def _handle(self, engine: EngineProcess, event: FrozenModel) -> None:
        match event:
            case Attached():
                self._ready.add(engine.part)
            case Computed():
                self.progress.advance("written (tokens)", event.tokens)
            case Finished():
                begun_s, finished_s = event.begun_s - self._begun_s, event.finished_s - self._begun_s
                self._ledger.finished(event.number, begun_s=begun_s, finished_s=finished_s)
            case Arrived():
                self._ledger.arrived(event)
            case Released():
                self._ledger.released(event.number, event.released_s - self._begun_s)
                self.progress.advance("served (requests)", 1)
                self._detail()
            case RoomEnded():
                self._ledger.failed(event.room, event.reason)
            case _:
                pass

    def _detail(self) -> None:
        if time.monotonic() - self._detailed_s > DETAIL_S:
            self._detailed_s = time.monotonic()
            self.progress.detail(self._ledger.in_words())

    # ------------------------------------------------------------------ pools

    def _sample(self, cluster: Cluster) -> None:
        used = {daemon.role: used_pages(daemon) for daemon in (cluster.prefill, cluster.decode)}
        at_s = round(time.monotonic() - self._begun_s, 2)
        self._ledger.sample(Sample(at_s=at_s, in_flight=self._ledger.in_flight, used_pages=used))

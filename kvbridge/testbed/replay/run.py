"""One replay from its first process to its report.

Owns: the requests, and what is asked of the daemons and engines for them. Must not know: terminals, exit codes, how the report
looks.

It plays the router: it asks bootstrap for a pair for each request that is due, obeys Retry-After, and hands the room to the
prefill engine. The engines tell what becomes of it; the cache itself never comes through here.
"""

from __future__ import annotations

import time

from kvbridge.api.directory import PairRequest
from kvbridge.core.errors import BridgeError, CapacityError, DeadlineError, PeerError
from kvbridge.core.ids import FrozenModel
from kvbridge.testbed.engines.messages import Computed, Finished, RoomEnded
from kvbridge.testbed.engines.processes import EngineProcess
from kvbridge.testbed.progress import ShownProgress
from kvbridge.testbed.replay.job import EVENTS, Arrived, Released, Restored, Serve
from kvbridge.testbed.replay.ledger import Ledger, Request
from kvbridge.testbed.replay.options import ReplayOptions
from kvbridge.testbed.replay.plan import ReplayPlan
from kvbridge.testbed.replay.report import Ending, ReplayReport
from kvbridge.testbed.run import LOOK_S, ClusterRun, used_pages

WRITTEN, SERVED = "written (tokens)", "served (requests)"
"""What bars are called."""
RETRY_S = 1.0
"""After an answer that does not say when to come again."""
DETAIL_S = 5.0
SENT_AWAY = (CapacityError, PeerError, DeadlineError)
"""Answers after which the same request may be let in; every other one is about the request itself."""


class Replay(ClusterRun):
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: ReplayOptions, progress: ShownProgress) -> None:
        """Raises InvalidInputError for a trace or options that cannot be replayed."""
        self._plan = plan = ReplayPlan.of(options)
        super().__init__(
            "kvbridge.testbed.replay",
            options,
            progress,
            events=EVENTS,
            spec=lambda folder: plan.cluster_spec(folder.name),
        )
        self._ledger = Ledger(self._plan)
        self._pool_bytes = 0
        self._pages_left = 0
        self._begun_s = 0.0
        self._detailed_s = 0.0

    # ------------------------------------------------------------------ the whole

    def run(self) -> None:
        """Run everything. Raises PeerError or DeadlineError with what a reader needs to find the cause."""
        with self.causes_named():
            with self.timed("start"):
                self._start()
            with self.timed("replay"):
                self._serve()
            self._pages_left = self.wait_free()
        self.completed = True
        self.progress.stage("ending all processes")

    def report(self, ending: Ending, problem: str = "") -> ReplayReport:
        """Return what is known so far."""
        return self._ledger.report(
            ending,
            problem,
            pool_bytes=self._pool_bytes,
            pages_left=self._pages_left,
            seconds=self.seconds,
        )

    # ------------------------------------------------------------------ start

    def _start(self) -> None:
        plan = self._plan
        self._pool_bytes = plan.check_memory(self.cluster)
        self.progress.stage(
            f"{len(plan.requests)} requests of {plan.geometry.name} over {plan.options.transport}; starting 3 daemons with "
            f"pools of {self._pool_bytes / 1e9:.1f} GB"
        )
        self.cluster.start()
        self.wait_ready()
        self.start_engines(plan.job(self.cluster), {"prefill": "the prefill engine", "decode": "the decode engine"})
        self.wait_attached()
        self.progress.bars(
            {WRITTEN: sum(request.input_length for request in plan.requests), SERVED: len(plan.requests)}
        )

    # ------------------------------------------------------------------ requests

    def _serve(self) -> None:
        self._begun_s = time.monotonic()
        while not self._ledger.all_ended:
            now_s = time.monotonic() - self._begun_s
            for request in self._ledger.due(now_s):
                self._admit(request)
            if self._ledger.sample_due(now_s):
                self._sample()
            if not self._ledger.in_flight:
                self.reports.waited_s = 0.0  # the engines have nothing to say
            self.next_report(min(LOOK_S, self._begun_s + self._ledger.next_due_s() - time.monotonic()))
        self._sample()

    def _admit(self, request: Request) -> None:
        """Ask for a pair and hand the room to the prefill engine, or note when to ask again."""
        asked = PairRequest(
            prompt_tokens=request.facts.input_length,
            max_new_tokens=request.facts.output_length,
            client="replay",
            page_hashes=self._plan.keys(request.number).data,
        )
        asked_s = time.monotonic() - self._begun_s
        try:
            room = int(self.cluster.ticket(asked).room)
        except SENT_AWAY as error:
            retry_s = error.retry_after_s if isinstance(error, CapacityError) else RETRY_S
            self._ledger.sent_away(request, error.code, str(error), now_s=asked_s, retry_s=retry_s)
            return
        except BridgeError as error:
            self._ledger.turned_down(request, str(error))
            return
        self._ledger.admitted(request, room, asked_s=asked_s, now_s=time.monotonic() - self._begun_s)
        order = Serve(
            number=request.number,
            room=room,
            prompt_tokens=request.facts.input_length,
            output_tokens=request.facts.output_length,
            hash_ids=request.facts.hash_ids,
        )
        for side in ("decode", "prefill"):  # decode knows a room before prefill can have written it
            self.engines[side].order(order)

    def handle(self, engine: EngineProcess, event: FrozenModel) -> None:  # noqa: ARG002 - all say the same
        """See ClusterRun."""
        match event:
            case Computed():
                self.progress.advance(WRITTEN, event.tokens)
            case Finished():
                begun_s, finished_s = event.begun_s - self._begun_s, event.finished_s - self._begun_s
                self._ledger.finished(event.number, begun_s=begun_s, finished_s=finished_s)
            case Restored():
                self._ledger.compared(event)
            case Arrived():
                self._ledger.arrived(event)
            case Released():
                self._ledger.released(event.number, event.released_s - self._begun_s)
                self.progress.advance(SERVED, 1)
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

    def _sample(self) -> None:
        used = {daemon.role: used_pages(daemon) for daemon in (self.cluster.prefill, self.cluster.decode)}
        at_s = round(time.monotonic() - self._begun_s, 2)
        self._ledger.sample(at_s, used)

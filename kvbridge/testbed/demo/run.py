"""One demo from its first process to its report.

Owns: the requests, and what is asked of the daemons and engines for them. Must not know: terminals, exit codes.

It plays the router: it asks bootstrap for a pair for each prompt, hands the room to the prefill engine, and keeps a few
requests in flight. The engines tell what happens to them; the cache itself never comes through here.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable

from kvbridge.api.directory import PairRequest
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.core.errors import CapacityError, ConflictError, RoomFailedError
from kvbridge.core.ids import FrozenModel
from kvbridge.testbed.cluster import Cluster, calls, wait_ended
from kvbridge.testbed.demo.job import EVENTS, Attach, Began, Claimed, Decoded, Loaded, Serve, Stepped
from kvbridge.testbed.demo.options import DemoOptions
from kvbridge.testbed.demo.plan import IN_FLIGHT, DemoPlan
from kvbridge.testbed.demo.report import (
    DemoReport,
    Divergence,
    RequestReport,
    compare_page_ids,
    is_scattered,
)
from kvbridge.testbed.demo.requests import DemoRequest
from kvbridge.testbed.demo.verdict import verdict_line
from kvbridge.testbed.engines.messages import Attached, Computed, Finished, RoomEnded
from kvbridge.testbed.engines.processes import EngineProcess
from kvbridge.testbed.progress import ShownProgress
from kvbridge.testbed.run import ClusterRun, wait_free, wait_ready

PAIR_S, PAIR_PAUSE_S = 15.0, 0.1
"""A pair is found within this time when nothing else is running; asked for at this pace."""


class Demo(ClusterRun):
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: DemoOptions, progress: ShownProgress) -> None:
        """Raises ConfigError or InvalidInputError for options that do not fit the model."""
        self._options = options
        self._plan = DemoPlan.of(options)
        super().__init__("kvbridge.testbed.demo", options, progress, events=EVENTS)
        self._requests: dict[int, DemoRequest] = {}
        self._loaded: dict[str, Loaded] = {}
        self._attached: set[str] = set()
        self._most_in_flight = 0
        self._seconds: dict[str, float] = {}

    # ------------------------------------------------------------------ the whole

    def run(self) -> DemoReport:
        """Run everything. Raises PeerError, DeadlineError or RoomFailedError with what a reader needs to find the cause."""
        with self.causes_named():
            report = self._run()
        self.completed = True
        return report

    def _run(self) -> DemoReport:
        begun_s = time.monotonic()
        cluster = self._start()
        held = self._occupy(cluster)
        self._lap("start", begun_s)
        begun_s = time.monotonic()
        self._serve(cluster)
        self._lap("requests", begun_s)
        begun_s = time.monotonic()
        self._wait_alone()
        self._lap("waiting for the model alone", begun_s)
        self.progress.stage("comparing logits")
        report = self._report(self._give_back(cluster, held))
        (self.folder / "report.json").write_text(report.model_dump_json(indent=2) + "\n")
        self.progress.stage("ending all processes")
        return report

    def _lap(self, stage: str, begun_s: float) -> None:
        self._seconds[stage] = round(time.monotonic() - begun_s, 2)

    # ------------------------------------------------------------------ start

    def _start(self) -> Cluster:
        plan, options = self._plan, self._options
        self.progress.stage(
            f"starting 3 daemons (prefill in {options.prefill_pp} pipeline stages) and 3 processes with the model"
        )
        instance = f"demo-{secrets.token_hex(4)}"
        model_file = self.folder / f"{plan.model_name}.json"
        model_file.write_text(json.dumps(plan.model_facts))
        cluster = self.plan_cluster(plan.cluster_spec(instance, model_file))
        (self.folder / "logits").mkdir()
        job = plan.job(
            model_file, cluster.prefill.runtime_dir, cluster.decode.runtime_dir, logits_dir=self.folder / "logits"
        )
        self._requests = {prompt.number: DemoRequest(prompt) for prompt in job.prompts}
        self.start_engines(
            job, {"prefill": "the prefill engine", "decode": "the decode engine", "alone": "the model alone"}
        )
        cluster.start()
        self.progress.bars(
            {
                "prefill (tokens)": sum(prompt.tokens for prompt in job.prompts),
                "decode (steps)": job.steps * len(job.prompts),
                "model alone (tokens)": sum(prompt.tokens for prompt in job.prompts),
            }
        )
        self._wait_ready(cluster)
        return cluster

    def _wait_ready(self, cluster: Cluster) -> None:
        """Wait until requests can be paired and both engines have attached."""
        wait_ready(cluster)
        while len(self._loaded) < len(self.engines):
            self._next(cluster.check_running)
        if len({loaded.weights for loaded in self._loaded.values()}) > 1:
            raise ConflictError(f"the processes have different weights: {self._loaded}")
        for part in ("prefill", "decode"):
            self.engines[part].order(Attach())
        while not {"prefill", "decode"} <= self._attached:
            self._next(cluster.check_running)
        self.progress.stage("daemons are ready, engines have attached")

    def _occupy(self, cluster: Cluster) -> list[int]:
        """Hold some rooms and give others back, so that pages are scattered and have other ids on the two sides.

        Returns the paired rooms that are held; the one that only prefill knows is the first.
        """
        body = AdmissionRequest(prompt_tokens=self._plan.prefill_only_tokens)
        held = calls().ask(RoomReport, "POST", f"{cluster.prefill.url}/v1/requests", body=body)
        rooms = [self._pair(cluster, PairRequest(prompt_tokens=tokens)) for tokens in self._plan.hole_tokens]
        for room in rooms[::2]:
            cluster.cancel(room, "the demo makes holes in the pools")
        return [int(held.room), *rooms[1::2]]

    # ------------------------------------------------------------------ requests

    def _serve(self, cluster: Cluster) -> None:
        pending = deque(self._requests.values())
        while any(request.decoded is None for request in self._requests.values()):
            while pending and self._in_flight() < IN_FLIGHT and self._admit(cluster, pending[0]):
                pending.popleft()
            self._most_in_flight = max(self._most_in_flight, self._in_flight())
            self._next(cluster.check_running)

    def _admit(self, cluster: Cluster, request: DemoRequest) -> bool:
        """Pair a request and hand it to the prefill engine; False: it does not fit now, and others are still running."""
        asked = PairRequest(prompt_tokens=request.prompt.tokens, max_new_tokens=self._plan.reserved_steps)
        try:
            request.room = self._pair(cluster, asked, wait_s=0.0 if self._in_flight() else PAIR_S)
        except CapacityError:
            if not self._in_flight():
                raise
            return False
        self.engines["prefill"].order(Serve(number=request.prompt.number, room=request.room))
        return True

    def _pair(self, cluster: Cluster, asked: PairRequest, *, wait_s: float = PAIR_S) -> int:
        """Return the room of a new pair. A refusal for lack of pages is tried again: bootstrap's figures are a little old."""
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                return int(cluster.ticket(asked).room)
            except CapacityError:
                if time.monotonic() >= deadline_s:
                    raise
            cluster.check_running()
            time.sleep(PAIR_PAUSE_S)

    def _in_flight(self) -> int:
        return sum(request.in_flight for request in self._requests.values())

    def _wait_alone(self) -> None:
        while not all(request.alone and request.finished for request in self._requests.values()):
            self._next(lambda: None)

    def _next(self, check: Callable[[], None]) -> None:
        """Wait for the next report and take it in."""
        self._handle(*self.reports.next(self.engines.values(), check=check))

    def _handle(self, engine: EngineProcess, event: FrozenModel) -> None:
        match event:
            case Loaded():
                self._loaded[engine.part] = event
            case Attached():
                self._attached.add(engine.part)
            case Began():
                self._requests[event.number].began = event
            case Computed():
                self.progress.advance(
                    "model alone (tokens)" if engine.part == "alone" else "prefill (tokens)", event.tokens
                )
            case Finished():
                self._requests[event.number].finished = event
            case Claimed():
                self._requests[event.number].claimed = event
            case Stepped() if engine.part == "decode":
                self.progress.advance("decode (steps)", event.steps)
            case Decoded():
                self._on_decoded(engine, event)
            case RoomEnded():
                self._on_room_ended(event)
            case _:
                pass

    def _on_decoded(self, engine: EngineProcess, event: Decoded) -> None:
        request = self._requests[event.number]
        if engine.part == "alone":
            request.alone = event
            return
        request.decoded = event
        done = sum(1 for each in self._requests.values() if each.decoded is not None)
        self.progress.detail(
            f"{done} of {len(self._requests)}: request {event.number}, {request.prompt.tokens:,} tokens prefilled, "
            f"moved and {len(event.tokens)} decoded"
        )

    def _on_room_ended(self, event: RoomEnded) -> None:
        for request in self._requests.values():
            if request.room == event.room and request.decoded is None:
                raise RoomFailedError(
                    f"request {request.prompt.number} ({request.prompt.tokens} tokens, room {event.room}) {event.reason}"
                )

    # ------------------------------------------------------------------ the end

    def _give_back(self, cluster: Cluster, held: list[int]) -> int:
        """Release what was held and return how many pages are not free then."""
        prefill_only, *paired = held
        url = f"{cluster.prefill.url}/v1/requests/{prefill_only}"
        calls().ask(RoomReport, "DELETE", url, params={"reason": "the demo is over"})
        wait_ended(cluster.prefill, prefill_only)
        for room in paired:
            cluster.cancel(room, "the demo is over")
        return wait_free(cluster)

    def _report(self, pages_left: int) -> DemoReport:
        plan, options = self._plan, self._options
        requests = tuple(
            request.report(options.step_count, self.folder / "logits") for request in self._requests.values()
        )
        comparisons = [request.comparison for request in requests]
        return DemoReport(
            verdict=verdict_line(comparisons, reference=plan.reference),
            transport=options.chosen_transport,
            encoding=options.encoding.value,
            prefill_stages=plan.stages,
            model=plan.model_name,
            weights=self._loaded["alone"].weights,
            versions=self._loaded["alone"].versions,
            requests=requests,
            page_ids=compare_page_ids(requests),
            scattered_requests=sum(map(is_scattered, requests)),
            most_in_flight=self._most_in_flight,
            divergence=_divergence(requests),
            device=options.device,
            hot_buffer=plan.hot_buffer(),
            pages_left=pages_left,
            seconds=self._seconds,
        )


def _divergence(requests: tuple[RequestReport, ...]) -> Divergence | None:
    """Average over steps; every request has as many."""
    kl = [request.mean_kl for request in requests if request.mean_kl is not None]
    agreed = [request.top1_agreement for request in requests if request.top1_agreement is not None]
    if not kl or not agreed:
        return None
    return Divergence(mean_kl=sum(kl) / len(kl), top1_agreement=sum(agreed) / len(agreed))

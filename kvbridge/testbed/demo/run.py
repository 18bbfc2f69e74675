"""One demo from its first process to its report.

Owns: the requests, and what is asked of the daemons and engines for them. Must not know: terminals, exit codes.

It plays the router: it asks bootstrap for a pair for each prompt, hands the room to the prefill engine, and keeps a few
requests in flight. The engines tell what happens to them; the cache itself never comes through here.
"""

from __future__ import annotations

import json
import time
from collections import deque

from kvbridge.api.directory import PairRequest
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.cli.local_cluster import calls, wait_ended
from kvbridge.core.errors import CapacityError, ConflictError, RoomFailedError
from kvbridge.core.ids import FrozenModel
from kvbridge.testbed.demo.conversations import Request
from kvbridge.testbed.demo.job import EVENTS, Attach, Began, Claimed, Compute, Decoded, Loaded, Serve, Stepped, Text
from kvbridge.testbed.demo.options import DemoOptions
from kvbridge.testbed.demo.plan import IN_FLIGHT, DemoPlan
from kvbridge.testbed.demo.report import DemoReport
from kvbridge.testbed.demo.requests import DemoRequest
from kvbridge.testbed.demo.verdict import verdict_line
from kvbridge.testbed.engines.messages import Computed, Finished, RoomEnded
from kvbridge.testbed.engines.processes import EngineProcess
from kvbridge.testbed.progress import ShownProgress
from kvbridge.testbed.run import ClusterRun
from kvbridge.tier.keys import page_keys

PREFILL, DECODE, ALONE = "prefill (tokens)", "decode (steps)", "model alone (tokens)"
"""What bars are called."""
PAIR_S, PAIR_PAUSE_S = 15.0, 0.1
"""A pair is found within this time when nothing else is running; asked for at this pace."""


class Demo(ClusterRun):
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: DemoOptions, progress: ShownProgress) -> None:
        """Raises ConfigError or InvalidInputError for options that do not fit the model."""
        self._plan = plan = DemoPlan.of(options)
        model_file = f"{plan.model_name}.json"
        super().__init__(
            "kvbridge.testbed.demo",
            options,
            progress,
            events=EVENTS,
            spec=lambda folder: plan.cluster_spec(folder.name, folder / model_file),
        )
        nodes = (self.cluster.prefill.runtime_dir, self.cluster.decode.runtime_dir)
        self._job = plan.job(self.folder / model_file, *nodes, logits_dir=self.folder / "logits")
        self._requests = {planned.number: DemoRequest(planned) for planned in plan.requests}
        self._loaded: dict[str, Loaded] = {}
        self._most_in_flight = 0
        self._alone: deque[Compute] = deque()
        """What the model alone has not been asked yet; it is asked one thing at a time."""

    # ------------------------------------------------------------------ the whole

    def run(self) -> DemoReport:
        """Run everything. Raises PeerError, DeadlineError or RoomFailedError with what a reader needs to find the cause."""
        with self.causes_named():
            report = self._run()
        self.completed = True
        return report

    def _run(self) -> DemoReport:
        with self.timed("start"):
            self._start()
            held = self._occupy()
        with self.timed("requests"):
            self._serve()
        with self.timed("waiting for the model alone"):
            while not all(request.alone and request.finished for request in self._requests.values()):
                self.next_report()
        self.progress.stage("comparing logits")
        report = self._report(self._give_back(held))
        (self.folder / "report.json").write_text(report.model_dump_json(indent=2) + "\n")
        self.progress.stage("ending all processes")
        return report

    # ------------------------------------------------------------------ start

    def _start(self) -> None:
        plan, job = self._plan, self._job
        self.progress.stage(
            f"starting 3 daemons (prefill in {len(plan.stages)} pipeline stages) and 3 processes with the model"
        )
        job.hf_config.write_text(json.dumps(plan.model_facts))
        job.logits_dir.mkdir()
        self.start_engines(
            job, {"prefill": "the prefill engine", "decode": "the decode engine", "alone": "the model alone"}
        )
        self.cluster.start()
        prompt_tokens = sum(plan.lengths)
        self.progress.bars({PREFILL: prompt_tokens, DECODE: job.steps * job.requests, ALONE: prompt_tokens})
        self.wait_ready()
        while len(self._loaded) < len(self.engines):
            self.next_report()
        if len({loaded.weights for loaded in self._loaded.values()}) > 1:
            raise ConflictError(f"the processes have different weights: {self._loaded}")
        for part in ("prefill", "decode"):
            self.engines[part].order(Attach())
        self.wait_attached()

    def _occupy(self) -> list[int]:
        """Hold some rooms and give others back, so that pages are scattered and have other ids on the two sides.

        Returns the paired rooms that are held; the one that only prefill knows is the first.
        """
        body = AdmissionRequest(prompt_tokens=self._plan.prefill_only_tokens)
        held = calls().ask(RoomReport, "POST", f"{self.cluster.prefill.url}/v1/requests", body=body)
        rooms = [self._pair(PairRequest(prompt_tokens=tokens)) for tokens in self._plan.hole_tokens]
        for room in rooms[::2]:
            self.cluster.cancel(room, "the demo makes holes in the pools")
        return [int(held.room), *rooms[1::2]]

    # ------------------------------------------------------------------ requests

    def _serve(self) -> None:
        pending = list(self._requests.values())
        while any(request.decoded is None for request in self._requests.values()):
            for request in [each for each in pending if self._may_begin(each)]:
                if self._in_flight() == IN_FLIGHT or not self._admit(request):
                    break
                pending.remove(request)
            self._most_in_flight = max(self._most_in_flight, self._in_flight())
            self.next_report()

    def _may_begin(self, request: DemoRequest) -> bool:
        """Whether all that comes before a request is over; for one by itself the model alone must be idle, too."""
        planned = request.planned
        if planned.by_itself:
            earlier = [each for each in self._requests.values() if each.planned.number < planned.number]
            return all(each.decoded and each.alone for each in earlier)
        return not planned.after or self._requests[planned.after].decoded is not None

    def _admit(self, request: DemoRequest) -> bool:
        """Pair a request and hand it to the engines; False: it does not fit now, and others are still running."""
        planned, steps = request.planned, self._plan.reserved_steps
        if planned.previous:  # on a GPU, rooms are released later than they are decoded, and only then answers are kept
            wait_ended(self.cluster.decode, self._requests[planned.previous].room)
        request.prompt = self._before(planned) + planned.new
        keys = page_keys(self._plan.identity, request.prompt).data if planned.page_keys else b""
        request.asked_s = time.monotonic()
        try:
            request.room = self._pair(
                PairRequest(prompt_tokens=planned.tokens, max_new_tokens=steps, page_hashes=keys),
                wait_s=0.0 if self._in_flight() else PAIR_S,
            )
        except CapacityError:
            if not self._in_flight():
                raise
            return False
        order = Serve(number=planned.number, room=request.room, prompt=request.prompt, page_keys=planned.page_keys)
        for part in ("decode", "prefill"):  # decode has to know it when it comes
            self.engines[part].order(order)
        return True

    def _before(self, planned: Request) -> Text:
        """What was said before in its conversation."""
        former = self._requests.get(planned.previous)
        return former.prompt + former.decoded.tokens if former and former.decoded else ()

    def _pair(self, asked: PairRequest, *, wait_s: float = PAIR_S) -> int:
        """Return the room of a new pair. A refusal for lack of pages is tried again: bootstrap's figures are a little old."""
        deadline_s = time.monotonic() + wait_s
        while True:
            try:
                return int(self.cluster.ticket(asked).room)
            except CapacityError:
                if time.monotonic() >= deadline_s:
                    raise
            self.cluster.check_running()
            time.sleep(PAIR_PAUSE_S)

    def _in_flight(self) -> int:
        return sum(request.in_flight for request in self._requests.values())

    def handle(self, engine: EngineProcess, event: FrozenModel) -> None:
        """See ClusterRun."""
        match event:
            case Loaded():
                self._loaded[engine.part] = event
            case Began():
                self._requests[event.number].began = event
            case Computed():
                self.progress.advance(ALONE if engine.part == "alone" else PREFILL, event.tokens)
            case Finished():
                self._requests[event.number].finished = event
            case Claimed():
                self._requests[event.number].claimed = event
            case Stepped() if engine.part == "decode":
                self.progress.advance(DECODE, event.steps)
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
            self._alone.popleft()
            if self._alone:
                self.engines["alone"].order(self._alone[0])
            return
        request.decoded = event
        self._ask_alone(request)
        done = sum(1 for each in self._requests.values() if each.decoded is not None)
        self.progress.detail(
            f"{done} of {len(self._requests)}: request {event.number}, {request.planned.tokens:,} tokens prefilled, "
            f"moved and {len(event.tokens)} decoded"
        )

    def _ask_alone(self, request: DemoRequest) -> None:
        """Have the model alone compute the same, with the rows of answers that decode had kept."""
        kept = request.claimed.prefix_tokens if request.claimed and self._plan.options.keep_answers else 0
        previous = request.planned.previous
        order = Compute(
            number=request.planned.number,
            prompt=request.prompt,
            previous=previous,
            kept_tokens=kept if previous else 0,
        )
        self._alone.append(order)
        if len(self._alone) == 1:
            self.engines["alone"].order(order)

    def _on_room_ended(self, event: RoomEnded) -> None:
        for request in self._requests.values():
            if request.room == event.room and request.decoded is None:
                raise RoomFailedError(
                    f"request {request.planned.number} ({request.planned.tokens} tokens, room {event.room}) {event.reason}"
                )

    # ------------------------------------------------------------------ the end

    def _give_back(self, held: list[int]) -> int:
        """Release what was held and return how many pages are not free then."""
        prefill_only, *paired = held
        url = f"{self.cluster.prefill.url}/v1/requests/{prefill_only}"
        calls().ask(RoomReport, "DELETE", url, params={"reason": "the demo is over"})
        wait_ended(self.cluster.prefill, prefill_only)
        for room in paired:
            self.cluster.cancel(room, "the demo is over")
        return self.wait_free()

    def _report(self, pages_left: int) -> DemoReport:
        plan, options = self._plan, self._plan.options
        requests = tuple(request.report(self._job, plan.prefix_bytes) for request in self._requests.values())
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
            most_in_flight=self._most_in_flight,
            device=options.device,
            hot_buffer=plan.hot_buffer(),
            turns=options.turns or 0,
            keep_answers=options.keep_answers,
            host_tier=options.host_tier,
            pages_left=pages_left,
            seconds=self.seconds,
        )

"""One demo from its first process to its report.

The demo plays the router: it asks bootstrap for a pair for each prompt, hands the room to the engines, and keeps a few requests in
flight. The engines tell what happens to them; the cache itself never comes through here.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvbridge.api.directory import PairRequest
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.cli.local_cluster import calls, wait_ended
from kvbridge.core.errors import CapacityError, ConflictError, RoomFailedError
from kvbridge.demo.messages import Attach, Compute, Computed, Decoded, Loaded, Prefilled, Serve
from kvbridge.demo.options import DemoOptions
from kvbridge.demo.plan import IN_FLIGHT, DemoPlan
from kvbridge.demo.processes import ClusterRun, EngineProcess, RoomEnded
from kvbridge.demo.prompts import Request, Text
from kvbridge.demo.report import DemoReport, RequestReport, compare
from kvbridge.tier.keys import page_keys

PARTS = {"prefill": "the prefill engine", "decode": "the decode engine", "alone": "the model alone"}
PAIR_S, PAIR_PAUSE_S = 15.0, 0.1
"""A pair is found within this time when nothing else is running; asked for at this pace."""


@dataclass
class DemoRequest:
    """One request: what the processes have reported of it."""

    planned: Request
    room: int = 0
    """0: not paired yet."""
    prompt: Text = ()
    """Known when the answer before it is."""
    asked_s: float = 0.0
    """On the machine's monotonic clock."""
    prefilled: Prefilled | None = None
    decoded: Decoded | None = None
    alone: Computed | None = None

    @property
    def through(self) -> bool:
        """Whether all three processes have reported it."""
        return bool(self.prefilled and self.decoded and self.alone)

    def report(self, spared_bytes: Callable[[int], int]) -> RequestReport:
        """Compare what came over the bridge with the model alone. `spared_bytes` is of a prefix of so many tokens."""
        number, prefilled, decoded, alone = self.planned.number, self.prefilled, self.decoded, self.alone
        if not (prefilled and decoded and alone):
            raise ConflictError(f"request {number} is not through: {self}")
        found = compare(number, np.concatenate([prefilled.logits, decoded.logits]), alone.logits)
        spared = spared_bytes(decoded.prefix_tokens)
        return RequestReport(self.planned, self.asked_s, prefilled, decoded, alone, found, spared)


class Demo(ClusterRun):
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: DemoOptions, say: Callable[[str], None]) -> None:
        """Raises ConfigError or InvalidInputError for options that do not fit the model."""
        self._plan = plan = DemoPlan.of(options)
        super().__init__("demo", plan.cluster_spec, keep_logs=options.keep_logs, say=say)
        self._requests = {planned.number: DemoRequest(planned) for planned in plan.requests}
        self._loaded: dict[str, Loaded] = {}
        self._most_in_flight = 0
        self._alone: deque[Compute] = deque()
        """What the model alone has not answered; it is asked one thing at a time."""

    # ------------------------------------------------------------------ the whole

    def run(self) -> DemoReport:
        """Run everything. Raises PeerError, DeadlineError or RoomFailedError with what a reader needs to find the cause."""
        with self.causes_named():
            with self.timed("start"):
                self._start()
                held = self._occupy()
            with self.timed("requests"):
                self._serve()
            with self.timed("waiting for the model alone"):
                while not all(request.through for request in self._requests.values()):
                    self.next_report()
            report = self._report(self._give_back(held))
        (self.folder / "report.json").write_text(json.dumps(report.as_dict(), indent=2) + "\n")
        self.say("ending all processes")
        self.completed = True
        return report

    # ------------------------------------------------------------------ start

    def _start(self) -> None:
        plan = self._plan
        self.say(f"starting 3 daemons (prefill in {len(plan.stages)} pipeline stages) and 3 processes with the model")
        plan.model_file(self.folder).write_text(json.dumps(plan.model_facts))
        job = plan.job(self.cluster.prefill.runtime_dir, self.cluster.decode.runtime_dir)
        for part, name in PARTS.items():
            self.start_engine(part, name, f"kvbridge.demo.engines:{part}", job)
        self.cluster.start()
        self.wait_ready()
        while len(self._loaded) < len(PARTS):
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
        planned = request.planned
        if planned.previous:  # on a GPU, rooms are released later than they are decoded, and only then answers are kept
            wait_ended(self.cluster.decode, self._requests[planned.previous].room)
        request.prompt = self._before(planned) + planned.new
        keys = page_keys(self._plan.identity, request.prompt).data if planned.page_keys else b""
        asked = PairRequest(prompt_tokens=planned.tokens, max_new_tokens=self._plan.reserved_steps, page_hashes=keys)
        request.asked_s = time.monotonic()
        try:
            request.room = self._pair(asked, wait_s=0.0 if self._in_flight() else PAIR_S)
        except CapacityError:
            if not self._in_flight():
                raise
            return False
        order = Serve(planned.number, request.room, request.prompt, planned.page_keys)
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
        return sum(bool(request.room) and request.decoded is None for request in self._requests.values())

    def handle(self, engine: EngineProcess, event: object) -> None:
        """Note what became of a request."""
        match event:
            case Loaded():
                self._loaded[engine.part] = event
            case Prefilled():
                self._requests[event.number].prefilled = event
            case Decoded():
                self._on_decoded(self._requests[event.number], event)
            case Computed():
                self._requests[event.number].alone = event
                self._alone.popleft()
                if self._alone:
                    self.engines["alone"].order(self._alone[0])
            case RoomEnded():
                for request in self._requests.values():
                    if request.room == event.room and request.decoded is None:
                        raise RoomFailedError(
                            f"request {request.planned.number} ({request.planned.tokens} tokens, room {event.room}) {event.reason}"
                        )

    def _on_decoded(self, request: DemoRequest, event: Decoded) -> None:
        """Have the model alone compute the same, with the rows of answers that decode had kept."""
        request.decoded = event
        planned = request.planned
        kept = event.prefix_tokens if planned.previous and self._plan.options.keep_answers else 0
        self._alone.append(Compute(planned.number, request.prompt, planned.previous, kept))
        if len(self._alone) == 1:
            self.engines["alone"].order(self._alone[0])
        done = sum(each.decoded is not None for each in self._requests.values())
        self.say(
            f"{done} of {len(self._requests)}: request {event.number}, {planned.tokens:,} tokens prefilled, moved and "
            f"{len(event.tokens)} decoded"
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
        return DemoReport(
            reference=plan.reference,
            transport=options.chosen_transport.value,
            device=options.device.value,
            encoding=options.encoding.value,
            prefill_stages=plan.stages,
            model=plan.model_name,
            weights=self._loaded["alone"].weights,
            versions=self._loaded["alone"].versions,
            requests=tuple(request.report(plan.prefix_bytes) for request in self._requests.values()),
            most_in_flight=self._most_in_flight,
            turns=options.turns,
            keep_answers=options.keep_answers,
            host_tier=options.host_tier,
            hot_rows=plan.sparse.hot_rows if plan.sparse else 0,
            pages_left=pages_left,
            seconds=self.seconds,
        )

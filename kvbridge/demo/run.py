"""One demo from its first process to its report.

The demo plays the router: it asks bootstrap for a pair for each prompt and hands the room to the engines, a few requests at once.
The engines tell what happens to them; the cache itself never comes through here.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from kvbridge.api.directory import PairRequest
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.cli.local_cluster import calls, check_workers, plan_cluster, used_pages, wait_all_ready, wait_ended
from kvbridge.cli.signals import interrupts_ignored
from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, DeadlineError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.demo.cluster import REVISION, cluster_spec, prefill_only_tokens
from kvbridge.demo.options import DemoOptions
from kvbridge.demo.processes import EngineProcess
from kvbridge.demo.prompts import Order, Request, Text
from kvbridge.demo.report import Report, compare, concluded
from kvbridge.pool.memory.layout import stage_layers
from kvbridge.tier.keys import PrefixIdentity, page_keys

ENGINES = "kvbridge.demo.engines"
START_S, SILENCE_S = 180.0, 600.0
"""How long daemons may take until they are ready, and a process with a model for one answer."""
FREE_S, PAIR_S, LOOK_S = 10.0, 15.0, 0.1
"""Every page is available this long after the last release, a pair is found within this time; looked for at this pace."""
STOP_S, FORCE_S = 8.0, 1.0
"""How long daemons may take to end, and how soon they are forced to after a run that was cut short."""


class Demo:
    """Use as a context; leaving it ends every process and removes the folder."""

    def __init__(self, options: DemoOptions, say: Callable[[str], None]) -> None:
        """Raises ConfigError or InvalidInputError for options that do not fit the model."""
        self._options, self._say = options, say
        self._hot_rows = options.hot_buffer.hot_rows if options.hot_buffer else 0
        self._identity = PrefixIdentity(
            model=options.model_name,
            revision=REVISION,
            fingerprint=fingerprint(options.geometry),
            tokens_per_page=options.geometry.tokens_per_page,
        )
        self._prefill_only_tokens = prefill_only_tokens(options)
        self._folder = Path(tempfile.mkdtemp(prefix="kvbridge-demo-"))
        scratch = self._folder / "tmp"
        scratch.mkdir()
        os.environ["TMPDIR"] = str(scratch)  # where libraries of all processes put what they forget to remove
        model_file = self._folder / f"{options.model_name}.json"
        model_file.write_text(json.dumps(options.facts))
        self._cluster = plan_cluster(self._folder, cluster_spec(options, self._folder.name, model_file))
        self._engines: dict[str, EngineProcess] = {}
        self._said: dict[int, Text] = {}
        """The prompt and the answer of each request."""
        self._requests: list[Report] = []
        self._computing: list[tuple[Report, Any]] = []
        """Requests that the model alone is computing, with their logits over the bridge."""
        self._seconds: dict[str, float] = {}
        self._completed = False
        """Whether everything was done; what is left may be ended by force otherwise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End every process, keep the logs if that was asked, remove the folder. Ctrl-C has to wait for it (seconds)."""
        with ExitStack() as last:
            last.enter_context(interrupts_ignored())
            last.callback(shutil.rmtree, self._folder, ignore_errors=True)
            if (kept := self._options.keep_logs) is not None:
                ignored = shutil.ignore_patterns("run", "tmp")
                last.callback(shutil.copytree, self._folder, kept, dirs_exist_ok=True, ignore=ignored)
            last.callback(self._cluster.stop, timeout_s=STOP_S, force_after_s=None if self._completed else FORCE_S)
            for engine in self._engines.values():
                last.callback(engine.close, at_once=not self._completed)

    def run(self) -> Report:
        """Run everything and return the report.

        Raises PeerError, DeadlineError or RoomFailedError with what a reader needs to find the cause.
        """
        try:
            with self._timed("start"):
                loaded = self._start()
            # Prefill holds as many pages as decode has, so that no page of a request has the same id on both nodes.
            body = AdmissionRequest(prompt_tokens=self._prefill_only_tokens)
            held = calls().ask(RoomReport, "POST", f"{self._cluster.prefill.url}/v1/requests", body=body)
            with self._timed("requests"):
                for batch in self._options.batches:
                    self._serve(batch)
                self._compare()
            pages_left = self._give_back(int(held.room))
        except BridgeError:
            self._cluster.check_running()  # the end of a daemon is the cause of what was noticed first
            raise
        report = concluded(self._report(loaded, pages_left))
        (self._folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        self._say("ending all processes")
        self._completed = True
        return report

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun_s = time.monotonic()
        yield
        self._seconds[part] = round(time.monotonic() - begun_s, 2)

    def _start(self) -> dict[str, str]:
        """Start everything; return what the processes say of their models."""
        cluster, stages = self._cluster, self._options.prefill_pp
        self._say(f"starting 3 daemons (prefill in {stages} pipeline stages) and 3 processes with the model")
        for kind, name in (("Prefill", "prefill engine"), ("Decode", "decode engine"), ("Alone", "model alone")):
            self._engines[kind] = EngineProcess(f"the {name}", f"{ENGINES}:{kind}", self._folder, self._options)
        cluster.start()
        nodes = {"Prefill": cluster.prefill, "Decode": cluster.decode}
        wait_all_ready(cluster.all(), timeout_s=START_S, check=lambda: check_workers(nodes.values()))
        models: list[dict[str, str]] = [self._answer(kind) for kind in self._engines]
        if any(model != models[0] for model in models):
            raise ConflictError(f"the processes have different weights: {models}")
        for kind, daemon in nodes.items():
            self._engines[kind].ask("attach", daemon.runtime_dir)
            self._answer(kind)
        self._say("daemons are ready, engines have attached")
        return models[0]

    def _serve(self, batch: Sequence[Request]) -> None:
        """Take requests over the bridge together, and have the model alone compute the same meanwhile and after."""
        orders = [self._order(request) for request in batch]
        for kind in ("Decode", "Prefill"):
            self._engines[kind].ask("serve", orders)
        prefilled, decoded = self._answer("Prefill"), self._answer("Decode")
        self._compare()
        questions = []
        for request, order, (made, first), (got, fed, logits) in zip(batch, orders, prefilled, decoded, strict=True):
            wait_ended(self._cluster.decode, order.room)
            self._said[request.number] = order.prompt + fed
            kept_tokens = got["prefix_tokens"] if request.previous and self._options.keep_answers else 0
            questions.append((request.number, order.prompt, request.previous, kept_tokens))
            added_s = got.pop("claimable_s") - made.pop("prefilled_s")
            report = {
                "number": request.number,
                "conversation": request.conversation,
                "turn": request.turn,
                "prompt_tokens": request.tokens,
                "after_prefill_s": max(0.0, added_s),
                **made,
                **got,
            }
            self._computing.append((report, np.concatenate([first, logits])))
        self._engines["Alone"].ask("compute", questions)
        done = f"{batch[-1].number} of {len(self._options.requests)}"
        self._say(
            f"{done}: prompts of {', '.join(str(each.tokens) for each in batch)} tokens prefilled, moved and decoded"
        )

    def _order(self, request: Request) -> Order:
        """Pair a request. A refusal for lack of pages is tried again: bootstrap's figures are a little old."""
        prompt = self._said.get(request.previous, ()) + request.new
        keys = page_keys(self._identity, prompt).data if self._options.turns else b""
        asked = PairRequest(prompt_tokens=len(prompt), max_new_tokens=self._options.step_count, page_hashes=keys)
        deadline_s = time.monotonic() + PAIR_S
        while True:
            try:
                return Order(request.number, int(self._cluster.ticket(asked).room), prompt)
            except CapacityError:
                if time.monotonic() >= deadline_s:
                    raise
            self._cluster.check_running()
            time.sleep(LOOK_S)

    def _compare(self) -> None:
        """Compare what the model alone is computing, when it has."""
        found = self._answer("Alone") if self._computing else []
        for (report, ours), (facts, alone) in zip(self._computing, found, strict=True):
            self._requests.append(report | facts | {"comparison": compare(report["number"], ours, alone)})
        self._computing = []

    def _answer(self, kind: str) -> Any:  # noqa: ANN401 - each method has its own
        """Wait for the answer of one process, while daemons run."""
        deadline_s = time.monotonic() + SILENCE_S
        while not self._engines[kind].pipe.poll(LOOK_S):
            self._cluster.check_running()
            for engine in self._engines.values():
                engine.check_running()
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"{self._engines[kind].name} did not answer within {SILENCE_S:g} s")
        return self._engines[kind].answer()

    def _give_back(self, room: int) -> int:
        """Release the room that prefill holds; return how many pages are not free some time after."""
        prefill, decode = self._cluster.prefill, self._cluster.decode
        calls().ask(RoomReport, "DELETE", f"{prefill.url}/v1/requests/{room}", params={"reason": "the demo is over"})
        deadline_s = time.monotonic() + FREE_S
        while (left := sum(sum(used_pages(daemon).values()) for daemon in (prefill, decode))) and (
            time.monotonic() < deadline_s
        ):
            time.sleep(LOOK_S)
        return left

    def _report(self, loaded: dict[str, str], pages_left: int) -> Report:
        options, layers = self._options, self._options.geometry.layer_count
        return {
            "reference": options.reference,
            "transport": options.chosen_transport.value,
            "device": options.device.value,
            "encoding": options.encoding.value,
            "prefill_stages": [list(stage_layers(layers, options.prefill_pp, at)) for at in range(options.prefill_pp)],
            "model": options.model_name,
            "loaded": loaded,
            "requests": self._requests,
            "most_in_flight": max(map(len, options.batches)),
            "turns": options.turns,
            "keep_answers": options.keep_answers,
            "host_tier": options.host_tier,
            "hot_rows": self._hot_rows,
            "pages_left": pages_left,
            "seconds": self._seconds,
        }

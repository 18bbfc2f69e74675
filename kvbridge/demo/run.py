"""`kvbridge demo`, from its first process to its report: a real model over real daemons, compared with the model alone.

The command plays the router: it asks bootstrap for a pair for each prompt and hands the room to the engines. The cache itself never
comes through here. Processes with a model are forked from a server that has imported torch and transformers once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import typer

from kvbridge.api.directory import PairRequest
from kvbridge.api.rooms import AdmissionRequest, RoomReport
from kvbridge.cli.config import EXIT_FAILED, fail, with_options
from kvbridge.cli.local_cluster import calls, check_workers, used_pages, wait_all_ready, wait_ended
from kvbridge.cli.signals import interrupts_ignored, terminated_like_interrupted
from kvbridge.config.pools import DeviceKind
from kvbridge.core.errors import BridgeError, ConfigError, DeadlineError, InvalidInputError, PeerError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.demo.plan import REVISION, DemoOptions, Plan, Request, RowEncoding, Text, make_cluster, make_plan
from kvbridge.kernels.cuda.runtime import reason_without_device
from kvbridge.processes import how_it_ended
from kvbridge.tier.keys import PrefixIdentity, page_keys

ENGINES = "kvbridge.demo.engines"
KINDS = {"Prefill": "the prefill engine", "Decode": "the decode engine", "Alone": "the model alone"}
START_S, SILENCE_S = 180.0, 600.0
"""Longest start of the daemons, and longest time of a process with a model for one answer."""
FREE_S, PAIR_S, LOOK_S = 10.0, 15.0, 0.1
"""Longest time until every page is available after the last release, and until a pair is found."""
STOP_S, FORCE_S, END_S = 8.0, 1.0, 3.0
"""Longest end of the daemons; longest end after a run that was cut short; longest wait for an engine's exit code."""

Logits: TypeAlias = npt.NDArray[np.float32]
Report: TypeAlias = dict[str, Any]

_processes = multiprocessing.get_context("forkserver")


@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Prefill in one process, decode in another, and compare every logit.

    Starts bootstrap, a prefill daemon and a decode daemon, two engine processes
    with Hugging Face's DeepSeek-V4 (random weights), and a third process that
    runs the model alone. Needs no GPU and no network.

    With --sparse, decode keeps a small hot buffer of the C4 cache and fetches
    selected rows from the host pool. The model alone then sums over its selected
    rows in the same order.

    Exit codes: 0: every logit of every request is equal; 1: one differs, or the
    demo failed; 2: wrong options; 130: interrupted.
    """
    if options.device is DeviceKind.CUDA and (reason := reason_without_device()):
        fail(ConfigError(f"--device cuda: {reason}"))
    for library in ("torch", "transformers"):
        if not importlib.util.find_spec(library):
            cure = "in a checkout of kvbridge, pip install '.[demo]' brings all that this needs"
            fail(ConfigError(f"not installed: {library}; {cure}"), EXIT_FAILED)
    try:
        plan = make_plan(options)
    except InvalidInputError as error:
        fail(error)
    try:
        with terminated_like_interrupted():
            report = Demo(plan).run()
    except BridgeError as error:
        fail(error, EXIT_FAILED)
    typer.echo(json.dumps(report, indent=2) if options.as_json else described(report))
    raise typer.Exit(0 if report["good"] else EXIT_FAILED)


class Demo:
    """One run: its folder, its daemons and its processes with a model."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._begun_s = plan, time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="kvbridge-demo-"))
        self._cluster = make_cluster(plan, self._folder)
        self._nodes = (self._cluster.prefill, self._cluster.decode)
        self._engines: dict[str, EngineProcess] = {}
        self._said: dict[int, Text] = {}
        """The prompt and the answer of each request."""

    def run(self) -> Report:
        """Run everything, end every process, remove the folder, and return the report.

        Raises PeerError, DeadlineError or RoomFailedError with all that a reader needs to find the cause.
        """
        report: Report | None = None
        try:
            self._start()
            held = self._used_pages()
            requests = [report for batch in self._plan.batches for report in self._serve(batch)]
            deadline_s = time.monotonic() + FREE_S
            while (left := self._used_pages() - held) and time.monotonic() < deadline_s:
                time.sleep(LOOK_S)
            report = concluded(self._plan, requests, left)
        except BridgeError:
            self._cluster.check_running()  # the end of a daemon is the cause of later errors
            raise
        finally:
            self._say("ending all processes")
            with ExitStack() as last:
                last.enter_context(interrupts_ignored())  # ending takes seconds
                last.callback(shutil.rmtree, self._folder, ignore_errors=True)
                last.callback(self._cluster.stop, timeout_s=STOP_S, force_after_s=FORCE_S if report is None else None)
                for engine in self._engines.values():
                    last.callback(engine.close)
        return report

    def _say(self, text: str) -> None:
        typer.echo(f"{time.monotonic() - self._begun_s:6.1f} s  {text}", err=True)

    def _start(self) -> None:
        scratch, plan = self._folder / "tmp", self._plan
        scratch.mkdir()
        os.environ["TMPDIR"] = str(scratch)  # where libraries of all processes put files that they forget to remove
        (self._folder / f"{plan.model}.json").write_text(json.dumps(plan.facts))
        stages = plan.options.prefill_pp
        self._say(f"starting 3 daemons (prefill in {stages} pipeline stages) and 3 processes with the model")
        for kind, name in KINDS.items():
            self._engines[kind] = EngineProcess(name, ENGINES, kind, self._folder / f"{kind.lower()}.log", plan)
        self._cluster.start()
        wait_all_ready(self._cluster.all(), timeout_s=START_S, check=lambda: check_workers(self._nodes))
        self._answers(*KINDS)
        for kind, daemon in zip(("Prefill", "Decode"), self._nodes, strict=True):
            self._engines[kind].ask("attach", daemon.runtime_dir)
        self._answers("Prefill", "Decode")
        # Prefill holds as many pages as decode has, so that no page of a request has the same id on both nodes.
        pages: int = self._cluster.decode.config["pools"]["device"]["full"]
        body = AdmissionRequest(prompt_tokens=pages * plan.geometry.tokens_per_page)
        calls().ask(RoomReport, "POST", f"{self._cluster.prefill.url}/v1/requests", body=body)
        self._say("daemons are ready, engines have attached")

    def _used_pages(self) -> int:
        return sum(sum(used_pages(daemon).values()) for daemon in self._nodes)

    def _serve(self, batch: Sequence[Request]) -> Iterator[Report]:
        """Move requests together, have the model alone compute them meanwhile, and compare."""
        texts = [self._said.get(request.previous, ()) + request.new for request in batch]
        prompts = {self._pair(text): text for text in texts}
        for engine in self._engines.values():
            engine.ask("serve", prompts)
        for request, room, (made, first), (got, fed, logits), alone in zip(
            batch, prompts, *self._answers(*KINDS), strict=True
        ):
            wait_ended(self._cluster.decode, room)
            self._said[request.number] = prompts[room] + fed
            named = {"number": request.number, "conversation": request.conversation, "turn": request.turn}
            comparison = compare(request.number, np.concatenate([first, logits]), alone)
            yield {**named, "prompt_tokens": request.tokens, **made, **got, "comparison": comparison}
        lengths = ", ".join(str(each.tokens) for each in batch)
        done = f"{batch[-1].number} of {len(self._plan.requests)}"
        self._say(f"{done}: prompts of {lengths} tokens prefilled, moved and decoded")

    def _pair(self, prompt: Text) -> int:
        """Return a room for a prompt."""
        plan, keys = self._plan, b""
        if plan.options.turns:
            shared = {"fingerprint": fingerprint(plan.geometry), "tokens_per_page": plan.geometry.tokens_per_page}
            keys = page_keys(PrefixIdentity(model=plan.model, revision=REVISION, **shared), prompt).data
        asked = PairRequest(prompt_tokens=len(prompt), max_new_tokens=plan.steps, page_hashes=keys, wait_s=PAIR_S)
        return int(self._cluster.ticket(asked).room)

    def _answers(self, *kinds: str) -> list[Any]:
        return [self._engines[kind].answer(self._cluster.check_running) for kind in kinds]


class EngineProcess:
    """An object in a process of its own. Answers come in the order of the calls."""

    def __init__(self, name: str, module: str, kind: str, log: Path, *arguments: object) -> None:
        """Start a process that makes a `kind` of the arguments; its first answer comes when it has. `name` is for messages."""
        self.name, self._log = name, log
        self._pipe, theirs = _processes.Pipe()
        _processes.set_forkserver_preload([module])
        entry = (module, kind, arguments, theirs, log)
        self._process = _processes.Process(target=_serve, name=name, args=entry, daemon=True)
        with interrupts_ignored():  # which the process inherits
            self._process.start()
        theirs.close()

    def ask(self, method: str, *arguments: object) -> None:
        """Call a method. When the process has ended, `answer` says so."""
        with contextlib.suppress(OSError):
            self._pipe.send((method, arguments))

    def answer(self, check: Callable[[], None]) -> Any:  # noqa: ANN401 - each method has its own
        """Return the next answer; call `check` meanwhile. Raises PeerError when the process has ended, DeadlineError."""
        deadline_s = time.monotonic() + SILENCE_S
        while not self._pipe.poll(LOOK_S):
            check()
            if time.monotonic() > deadline_s:
                raise DeadlineError(f"{self.name} did not answer within {SILENCE_S:g} s")
        try:
            return self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(END_S)
            log = "\n".join(self._log.read_text(errors="replace").splitlines()[-8:]) if self._log.exists() else ""
            last = f"its log ends:\n{log}" if log else "its log is empty"
            raise PeerError(f"{self.name} ended ({how_it_ended(self._process.exitcode or 0)}); {last}") from error

    def close(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.join()


def _serve(module: str, kind: str, arguments: tuple[object, ...], pipe: Connection, log_path: Path) -> None:
    """Run the process until the command closes the pipe or ends. An error ends it with a traceback in its log."""
    with log_path.open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.setsid()  # Ctrl-C and a terminal's end are for the command
    with contextlib.suppress(EOFError, BrokenPipeError), getattr(import_module(module), kind)(*arguments) as engine:
        pipe.send(None)
        while True:
            method, given = pipe.recv()
            pipe.send(getattr(engine, method)(*given))


def compare(number: int, ours: Logits, alone: Logits) -> dict[str, Any]:
    """Compare the logits of one request: [the prompt's last position and every decoded one, vocabulary].

    There is no tolerance; `engines` says why. Not-a-number equals nothing. Raises InvalidInputError when the two sides have other
    shapes, or nothing in them.
    """
    if ours.shape != alone.shape or ours.ndim != 2 or not ours.size or ours.dtype != alone.dtype:
        raise InvalidInputError(
            f"request {number}: logits of {ours.dtype} {ours.shape} cannot be compared with {alone.dtype} {alone.shape}"
        )
    different = np.flatnonzero((ours != alone).any(axis=1))
    with np.errstate(invalid="ignore"):
        apart = np.where(ours == alone, 0.0, np.abs(ours - alone))
    first = int(different[0]) if len(different) else None
    return {"positions": len(ours), "first_difference": first, "largest_difference": float(apart.max())}


def concluded(plan: Plan, requests: list[Report], pages_left: int) -> Report:
    """Return the report: its verdict, whether the run was good, and the options of the run."""
    options = plan.options
    rows = "" if options.encoding is RowEncoding.NATIVE else f" with {options.encoding} rows"
    reference = f"the model alone{rows}{', attending to the selected ones' if options.sparse else ''}"
    differing = [request for request in requests if not _equal(request)]
    verdict = f"EQUAL: {len(requests)} of {len(requests)} requests gave the very logits of {reference}"
    if differing or not requests:
        first = ""
        for request in differing[:1]:
            found = request["comparison"]
            at = found["first_difference"]
            where = f"decode step {at}" if at else "the prompt's own logits"
            apart = f"{found['largest_difference']:.3g}"
            first = f" (request {request['number']}: first at {where}, logits by up to {apart})"
        verdict = f"DIFFERENT: {len(differing)} of {len(requests)} requests gave other logits than {reference}{first}"
    held = ("prefix_tokens", "computed_tokens") if options.turns else ()
    reused = all(any(request[name] for request in requests) for name in held)
    return {
        "verdict": verdict,
        "good": bool(requests) and not differing and reused and not pages_left,
        "model": plan.model,
        "transport": plan.transport,
        "encoding": options.encoding.value,
        "requests": requests,
        "reused": reused,
        "hot_rows": plan.hot_buffer.hot_rows if plan.hot_buffer else 0,
        "pages_left": pages_left,
    }


def _equal(request: Report) -> bool:
    return request["comparison"]["first_difference"] is None


def described(report: Report) -> str:
    """Return the report as text: a line for each request, notes on all requests, and last the verdict."""
    requests, lines = report["requests"], []
    for each in requests:
        turn = f"turn {each['turn']} of conversation {each['conversation']}, " if each["turn"] else ""
        held = f"{each['computed_tokens']:,} held by prefill, {each['prefix_tokens']:,} by decode, " if turn else ""
        sent, verdict = sum(each["arrived_bytes"].values()), "equal" if _equal(each) else "DIFFERENT"
        lines.append(
            f"{each['number']:3}: {each['prompt_tokens']:5,} tokens, {turn}{held}{sent:,} bytes sent, {verdict}"
        )
    moved = sum(each["source_pages"]["full"] != each["destination_pages"]["full"] for each in requests)
    lines.append(
        f"\nModel {report['model']}, random weights, {report['encoding']} rows; transport {report['transport']}; {moved} of "
        f"{len(requests)} lay in other pages on decode than on prefill."
    )
    if report["hot_rows"]:
        found, loaded = (sum(each["sparse"][name] for each in requests) for name in ("in_hot_slots", "loaded"))
        rows = f"{found:,} selected rows were in hot slots, {loaded:,} came from host memory"
        lines.append(f"Sparse decode: {report['hot_rows']} hot rows in each C4 layer; {rows}.")
    if not report["reused"]:
        lines.append("Nothing was reused on one of the two sides, so this run does not show that prefixes are reused.")
    if left := report["pages_left"]:
        lines.append(f"{left} pages were not given back in the end: a defect of kvbridge, please report it.")
    return "\n".join([*lines, f"\n{report['verdict']}"])

"""Engines in one process each (`engine.py`), in the place of servers: for cases about models."""

import itertools
import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.engines import servers
from tests.engines.prompts import Answer, distances
from tests.engines.servers import ANSWER_S, START_S, Setup, together
from tests.vllm.fleet import Served
from tests.vllm.servers import HERE, HOLD, Plan

_ids = itertools.count()


@dataclass(frozen=True)
class EnginePlan(Plan):
    """An engine with a model of one kind (`hybrids.py`)."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """vLLM's `EngineArgs`."""


class EngineServer(servers.Server):
    """A running engine."""

    FORGET = "/forget"
    plan: EnginePlan

    def _command(self, setup: Setup) -> tuple[list[str], dict[str, str]]:
        plan = self.plan
        settings = {
            "model": str(model(setup, plan.shape)),
            "dtype": plan.dtype,
            "max_model_len": 2048,
            "enforce_eager": True,
            "transfer": plan.transfer,
            "enable_prefix_caching": True,
            **({"num_gpu_blocks_override": plan.blocks} if plan.blocks else {}),
            **plan.settings,
        }
        command = [str(setup.python), str(HERE / "engine.py"), str(self.port), json.dumps(settings)]
        return command, {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            **plan.environment,
        }

    def has_node(self) -> bool:
        return (self.plan.transfer or {}).get("kv_connector") == "KvbridgeConnector"

    def engine(self) -> list[psutil.Process]:
        return self.tree()[:1]

    def says(self) -> dict[str, Any]:
        """Return what it says of its cache."""
        return dict(self._client.get("/used").raise_for_status().json())

    def used(self) -> dict[str, float]:
        """Return what of its cache is in use; all are 0 when nobody wants anything."""
        said = self.says()
        return {name: said[name] for name in ("used", "requests") if said[name]}

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        transfer: Mapping[str, Any] | None = None,
        further: Mapping[str, Any] | None = None,
        leave_after_s: float | None = None,
        stepwise: bool = False,
    ) -> Answer:
        """Ask for a completion. `further`: sampling parameters. `leave_after_s`: abort it then.

        `stepwise`: have the last token of the prompt computed in a step of its own, while there is no other request.
        """
        body = {
            "id": f"r{next(_ids)}",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "transfer": transfer,
            "further": dict(further or {}),
            "leave_after_s": leave_after_s,
            "stepwise": stepwise,
        }
        return self._post("/ask", body, ANSWER_S, _answer)

    stream = ask


def _answer(body: Mapping[str, Any]) -> Answer:
    if "tokens" not in body:
        return Answer(200, reason="abort")
    top = distances(body["top"])
    return Answer(200, tuple(body["tokens"]), tuple(body["logprobs"]), top, body["reason"] or "", body["transfer"])


def model(setup: Setup, kind: str) -> Path:
    """Return a model, made when there is none of this making."""
    directory, script = setup.directory / kind, HERE / "hybrids.py"
    written = directory / "model.safetensors"
    if not written.exists() or written.stat().st_mtime < script.stat().st_mtime:
        subprocess.run([setup.python, script, kind, directory], check=True, capture_output=True, timeout=START_S)
    return directory


class Engines(Served):
    """The engines of one kind of model: prefill, which is also asked for the right answers, and decode."""

    start = EngineServer
    kind = ""
    stepwise = False
    """Whether answers depend on what a step computes: they are compared one at a time then, step for step."""

    def _together(self, calls: Sequence[Callable[[], Answer]]) -> list[Answer]:
        return [call() for call in calls] if self.stepwise else together(calls)

    def expected(self, asked: Sequence[int], max_tokens: int = 16) -> Answer:
        """Return what prefill answers alone. It forgets the prompt before others ask for it (`expect`)."""
        key = (max_tokens, *asked)
        if key not in self._expected:
            self._expected[key] = self.servers["prefill"].ask(asked, max_tokens, stepwise=self.stepwise)
        return self._expected[key]

    def expect(self, asked: Sequence[Sequence[int]], max_tokens: int) -> None:
        """Ask for all at once, alone."""
        self._together([lambda one=one: self.expected(one, max_tokens) for one in asked])
        self.servers["prefill"].forget()

    def paired(self, asked: Sequence[Sequence[int]], max_tokens: int, *, order: str) -> list[Answer]:
        """Ask for all at once. Each prompt has to cross."""
        pair = self.pair("decode")
        return self._together([lambda one=one: pair.ask(one, max_tokens, order=order) for one in asked])

    def plain(
        self, asked: Sequence[Sequence[int]], max_tokens: int, *, prefill: str = "prefill", decode: str = "decode"
    ) -> list[Answer]:
        """Ask for all at once, in plain order. A prompt of which prefill holds nothing is computed by decode."""
        first, second = self.servers[prefill], self.servers[decode]

        def handed_over(one: Sequence[int]) -> Answer:
            return second.ask(one, max_tokens, transfer=first.ask(one, 1, transfer=HOLD).transfer)

        return self._together([lambda one=one: handed_over(one) for one in asked])

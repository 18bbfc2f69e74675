"""Real SGLang servers: how they are started and asked, alone and as a pair."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from tests.engines import servers
from tests.engines.fleet import CHUNK_TOKENS
from tests.engines.prompts import Answer, distances
from tests.engines.servers import ANSWER_S, ROOT, Setup, free_port, together

HERE = Path(__file__).resolve().parent
PAGE_TOKENS = 16
POOL_TOKENS = 8192
"""Four prompts of 1,500 tokens and their answers."""
ROOM_BITS = 63


@dataclass(frozen=True)
class Device:
    """The device on which servers compute."""

    flags: tuple[str, ...]
    decode_flags: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    path: tuple[Path, ...] = ()
    """Folders that come first where Python looks for modules."""


PROCESSOR = Device(
    (
        *("--device", "cpu", "--attention-backend", "torch_native", "--cuda-graph-backend-decode=disabled"),
        *("--disable-overlap-schedule", "--dtype", "float32", "--sleep-on-idle"),
    ),
    # The default backs a retracted request up into memory that only CUDA can pin.
    ("--disaggregation-decode-retraction-backup", "cpu_tensor"),
    {"SGLANG_USE_CPU_ENGINE": "1"},
    (HERE / "eased",),
)
"""A processor without AMX; idle schedulers sleep instead of turning."""


@dataclass(frozen=True)
class Plan(servers.Plan):
    """One server."""

    mode: str = ""
    """`prefill`, `decode`, or '' for both in one."""
    backend: str = "kvbridge"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of kvbridge's node."""
    page_tokens: int = PAGE_TOKENS
    variables: Mapping[str, str] = field(default_factory=dict)
    device: Device = PROCESSOR


def environment(device: Device = PROCESSOR) -> dict[str, str]:
    """Return the variables of every process of SGLang's environment."""
    own = os.environ.get("PYTHONPATH", "")
    found = {
        **os.environ,
        **device.variables,
        "PYTHONPATH": os.pathsep.join((*map(str, device.path), str(ROOT), *filter(None, (own,)))),
        "SGLANG_HOST_IP": "127.0.0.1",
        "HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile SGLang again, for minutes
    return found


class Server(servers.Server):
    """A running SGLang."""

    FORGET = "/flush_cache"
    plan: Plan

    def _command(self, setup: Setup) -> tuple[list[str], dict[str, str]]:
        plan, self.bootstrap_port = self.plan, free_port()
        settings = setup.directory / f"{plan.name}.yaml"
        settings.write_text(json.dumps(dict(plan.settings)))
        command = [
            *(str(setup.python), "-m", "sglang.launch_server", "--model-path", str(setup.model(plan.shape))),
            *("--host", "127.0.0.1", "--port", str(self.port), "--page-size", str(plan.page_tokens)),
            *("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", str(POOL_TOKENS)),
            *("--max-running-requests", "16", "--context-length", "4096", "--sampling-backend", "pytorch"),
            *("--grammar-backend", "none", "--cuda-graph-backend-prefill=disabled", "--skip-server-warmup"),
            *(*plan.device.flags, *self._split(), *plan.arguments),
        ]
        return command, environment(plan.device) | {"KVBRIDGE_SGLANG_CONFIG": str(settings), **plan.variables}

    def _split(self) -> list[str]:
        if not self.plan.mode:
            return []
        found = ["--disaggregation-mode", self.plan.mode, "--disaggregation-transfer-backend", self.plan.backend]
        found += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        return found + (list(self.plan.device.decode_flags) if self.plan.mode == "decode" else [])

    def ranks(self) -> list[psutil.Process]:
        """Return the scheduler's process of each rank."""
        return sorted((one for one in self.tree() if one.name().startswith("sglang::sched")), key=lambda one: one.pid)

    def has_node(self) -> bool:
        return bool(self.plan.mode) and self.plan.backend == "kvbridge"

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        told: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Answer:
        """Ask for tokens. `told`: the bootstrap fields of a router. Raises httpx.HTTPError without any answer."""
        more = {"return_logprob": True, "top_logprobs_num": 2, **(told or {})}
        return self._post("/generate", _body(prompt, max_tokens) | more, timeout_s, _answer)

    def stream(self, prompt: Sequence[int], max_tokens: int, *, told: Mapping[str, Any]) -> Answer:
        """Ask for tokens as a stream, for its times."""
        begun_s, first_s, last = time.monotonic(), 0.0, ""
        body = _body(prompt, max_tokens) | {"stream": True, **told}
        with self._client.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first_s, last = first_s or time.monotonic() - begun_s, line
        seconds = time.monotonic() - begun_s
        found = json.loads(last.removeprefix("data: ") or "{}")
        if "meta_info" not in found:
            return Answer(answer.status_code, reason="error")
        return replace(_answer(found), first_token_s=first_s, seconds=seconds)


def _body(prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def _answer(body: Mapping[str, Any]) -> Answer:
    meta = body["meta_info"]
    reason = str((meta["finish_reason"] or {}).get("type") or "")
    chosen = meta.get("output_token_logprobs") or []
    best = distances([one[0] for one in top] for top in meta.get("output_top_logprobs") or [] if top)
    told = {"cached_tokens": meta.get("cached_tokens")}
    return Answer(200, tuple(body["output_ids"]), tuple(one[0] for one in chosen), best, reason, told)


@dataclass
class Pair(servers.Pair):
    """A prefill and a decode server, asked at once as SGLang's routers ask them."""

    def room(self, room: int | None = None) -> dict[str, Any]:
        """Return what both servers are told of a request."""
        drawn = 1 + secrets.randbits(ROOM_BITS - 1) if room is None else room
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.prefill.bootstrap_port, "bootstrap_room": drawn}

    def ask_both(
        self, prompt: Sequence[int], max_tokens: int = 16, *, told: Mapping[str, Any] | None = None, **more: Any
    ) -> list[Answer]:
        """Return the answers of prefill, of which a router keeps nothing, and of decode."""
        told = self.room() if told is None else told
        servers = (self.prefill, self.decode)
        return together([lambda one=one: one.ask(prompt, max_tokens, told=told, **more) for one in servers])

    def ask(self, prompt: Sequence[int], max_tokens: int = 16) -> Answer:
        """Return decode's answer."""
        return self.ask_both(prompt, max_tokens)[1]

"""Real SGLang servers on loopback, in SGLang's own environment: started, asked, looked into, and ended."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.vllm import processes
from tests.vllm.prompts import Answer
from tests.vllm.servers import ANSWER_S, END_S, ROOT, START_S, free_port, together

HERE = Path(__file__).resolve().parent
PAGE_TOKENS = 16
CHUNK_TOKENS = 512
POOL_TOKENS = 8192
"""Four prompts of 1,500 tokens and their answers."""
ROOM_BITS = 63
_LAST_LINES = 60
_PROCESSOR = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--grammar-backend", "none", "--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    *("--disable-overlap-schedule", "--dtype", "float32", "--sleep-on-idle", "--skip-server-warmup"),
)
"""SGLang on a processor without AMX; idle schedulers sleep instead of turning."""


@dataclass(frozen=True)
class Setup:
    """Where servers find what they need."""

    python: Path
    """The interpreter of SGLang's environment."""
    directory: Path
    """For logs and models."""

    def model(self, shape: str) -> Path:
        """Return a model, made when there is none of this making."""
        directory, script = self.directory / shape, ROOT / "tests/vllm/models.py"
        written = directory / "model.safetensors"
        if not written.exists() or written.stat().st_mtime < script.stat().st_mtime:
            command = [self.python, script, shape, directory]
            subprocess.run(command, check=True, capture_output=True, timeout=START_S)
        return directory


@dataclass(frozen=True)
class Plan:
    """One server."""

    name: str
    mode: str = ""
    """`prefill`, `decode`, or '' for both in one."""
    backend: str = "kvbridge"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of kvbridge's node."""
    arguments: tuple[str, ...] = ()
    page_tokens: int = PAGE_TOKENS
    shape: str = "tiny"


def environment() -> dict[str, str]:
    """Return the variables of every process of SGLang's environment."""
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(HERE / "eased"), str(ROOT))),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_HOST_IP": "127.0.0.1",
        "HOST_IP": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MC_LOG_LEVEL": "ERROR",
    }
    found.pop("PYTHONDONTWRITEBYTECODE", None)  # each process would compile SGLang again, for minutes
    return found


class Server:
    """A running SGLang. `wait_ready` before anything is asked."""

    def __init__(self, setup: Setup, plan: Plan) -> None:
        """Start it, in the main thread, with which it ends."""
        self.plan = plan
        self.port, self.bootstrap_port = free_port(), free_port()
        self.log = setup.directory / f"{plan.name}.log"
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=ANSWER_S, trust_env=False)
        self._begun_s = time.monotonic()
        settings = setup.directory / f"{plan.name}.yaml"
        settings.write_text(json.dumps(dict(plan.settings)))
        command = [
            *(str(setup.python), "-m", "sglang.launch_server", "--model-path", str(setup.model(plan.shape))),
            *("--host", "127.0.0.1", "--port", str(self.port), "--page-size", str(plan.page_tokens)),
            *("--chunked-prefill-size", str(CHUNK_TOKENS), "--max-total-tokens", str(POOL_TOKENS)),
            *("--max-running-requests", "16", "--context-length", "4096", *_PROCESSOR, *self._split(), *plan.arguments),
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=setup.directory,
                env=environment() | {"KVBRIDGE_SGLANG_CONFIG": str(settings)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours, and we end it
                preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - one system call, and no lock is taken
            )
        self._known: dict[int, psutil.Process] = {}
        """All that were ever seen below it: a child outlives its parent."""

    def _split(self) -> list[str]:
        if not self.plan.mode:
            return []
        found = ["--disaggregation-mode", self.plan.mode, "--disaggregation-transfer-backend", self.plan.backend]
        found += ["--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        # The default backs a retracted request up into memory that only CUDA can pin.
        return found + (
            ["--disaggregation-decode-retraction-backup", "cpu_tensor"] if self.plan.mode == "decode" else []
        )

    def wait_ready(self) -> None:
        """Wait until it answers. Raises AssertionError with the end of its log."""
        until_s = self._begun_s + START_S
        while not self.is_healthy():
            assert self._process.poll() is None, f"{self.plan.name} has ended instead of starting:\n{self.tail()}"
            assert time.monotonic() < until_s, f"{self.plan.name} does not answer after {START_S:g} s:\n{self.tail()}"
            time.sleep(0.5)
        self.started_s = time.monotonic() - self._begun_s
        self.tree()

    def tree(self) -> list[psutil.Process]:
        """Return its processes, parents first."""
        found = processes.tree(self._process.pid)
        self._known.update({one.pid: one for one in found})
        return found

    def node(self) -> psutil.Process:
        """Return the node that kvbridge runs beside it. Raises AssertionError when there is none."""
        nodes = [one for one in self.tree() if processes.is_node(one)]
        found = [one for one in nodes if one.parent() and one.parent() not in nodes]
        assert len(found) == 1, f"{self.plan.name} has nodes {found}"
        return found[0]

    def scheduler(self) -> psutil.Process:
        """Return the process that schedules and computes: the node's parent. Raises AssertionError."""
        parent = self.node().parent()
        assert parent is not None
        return parent

    def end(self, *, grace_s: float = END_S) -> None:
        """End it with all that it has started. `grace_s` 0: without a warning."""
        self.tree()
        if grace_s:
            processes.send(signal.SIGINT, list(self._known.values())[:1])
        processes.end(list(self._known.values()), grace_s=grace_s)
        self._process.wait(END_S)
        self._client.close()

    def tail(self, lines: int = _LAST_LINES) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def is_healthy(self) -> bool:
        """Whether it says that it is."""
        try:
            return self._client.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def node_status(self) -> dict[str, Any]:
        """Return what kvbridge's node beside it says of itself."""
        endpoint = json.loads((processes.config_of(self.node()).parent / "daemon.json").read_text())
        answer = httpx.get(f"{endpoint['http_url']}/status", timeout=20.0, trust_env=False)
        return dict(answer.raise_for_status().json())

    def rooms_completed(self) -> int:
        """Return how many rooms kvbridge's node has completed."""
        return sum(int(peer["rooms_completed"]) for peer in self.node_status()["traffic"].values())

    def forget(self) -> None:
        """Forget the prefix cache."""
        self._client.post("/flush_cache").raise_for_status()

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        told: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Answer:
        """Ask for tokens. `told`: the bootstrap fields of a router. Raises httpx.HTTPError without any answer."""
        begun_s = time.monotonic()
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
        answer = self._client.post("/generate", json=body | dict(told or {}), timeout=timeout_s)
        seconds = time.monotonic() - begun_s
        if answer.status_code != 200:
            return Answer(answer.status_code, reason=answer.text[:800], seconds=seconds)
        found = answer.json()
        meta = found["meta_info"]
        finish = meta["finish_reason"] or {}
        chosen = meta.get("output_token_logprobs") or []
        best = [sorted((one[0] for one in top), reverse=True) for top in meta.get("output_top_logprobs") or [] if top]
        return Answer(
            200,
            tuple(found["output_ids"]),
            tuple(one[0] for one in chosen),
            tuple(values[0] - values[1] if len(values) > 1 else 0.0 for values in best),
            "abort" if finish.get("type") == "abort" else str(finish.get("type") or ""),
            {"cached_tokens": meta.get("cached_tokens")},
            0.0,
            seconds,
        )


@dataclass
class Pair:
    """A prefill and a decode server, asked at once as SGLang's routers ask them."""

    prefill: Server
    decode: Server

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

    def ask_together(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[Answer]:
        """Ask for several at once."""
        return together([lambda one=one: self.ask(one, max_tokens) for one in prompts])

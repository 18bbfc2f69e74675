"""Real vLLM servers on loopback, in vLLM's own environment: started, asked, looked into, struck and ended."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from tests.vllm import processes
from tests.vllm.prompts import Answer

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
START_S = 480.0
ANSWER_S = 120.0
"""For one answer; a request that takes longer hangs."""
IDLE_S = 60.0
"""For a server to have given back all blocks and rooms after its last answer."""
END_S = 15.0
NOT_GIVEN_OUT = 20_000, 32_000
"""Ports below those that Linux gives to whoever names none (`net.ipv4.ip_local_port_range`)."""
_LOOK_S = 0.05
_LAST_LINES = 60
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    python: Path
    """The interpreter of vLLM's environment."""
    directory: Path
    """For logs and models."""

    def model(self, shape: str) -> Path:
        """Return a model, made when there is none of this making."""
        directory, script = self.directory / shape, HERE / "models.py"
        written = directory / "model.safetensors"
        if not written.exists() or written.stat().st_mtime < script.stat().st_mtime:
            command = [self.python, script, shape, directory]
            subprocess.run(command, check=True, capture_output=True, timeout=START_S)
        return directory


def free_port() -> int:
    """Return a port for vLLM, which wants a number and takes a minute to use it; none that the kernel gives out meanwhile."""
    while True:
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", random.randrange(*NOT_GIVEN_OUT)))
            return int(listening.getsockname()[1])


@dataclass(frozen=True)
class Plan:
    name: str
    transfer: Mapping[str, Any] | None = None
    """`--kv-transfer-config`."""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    shape: str = "tiny"
    dtype: str = "float32"
    """Near ties of bfloat16 are decided by what else is in a batch; those of float32 are rare."""


def kvbridge(role: str, *, policy: str = "recompute", **extra: Any) -> dict[str, Any]:
    return {
        "kv_connector": "KvbridgeConnector",
        "kv_connector_module_path": "kvbridge.engine.vllm.connector",
        "kv_role": f"kv_{role}",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }


def nixl_plan(name: str, role: str, *, policy: str = "recompute", **extra: Any) -> Plan:
    """Return a server with vLLM's own NixlConnector, eased (see `eased/sitecustomize.py`)."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": f"kv_{role}",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": extra,
    }
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE / "eased"), os.environ.get("PYTHONPATH", "")])),
        "UCX_TLS": "tcp",
        "UCX_NET_DEVICES": "lo",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
    }
    return Plan(name, transfer, environment=environment)


class Server:
    """A running vLLM. `wait_ready` before anything is asked."""

    def __init__(self, setup: Setup, plan: Plan, *, blocks: int = 0) -> None:
        """Start it, in the main thread, with which it ends. `blocks`: of its KV cache (0: as many as fit into 1 GiB)."""
        self.plan = plan
        self.port = free_port()
        self.log = setup.directory / f"{plan.name}.log"
        self.model = str(setup.model(plan.shape))
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=ANSWER_S, trust_env=False)
        self._begun_s = time.monotonic()
        command = [
            *(str(setup.python), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", plan.dtype, "--max-model-len", "2048"),
            *("--enforce-eager", "--disable-uvicorn-access-log"),
            *(("--num-gpu-blocks-override", str(blocks)) if blocks else ()),
            *(("--kv-transfer-config", json.dumps(dict(plan.transfer))) if plan.transfer else ()),
            *plan.arguments,
        ]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=setup.directory,
                env=self._environment() | dict(plan.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours, and we end it
                preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - one system call, and no lock is taken
            )
        self._is_ending = False
        self._known: dict[int, psutil.Process] = {}
        """All that were ever seen below it: a child outlives its parent."""

    @staticmethod
    def _environment() -> dict[str, str]:
        threads = str(max(1, (os.cpu_count() or 2) // 2))
        return {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }

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
        found = processes.tree(self._process.pid)
        self._known.update({one.pid: one for one in found})
        return found

    def engine(self) -> list[psutil.Process]:
        """Return the processes in which it schedules and computes, without the node."""
        return [one for one in self.tree()[1:] if not processes.is_node(one)]

    def node(self) -> psutil.Process:
        """Return the node that kvbridge runs beside it. Raises AssertionError when there is none."""
        nodes = [one for one in self.tree() if processes.is_node(one)]
        found = [one for one in nodes if one.parent() and one.parent() not in nodes]
        assert len(found) == 1, f"{self.plan.name} has nodes {found}"
        return found[0]

    def ask_to_end(self) -> None:
        """Have it begin to end, as Ctrl-C does."""
        self.tree()
        if not self._is_ending:
            self._is_ending = True
            processes.send(signal.SIGINT, list(self._known.values())[:1])

    def end(self, *, grace_s: float = END_S) -> None:
        """End it with all that it has started. `grace_s` 0: without a warning."""
        if grace_s:
            self.ask_to_end()
        self.tree()
        processes.end(list(self._known.values()), grace_s=grace_s)
        self._process.wait(END_S)
        self._client.close()

    def tail(self, lines: int = _LAST_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def is_healthy(self) -> bool:
        try:
            return self._client.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 without one."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = self._client.get("/metrics", timeout=20.0).text.splitlines()
        ours = (line for line in found if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in ours if all(label in line for label in wanted))

    def loads(self) -> float:
        return self.metric("vllm:num_requests_kv_fetch_by_stage", stage="in_progress")

    def rooms_completed(self) -> int:
        return sum(int(peer["rooms_completed"]) for peer in self.node_status()["traffic"].values())

    def used(self) -> dict[str, float]:
        """Return what of its cache and queues is in use; all are 0 when nobody wants anything."""
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        return {name: value for name in names if (value := self.metric(f"vllm:{name}"))}

    def forget(self) -> None:
        """Forget the prefix cache (in vLLM's development mode)."""
        self._client.post("/reset_prefix_cache").raise_for_status()

    def node_status(self) -> dict[str, Any]:
        return self._node_says("/status")

    def room(self, room: int) -> dict[str, Any]:
        return self._node_says(f"/v1/requests/{room}")

    def _node_says(self, path: str) -> dict[str, Any]:
        endpoint = json.loads((processes.config_of(self.node()).parent / "daemon.json").read_text())
        answer = httpx.get(f"{endpoint['http_url']}{path}", timeout=20.0, trust_env=False)
        return dict(answer.raise_for_status().json())

    def ask(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        transfer: Mapping[str, Any] | None = None,
        further: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Answer:
        """Ask for a completion and return it whole. `further`: members of the body. Raises httpx.HTTPError without any answer."""
        begun_s = time.monotonic()
        body = self._body(prompt, max_tokens, transfer) | dict(further or {})
        answer = self._client.post("/v1/completions", json=body, timeout=timeout_s)
        seconds = time.monotonic() - begun_s
        if answer.status_code != 200:
            return Answer(answer.status_code, reason=answer.text[:500], seconds=seconds)
        body = answer.json()
        choice = body["choices"][0]
        told = body.get("kv_transfer_params")
        return Answer(200, *_read(choice), choice["finish_reason"] or "", told, 0.0, seconds)

    def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        transfer: Mapping[str, Any] | None = None,
        leave_after: int | None = None,
    ) -> Answer:
        """Ask for a completion as a stream. `leave_after`: close the connection after so many tokens."""
        begun_s, first_s, reason = time.monotonic(), 0.0, ""
        got: tuple[list[Any], ...] = ([], [], [])
        with self._client.stream(
            "POST", "/v1/completions", json=self._body(prompt, max_tokens, transfer) | {"stream": True}
        ) as answer:
            if answer.status_code != 200:
                return Answer(answer.status_code, reason=answer.read().decode(errors="replace")[:500])
            for line in answer.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                part = json.loads(line.removeprefix("data: "))
                if "error" in part:
                    return Answer(200, *map(tuple, got), "error")
                for choice in part["choices"]:
                    first_s = first_s or time.monotonic() - begun_s
                    for known, new in zip(got, _read(choice), strict=True):
                        known.extend(new)
                    reason = choice["finish_reason"] or reason
                if leave_after is not None and len(got[0]) >= leave_after:
                    break
        return Answer(200, *map(tuple, got), reason, None, first_s, time.monotonic() - begun_s)

    def _body(self, prompt: Sequence[int], max_tokens: int, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
        }
        return body | ({"kv_transfer_params": dict(transfer)} if transfer is not None else {})


def _read(choice: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...]]:
    logprobs = choice.get("logprobs") or {}
    best = [sorted(top.values(), reverse=True) for top in logprobs.get("top_logprobs") or []]
    gaps = tuple(values[0] - values[1] if len(values) > 1 else 0.0 for values in best)
    return tuple(choice.get("token_ids") or ()), tuple(logprobs.get("token_logprobs") or ()), gaps


ADDRESSES_OF = (5, 6, 7)
"""A prompt that is asked for only to learn where prefill is."""
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters that a gateway sends to prefill in plain order."""


@dataclass
class Pair:
    """A prefill and a decode server, asked as a gateway asks them."""

    prefill: Server
    decode: Server
    _addresses: list[dict[str, str]] = field(default_factory=list)

    def hand_over(self, prompt: Sequence[int]) -> dict[str, Any]:
        """Have a prompt computed, and return what decode is to be told. Raises AssertionError when there is no such thing."""
        answer = self.prefill.ask(prompt, 1, transfer=HOLD)
        assert not answer.is_error, f"{self.prefill.plan.name} could not prefill: {answer}"
        assert answer.transfer, f"{self.prefill.plan.name} answered without kv_transfer_params: {answer}"
        return answer.transfer

    def ask(self, prompt: Sequence[int], max_tokens: int = 16, *, order: str = "plain") -> Answer:
        """Ask in plain order: prefill first, and its `kv_transfer_params` to decode as they are; or in paired order."""
        if order == "plain":
            return self.decode.stream(prompt, max_tokens, transfer=self.hand_over(prompt))
        to_prefill, to_decode = self.draw_room()
        prefilled, answer = together(
            [
                lambda: self.prefill.ask(prompt, 1, transfer=to_prefill),
                lambda: self.decode.stream(prompt, max_tokens, transfer=to_decode),
            ]
        )
        assert not prefilled.is_error, f"{self.prefill.plan.name} could not prefill: {prefilled}"
        return answer

    def learn_addresses(self) -> None:
        """Ask in plain order once: prefill's answer says where it is."""
        if not self._addresses:
            told = self.hand_over(ADDRESSES_OF)
            self._addresses = told["kvbridge"]["prefill"]
            self.decode.ask(ADDRESSES_OF, 1, transfer=told)

    def draw_room(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what prefill and decode are told in paired order, under a new room."""
        self.learn_addresses()
        room = str(secrets.randbits(53))
        to_decode = {"do_remote_prefill": True, "kvbridge": {"room": room, "prefill": self._addresses}}
        return HOLD | {"kvbridge": {"room": room}}, to_decode

    def ask_together(
        self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, *, order: str = "plain"
    ) -> list[Answer]:
        return together([lambda one=one: self.ask(one, max_tokens, order=order) for one in prompts])


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls at once, each in a thread of its own, and return what they return."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        return [one.result() for one in [pool.submit(call) for call in calls]]


@contextmanager
def under_way(calls: Sequence[Callable[[], T]]) -> Iterator[list[Future[T]]]:
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        yield [pool.submit(call) for call in calls]


def wait_until(true: Callable[[], object], what: str, timeout_s: float = IDLE_S) -> float:
    """Wait until something is true and return how long that took. Raises AssertionError."""
    begun_s = time.monotonic()
    while not true():
        assert time.monotonic() - begun_s < timeout_s, f"not so after {timeout_s:g} s: {what}"
        time.sleep(_LOOK_S)
    return time.monotonic() - begun_s

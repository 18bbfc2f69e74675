"""Real vLLM servers: how they are started and asked, alone and as a pair."""

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines import servers
from tests.engines.prompts import Answer, distances
from tests.engines.servers import ANSWER_S, Setup, free_port, together

HERE = Path(__file__).resolve().parent
BLOCK_TOKENS = 128
"""vLLM's on a processor."""


@dataclass(frozen=True)
class Plan(servers.Plan):
    transfer: Mapping[str, Any] | None = None
    """`--kv-transfer-config`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    """Near ties of bfloat16 are decided by what else is in a batch; those of float32 are rare."""
    blocks: int = 0
    """Blocks of the KV cache; 0: as many as fit into 1 GiB."""


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


class Server(servers.Server):
    FORGET = "/reset_prefix_cache"  # in vLLM's development mode
    plan: Plan

    def _command(self, setup: Setup) -> tuple[list[str], dict[str, str]]:
        plan = self.plan
        self.model = str(setup.model(plan.shape))
        command = [
            *(str(setup.python), "-m", "vllm.entrypoints.openai.api_server", "--model", self.model),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", plan.dtype, "--max-model-len", "2048"),
            *("--enforce-eager", "--disable-uvicorn-access-log"),
            *(("--num-gpu-blocks-override", str(plan.blocks)) if plan.blocks else ()),
            *(("--kv-transfer-config", json.dumps(dict(plan.transfer))) if plan.transfer else ()),
            *plan.arguments,
        ]
        return command, {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            **plan.environment,
        }

    def has_node(self) -> bool:
        return (self.plan.transfer or {}).get("kv_connector") == "KvbridgeConnector"

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples with these labels; 0 without one."""
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = self._client.get("/metrics", timeout=20.0).text.splitlines()
        ours = (line for line in found if line.startswith((f"{name}{{", f"{name} ")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in ours if all(label in line for label in wanted))

    def loads(self) -> float:
        return self.metric("vllm:num_requests_kv_fetch_by_stage", stage="in_progress")

    def used(self) -> dict[str, float]:
        """Return what of its cache and queues is in use; all are 0 when nobody wants anything."""
        names = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")
        return {name: value for name in names if (value := self.metric(f"vllm:{name}"))}

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
        body = self._body(prompt, max_tokens, transfer) | dict(further or {})
        return self._post("/v1/completions", body, timeout_s, _answer)

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
    best = distances(top.values() for top in logprobs.get("top_logprobs") or [])
    return tuple(choice.get("token_ids") or ()), tuple(logprobs.get("token_logprobs") or ()), best


def _answer(body: Mapping[str, Any]) -> Answer:
    (choice,) = body["choices"]
    return Answer(200, *_read(choice), choice["finish_reason"] or "", body.get("kv_transfer_params"))


ADDRESSES_OF = (5, 6, 7)
"""A prompt that is asked for only to learn where prefill is."""
HOLD = {"do_remote_decode": True, "do_remote_prefill": False}
"""Parameters that a gateway sends to prefill in plain order."""


@dataclass
class Pair(servers.Pair):
    """A prefill and a decode server, asked as a gateway asks them."""

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

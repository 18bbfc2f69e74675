"""The connector class as vLLM sees it; and three commands and a question of docs/vllm.md, typed as a newcomer types them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.docs.pages import blocks
from tests.engines import processes
from tests.engines.prompts import prompt
from tests.engines.servers import ROOT, START_S, Setup, free_port, wait_until
from tests.vllm.servers import Plan, Server


def test_the_connector_class_is_what_vllm_wants(setup: Setup) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    command = [setup.python, "-m", "tests.vllm.hooks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]


def commands(start: str) -> list[list[str]]:
    """Return the guide's commands that begin like this, as lists of words."""
    pages = blocks(ROOT / "docs" / "vllm.md")
    lines = [line for block in pages for line in block.text.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(start)]


def value(words: list[str], option: str) -> str:
    return words[words.index(option) + 1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_newcomer_gets_an_answer(setup: Setup, stack: ExitStack) -> None:
    ports: dict[str, int] = {}
    servers = []
    for words in commands("vllm serve"):
        transfer = json.loads(value(words, "--kv-transfer-config"))
        server = Server(setup, Plan(f"guide-{transfer['kv_role']}", transfer))
        stack.callback(server.end)
        ports[value(words, "--port")] = server.port
        servers.append(server)
    prefill, decode = servers
    for server in servers:
        server.wait_ready()
    port = free_port()
    (router,) = commands("kvbridge router")
    told = [_with_ports(word, ports) for word in router[1:]]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbridge", *told, "--port", str(port)],
        preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - one system call
    )
    stack.callback(process.wait, 30.0)
    stack.callback(process.terminate)
    url = f"http://127.0.0.1:{port}"
    wait_until(lambda: _is_ready(url), "the router is ready", START_S)
    (question,) = commands("curl")
    body = json.loads(value(question, "-d")) | {
        "model": prefill.model,
        "prompt": prompt(300, "guide"),
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    expected = decode.ask(body["prompt"], body["max_tokens"]).tokens
    for _ in range(2):  # plain order, then paired
        decode.forget()
        before = decode.rooms_completed()
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=START_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert tuple(answer.json()["choices"][0]["token_ids"]) == expected
        assert decode.rooms_completed() > before
    assert "role=prefill" in prefill.log.read_text()


def _with_ports(word: str, ports: dict[str, int]) -> str:
    for told, port in ports.items():
        word = word.replace(f":{told}", f":{port}")
    return word


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False

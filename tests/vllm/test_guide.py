"""What docs/vllm.md tells a newcomer to type is typed: three commands and a question."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.docs.pages import blocks
from tests.vllm import processes
from tests.vllm.prompts import prompt
from tests.vllm.servers import ROOT, START_S, Plan, Server, Setup, free_port, wait_until

GUIDE = ROOT / "docs" / "vllm.md"


def commands(start: str) -> list[list[str]]:
    """Return the guide's commands that begin like this, as lists of words."""
    lines = [line for block in blocks(GUIDE) for line in block.text.replace("\\\n", " ").splitlines()]
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
    assert len(servers) == 2
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
        "model": servers[0].model,
        "prompt": prompt(300, "guide"),
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    expected = servers[1].ask(body["prompt"], body["max_tokens"]).tokens
    httpx.post(
        f"http://127.0.0.1:{servers[1].port}/reset_prefix_cache", timeout=60.0, trust_env=False
    ).raise_for_status()
    for _ in range(2):  # plain order, then paired
        before = servers[1].rooms_completed()
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=START_S, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert tuple(answer.json()["choices"][0]["token_ids"]) == expected
        assert servers[1].rooms_completed() > before
        httpx.post(
            f"http://127.0.0.1:{servers[1].port}/reset_prefix_cache", timeout=60.0, trust_env=False
        ).raise_for_status()
    assert "role=prefill" in servers[0].log.read_text()


def _with_ports(word: str, ports: dict[str, int]) -> str:
    for told, port in ports.items():
        word = word.replace(f":{told}", f":{port}")
    return word


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5.0, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False

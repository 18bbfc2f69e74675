"""The connector class as vLLM sees it; and three commands and a question of docs/vllm.md, typed as a newcomer types them."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.engines.guide import commands, router, value
from tests.engines.prompts import prompt
from tests.engines.servers import ROOT, START_S, Setup
from tests.vllm.asked import NEW_IN_0_33, READ, asked
from tests.vllm.servers import Plan, Server

PAGE = "vllm.md"


def test_the_connector_class_is_what_vllm_wants(setup: Setup) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "CUDA_VISIBLE_DEVICES": ""}
    command = [setup.python, "-m", "tests.vllm.hooks"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]


def test_the_installed_release_asks_for_what_was_read(setup: Setup) -> None:
    package = next(setup.python.parent.parent.glob("lib/python*/site-packages/vllm"))
    found, read = set(asked(package)), set(READ)
    assert found - read == set(), "new; python -m tests.vllm.asked writes what was read"
    assert read - found in (set(), NEW_IN_0_33)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_newcomer_gets_an_answer(setup: Setup, stack: ExitStack) -> None:
    ports: dict[str, int] = {}
    servers = []
    for words in commands(PAGE, "vllm serve"):
        transfer = json.loads(value(words, "--kv-transfer-config"))
        server = Server(setup, Plan(f"guide-{transfer['kv_role']}", transfer))
        stack.callback(server.end)
        ports[value(words, "--port")] = server.port
        servers.append(server)
    prefill, decode = servers
    for server in servers:
        server.wait_ready()
    (words,) = commands(PAGE, "kvbridge router")
    url = stack.enter_context(router(words, ports))
    (question,) = commands(PAGE, "curl")
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

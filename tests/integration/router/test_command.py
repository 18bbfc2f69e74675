"""`kvbridge router` as a process: what it says of a wrong command line, and how it begins and ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner, Result

from kvbridge.cli.main import app
from tests.helpers.zygote import ForkedPopen

pytestmark = pytest.mark.thorough

WAIT_S = 60.0
NOBODY = "http://127.0.0.1:9"
SERVERS = ("--prefill", NOBODY, "--decode", NOBODY)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["router", *arguments])


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a router until the block ends; yield it and its URL."""
    command = [sys.executable, "-m", "kvbridge", "router", "--port", "0", *arguments]
    with ForkedPopen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            said = iter(process.stderr.readline, "")
            listens = next(one for line in said if (one := json.loads(line))["event"] == "daemon_listens")
            yield process, listens["http"]
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no prefill and decode server is named"),
        (
            ("--prefill", "localhost:8000", "--decode", NOBODY),
            "'localhost:8000' is no server: expected http://HOST:PORT",
        ),
        ((*SERVERS, "--bootstrap", NOBODY), "leave out --bootstrap or the lists"),
        ((*SERVERS, "--host", "0.0.0.0"), "set http.token_file"),
        ((*SERVERS, "--set", "timeouts.idle=3"), "did you mean 'idle_s'"),
    ],
)
def test_a_wrong_command_line_is_told_in_words(arguments, words):
    said = run(*arguments)
    assert said.exit_code == 2
    assert words in said.stderr


def test_what_cannot_be_had_is_told_in_words_and_by_an_exit_code_of_its_own():
    """A service manager tries again: the port may be free, and the file be there, a moment later."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = start("--port", str(port)).stderr
    assert f"http.port {port}: cannot listen there" in said
    assert "Traceback" not in said
    assert "cannot read no/such/file" in start("--token-file", "no/such/file").stderr


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a router that cannot start."""
    command = [sys.executable, "-m", "kvbridge", "router", *SERVERS, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == 3
    return ended


def test_it_ends_when_it_is_told_to():
    with running("--prefill", f"{NOBODY},{NOBODY}", "--decode", NOBODY, "--limit", "7") as (process, url):
        shown = httpx.get(f"{url}/status", timeout=WAIT_S, trust_env=False).json()
        assert (shown["limit"], shown["order"], len(shown["servers"])) == (7, "paired", 2)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, timeout=WAIT_S, trust_env=False)
        assert answer.status_code == 503
        assert NOBODY in answer.json()["error"]["message"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0


def test_a_file_may_say_it_all(tmp_path: Path):
    file = tmp_path / "router.yaml"
    file.write_text(f"prefill: [{NOBODY}]\ndecode: [{NOBODY}]\norder: plain\nhttp: {{port: 0}}\n")
    with running("--config", str(file)) as (_, url):
        assert httpx.get(f"{url}/status", timeout=WAIT_S, trust_env=False).json()["order"] == "plain"

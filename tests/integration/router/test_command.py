"""`kvbridge router` as a process: what it says of a wrong command line, and how it begins and ends."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.helpers.zygote import ForkedPopen

pytestmark = pytest.mark.thorough

WAIT_S = 60.0
NOBODY = "http://127.0.0.1:9"
SERVERS = ("--prefill", NOBODY, "--decode", NOBODY)


@contextmanager
def running(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "kvbridge", "router", "--port", "0", *arguments]
    with ForkedPopen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stderr is not None
            said = iter(process.stderr.readline, "")
            listens = next(one for line in said if (one := json.loads(line))["event"] == "daemon_listens")
            yield process, listens["http"]
        finally:
            process.kill()


def test_what_cannot_be_had_is_told_in_words_and_by_an_exit_code_of_its_own():
    """A service manager tries again: the port may be free, and the file be there, a moment later."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = start("--port", str(port)).stderr
    assert f"http.port {port}: cannot listen there" in said
    assert "Traceback" not in said
    assert "cannot read no/such/file" in start("--token-file", "no/such/file").stderr


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
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

"""`kvbridge wait`: its exit codes, and that it says what is not ready and why."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from typer.testing import CliRunner

from kvbridge.api.status import Readiness
from kvbridge.cli.main import app


@contextmanager
def daemon(*answers: Readiness) -> Iterator[str]:
    """Answer `/ready`, with the last answer for ever; yields the URL."""
    left = list(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = left.pop(0) if len(left) > 1 else left[0]
            body = answer.model_dump_json().encode()
            self.send_response(200 if answer.ready else 503)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def wait(*arguments: str):
    return CliRunner().invoke(app, ["wait", *arguments])


READY = Readiness(ready=True, reasons=("bootstrap is away",))
"""A node that was known goes on without bootstrap, and says so."""
NOT_READY = Readiness(ready=False, reasons=("rank worker pp0.tp0 is starting", "no pages"))
ALONE = Readiness(ready=False, reasons=("no decode instance is ready",))


def test_it_ends_when_all_are_ready():
    with daemon(NOT_READY, READY) as node, daemon(ALONE, ALONE, READY) as bootstrap:
        result = wait(node, f"{bootstrap}/")
    assert (result.exit_code, result.output) == (0, "")


def test_it_says_what_is_not_ready_in_time():
    with daemon(READY) as good, daemon(NOT_READY) as bad, daemon(Readiness(ready=False)) as silent:
        result = wait(good, bad, silent, "--timeout", "0")
    why = "rank worker pp0.tp0 is starting; no pages"
    assert (result.exit_code, result.stderr.splitlines()) == (
        1,
        [f"{bad} is not ready after 0 s: {why}", f"{silent} is not ready after 0 s: it gives no reason"],
    )


def test_it_says_what_it_waits_for_before_its_time_is_over(monkeypatch):
    monkeypatch.setattr("kvbridge.cli.up.QUIET_S", 0.0)
    with daemon(NOT_READY, READY) as node:
        result = wait(node)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"{node} is not ready yet: rank worker pp0.tp0 is starting; no pages\n"


@pytest.mark.parametrize(("target", "said"), [("ftp://x", "neither a URL"), ("/nowhere", "/nowhere is no directory")])
def test_what_is_no_target(target, said):
    result = wait(target)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_directory_stands_for_its_daemons(tmp_path):
    assert CliRunner().invoke(app, ["init", str(tmp_path)]).exit_code == 0
    with daemon(NOT_READY) as url:
        port = url.rpartition(":")[2]
        for file in tmp_path.glob("*.yaml"):
            file.write_text(file.read_text().replace("7900", port).replace("7901", port).replace("7902", port))
        result = wait(str(tmp_path), "--timeout", "0")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"{url} is not ready")

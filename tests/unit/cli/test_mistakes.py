"""The first things that people mistype. Each answer contains the remedy, and its exit code tells the kind of mistake."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.api.endpoint_file import DaemonEndpoint, write_endpoint
from kvbridge.cli.main import app
from kvbridge.core.errors import UnavailableError
from kvbridge.http.server import _listen

FILES = Path(__file__).resolve().parents[3] / "configs"


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        ("prefill", 2, "no file was named: --config FILE; `kvbridge init DIR` writes files"),
        ("fit", 2, "no file was named: --config FILE"),
        ("wait 127.0.0.1:7900 --timeout 0", 2, "did you mean http://127.0.0.1:7900?"),
        ("wait cluster --timeout 0", 2, "`kvbridge init cluster` makes one"),
        ("init made --model mamba.json", 2, "deepseek_v4, deepseek_v2,"),
        ("bootstrap --set http.host=127.0.0.300", 2, "http.host: neither an IP address nor a host name"),
        ("bootstrap --set http.host=10.1.1", 2, "http.host: neither an IP address nor a host name"),
        ("decode --config {FILES}/decode.yaml --set bootstrap.url=10.0.0.1:7900", 2, "expected http://HOST:PORT or"),
        ("prefill --config {FILES}/prefill.yaml --set transports.order=[mooncake,nixl]", 2, "them is installed; in a"),
        ("clean --directory /nonexistent", 1, "/nonexistent: no such directory"),
        ("doctor --config ambiguous.yaml", 2, "does not tell for which daemon it is: say --role"),
        ("doctor --role decode", 2, "name it with --config"),
        ("up running", 1, "running runs already: bootstrap (pid {PID})"),
    ],
)
def test_the_answer_has_the_remedy(typed, code, said, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    Path("mamba.json").write_text('{"model_type": "mamba", "vocab_size": 10}')
    Path("ambiguous.yaml").write_text("telemetry: {log_level: info}\nno_daemon: has this\n")
    if typed.startswith("up"):
        running = tmp_path / "running"
        (running / "run" / "bootstrap").mkdir(parents=True, mode=0o700)
        for role in ("bootstrap", "prefill", "decode"):
            shutil.copy(FILES / f"{role}.yaml", running)
        endpoint = DaemonEndpoint(role="bootstrap", http_url="http://127.0.0.1:7900", pid=os.getpid(), incarnation="a")
        write_endpoint(running / "run" / "bootstrap", endpoint)
    answer = CliRunner().invoke(app, typed.format(FILES=FILES).split())
    assert said.format(PID=os.getpid()) in " ".join(answer.output.split())
    assert answer.exit_code == code


@pytest.mark.outside
def test_an_address_of_another_host_is_no_port_that_is_taken() -> None:
    with pytest.raises(UnavailableError, match="no interface of this host has that address"):
        _listen("192.0.2.7", 0)

"""`kvbridge`: one command is imported, and Ctrl-C is a line and an exit code at any time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvbridge import __version__
from kvbridge.cli.main import COMMANDS, app, load_command

HEAVY = {"torch", "numpy", "fastapi", "uvicorn", "zmq", "httpx", "aiohttp", "structlog", "prometheus_client", "yaml"}
OF_TYPER = {"pydantic"}
"""Typer imports it to read arguments, and so not for help."""
REPORT = """
import json, sys
from kvbridge.__main__ import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def test_the_release_has_two_names() -> None:
    said = [CliRunner().invoke(app, [argument]) for argument in ("version", "--version")]
    assert [(each.exit_code, each.output) for each in said] == [(0, f"{__version__}\n")] * 2


@pytest.mark.parametrize("argument", ["version", "--help"])
def test_what_needs_no_command_imports_none(argument: str) -> None:
    found = subprocess.run([sys.executable, "-c", REPORT, argument], capture_output=True, text=True, check=True)
    modules = set(json.loads(found.stderr))
    assert not modules & (HEAVY | OF_TYPER if argument == "--help" else HEAVY)
    ours = {name for name in modules if name.startswith("kvbridge")}
    assert ours == {"kvbridge", "kvbridge.__main__", "kvbridge.cli", "kvbridge.cli.signals", "kvbridge.cli.main"} | {
        "kvbridge.core",
        "kvbridge.core.process",
    }


STARTED = """
import json, sys
from kvbridge.cli import main
from kvbridge.core.process import UNUSED_BY_DAEMONS, importing
with importing(*UNUSED_BY_DAEMONS):
    from kvbridge.cli import daemons
daemons._run = lambda build: print(json.dumps(sorted(sys.modules)))
main.main()
"""
NODE = ("--config", str(Path(__file__).resolve().parents[3] / "configs" / "decode.yaml"))


@pytest.mark.parametrize(
    ("command", "not_loaded"),
    [
        (["bootstrap"], {"kvbridge.node", "kvbridge.worker", "kvbridge.daemon.node", "kvbridge.daemon.router", "zmq"}),
        (
            ["router", "--prefill", "http://p", "--decode", "http://d"],
            {"kvbridge.node", "kvbridge.worker", "kvbridge.daemon.node", "kvbridge.daemon.bootstrap", "zmq"},
        ),
        (["decode", *NODE], {"kvbridge.daemon.prefill", "kvbridge.daemon.bootstrap", "kvbridge.worker"}),
    ],
)
def test_a_daemon_imports_its_role_only(command: list[str], not_loaded: set[str]) -> None:
    found = subprocess.run([sys.executable, "-c", STARTED, *command], capture_output=True, text=True, check=True)
    modules = set(json.loads(found.stdout))
    assert f"kvbridge.daemon.{command[0]}" in modules
    assert not modules & (not_loaded | {"rich", "pygments", "trio", "torch", "opentelemetry.sdk", "mooncake"})


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    listed = get_command(app).commands[name]  # type: ignore[attr-defined]
    command = load_command(name)
    assert " ".join(command.help.split("\n\n")[0].split()) == listed.help
    assert command.name == name


STOPPED = """
import os, signal, sys, time
sys.argv[0] = "kvbridge"
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("now", flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
from kvbridge.__main__ import main
main()
"""


def started(command: list[str]) -> subprocess.Popen[str]:
    """A process that Ctrl-C reaches, though the tests themselves may run in the background, where it is ignored."""
    return subprocess.Popen(
        ["env", "--default-signal=INT", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("module", "command"), [("typer", ["--help"]), ("zmq", ["decode", *NODE]), ("fastapi", ["bootstrap"])]
)
def test_ctrl_c_during_imports_is_one_line(module: str, command: list[str]) -> None:
    script = STOPPED.format(module=module)
    with started([sys.executable, "-c", script, *command]) as process:
        assert process.stdout.readline() == "now\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)
    assert (said, process.returncode) == (("", "kvbridge: interrupted\n"), 130)


def test_ctrl_c_in_a_command_is_one_line(tmp_path) -> None:
    """The configuration comes from a pipe, and whoever writes it takes his time."""
    pipe = tmp_path / "config.yaml"
    os.mkfifo(pipe)
    command = [sys.executable, "-m", "kvbridge", "config", "show", "--role", "decode", "--config", str(pipe)]
    with (
        started(command) as process,
        pipe.open("w"),  # opens when the command does
    ):
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)
    assert (said, process.returncode) == (("", "kvbridge: interrupted\n"), 130)

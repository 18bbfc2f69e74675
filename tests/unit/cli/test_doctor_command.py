"""`kvbridge doctor`: exit codes, words at night, JSON for programs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.cli import doctor as command
from kvbridge.cli.main import app
from kvbridge.doctor.findings import Needs
from kvbridge.doctor.run import CHECKS, Host
from tests.unit.doctor.hosts import HEALTHY, changed

CONFIGS = Path(__file__).parents[3] / "configs"
DECODE = ["--config", str(CONFIGS / "decode.yaml"), "--role", "decode"]
SHORT_OF_FILES = changed(HEALTHY, machine__open_files=256)


def run(host: Host, monkeypatch: pytest.MonkeyPatch, *arguments: str):
    visits: list[Needs] = []

    def read(needs: Needs, *_: object) -> Host:
        visits.append(needs)
        return host

    monkeypatch.setattr(command, "read_host", read)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    return result, visits


def test_what_breaks_comes_first_with_why_and_cure_and_is_1(monkeypatch: pytest.MonkeyPatch) -> None:
    result, (visit,) = run(SHORT_OF_FILES, monkeypatch, *DECODE)
    assert result.exit_code == 1
    head = result.stdout.index("WILL BREAK (1)")
    places = [result.stdout.index(each) for each in ("process.open_files", "why: ", "cure: ")]
    assert [head, *places] == sorted([head, *places])
    assert result.stdout.index("cure: ") < result.stdout.index("FINE")
    assert "1 will break" in result.stdout
    assert "decode decode-0/node-0" in result.stdout
    assert visit.role == "decode"
    assert "\x1b" not in result.stdout


def test_json_has_stable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = run(SHORT_OF_FILES, monkeypatch, *DECODE, "--json")
    assert result.exit_code == 1
    said = json.loads(result.stdout)
    assert (said["role"], said["name"], said["counts"]["breaks"]) == ("decode", "decode-0/node-0", 1)
    first = said["findings"][0]
    assert set(first) == {"check", "level", "subject", "what", "why", "cure"}
    assert (first["check"], first["level"]) == ("process.open_files", "breaks")
    assert {each["check"] for each in said["findings"]} <= set(CHECKS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--role", "decode"], "name it with --config"),
        (["--config", str(CONFIGS / "two-gpus")], "cannot read"),
        ([*DECODE, "--set", "http.prot=1"], "did you mean 'port'"),
        ([*DECODE, "--set", "pools.device.request=0"], "pools.device.request"),
        (["--rolle", "decode"], "No such option"),
        ([*DECODE, "--peer", "10.0.0.2:7909"], "--peer 10.0.0.2:7909"),
    ],
)
def test_wrong_usage_is_2(arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result, visits = run(HEALTHY, monkeypatch, *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not visits

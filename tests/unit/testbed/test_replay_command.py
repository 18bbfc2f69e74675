"""`kvbridge replay`: every end has its exit code, its files and one clear message."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvbridge.cli.main import app
from kvbridge.core.errors import CapacityError, PeerError, UnsupportedError
from kvbridge.testbed.replay import command
from tests.helpers.traces import write_trace
from tests.unit.testbed.replays import report


class EndingReplay:
    """Stands where the replay would be, and ends as told."""

    end: BaseException | None = None
    facts: dict[str, object]

    def __init__(self, options, progress):
        self.options = options

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self):
        if self.end is not None:
            raise self.end

    def report(self, ending, problem=""):
        return report(ending=ending, problem=problem, **self.facts)


@pytest.fixture
def replay(monkeypatch, tmp_path):
    """Run the command with a replay that ends in a given way."""
    trace = write_trace(tmp_path / "trace.jsonl", 3)

    def run(*arguments, end=None, **facts):
        monkeypatch.setattr(EndingReplay, "end", end)
        monkeypatch.setattr(EndingReplay, "facts", facts, raising=False)
        monkeypatch.setattr(command, "Replay", EndingReplay)
        return CliRunner().invoke(app, ["replay", "--trace", str(trace), *map(str, arguments)])

    return run


def test_good_is_success(replay):
    result = replay()
    assert result.exit_code == 0
    assert "GOOD: 2 of 2" in result.stdout


@pytest.mark.parametrize("facts", [{"mismatched_bytes": 1}, {"completed": 1, "failed": 1}, {"pages_left": 1}])
def test_anything_else_is_exit_code_1(replay, facts):
    assert replay(**facts).exit_code == 1


def test_an_interrupted_replay_leaves_its_report(replay, tmp_path):
    result = replay("--report", tmp_path / "r.json", end=KeyboardInterrupt(), completed=1)
    assert result.exit_code == 130
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["ending"], found["completed"]) == ("interrupted", 1)
    assert "INTERRUPTED, this report is of a part" in result.stdout


def test_a_broken_replay_leaves_its_report(replay, tmp_path):
    result = replay("--report", tmp_path / "r.json", end=PeerError("the decode daemon ended (killed by SIGKILL)"))
    assert result.exit_code == 1
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["ending"], found["problem"]) == ("broken", "the decode daemon ended (killed by SIGKILL)")


def test_pools_that_do_not_fit_are_one_message(replay):
    result = replay(end=CapacityError("the pools need 99.0 GB"))
    assert result.exit_code == 1
    assert "the pools need 99.0 GB" in result.stdout


def test_json_is_alone_on_standard_output(replay):
    assert json.loads(replay("--json").stdout)["completed"] == 2


def test_wrong_options_are_exit_code_2(replay, tmp_path):
    for arguments, words in [
        (("--report", tmp_path / "no" / "r.json"), "there is no directory"),
        (("--plot", tmp_path / "no" / "r.png"), "there is no directory"),
        (("--speed", "-1"), "--speed"),
        (("--max-in-flight", "0"), "--max-in-flight"),
        (("--transport", "pigeon"), "pigeon"),
        (("--digest", "md4"), "md4"),
    ]:
        result = replay(*arguments)
        assert result.exit_code == 2, arguments
        assert words in result.stderr, arguments


def test_a_wrong_trace_is_one_line(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0}\n')
    result = CliRunner().invoke(app, ["replay", "--trace", str(path)])
    assert result.exit_code == 2
    assert result.stderr == f"kvbridge replay: --trace {path}, line 1: has no 'input_length'\n"


def test_a_plot_without_the_extra_is_refused_at_once(replay, tmp_path, monkeypatch):
    def missing():
        raise UnsupportedError("--plot needs matplotlib: pip install 'kvbridge[plot]'")

    monkeypatch.setattr(command, "require_plots", missing)
    result = replay("--plot", tmp_path / "p.png")
    assert result.exit_code == 2
    assert "kvbridge[plot]" in result.stderr

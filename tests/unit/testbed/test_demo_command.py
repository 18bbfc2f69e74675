"""`kvbridge demo`: every end has its exit code and one clear message."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kvbridge.cli.main import app
from kvbridge.core.errors import PeerError
from kvbridge.testbed.demo import command
from kvbridge.testbed.demo.plan import DemoPlan
from tests.unit.testbed.demo_reports import report, request


class EndingDemo:
    """Stands where the demo would be, and ends as told."""

    end: object = None

    options = None

    def __init__(self, options, progress):
        EndingDemo.options = options

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def run(self):
        if isinstance(self.end, BaseException):
            raise self.end
        return self.end


@pytest.fixture
def demo(monkeypatch):
    """Run the command with a demo that ends in a given way."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())

    def run(end, *arguments):
        monkeypatch.setattr(EndingDemo, "end", end)
        monkeypatch.setattr(command, "Demo", EndingDemo)
        return CliRunner().invoke(app, ["demo", *arguments])

    return run


def test_equal_is_success(demo):
    result = demo(report())
    assert result.exit_code == 0
    assert "EQUAL: 1 of 1" in result.stdout


def test_one_tampered_request_is_exit_code_1(demo):
    result = demo(report(request(1), request(2, first_difference=4)))
    assert result.exit_code == 1
    assert "DIFFERENT: 1 of 2" in result.stdout


def test_lost_pages_are_exit_code_1(demo):
    assert demo(report(pages_left=1)).exit_code == 1


def test_json_is_alone_on_standard_output(demo):
    result = demo(report(request(1, first_difference=1)), "--json")
    assert json.loads(result.stdout)["equal"] is False
    assert result.exit_code == 1


def test_a_failure_is_one_message(demo):
    result = demo(PeerError("the decode engine ended (exit code 1); its log is empty"))
    assert result.exit_code == 1
    assert result.stderr == "kvbridge demo: the decode engine ended (exit code 1); its log is empty\n"
    assert not result.stdout


def test_a_missing_system_library_names_its_package(demo):
    result = demo(PeerError("the mooncake library cannot be loaded (libnuma.so.1: cannot open shared object file)"))
    assert "apt install libnuma1" in result.stderr


def test_interrupted(demo):
    result = demo(KeyboardInterrupt())
    assert result.exit_code == 130
    assert "interrupted" in result.stderr


def test_told_to_end(demo):
    result = demo(SystemExit(143))
    assert result.exit_code == 143
    assert "told to end" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"prompts": 24, "steps": 16, "device": "cpu", "transport": "mooncake", "hot_rows": None}),
        (["--sparse"], {"prompts": 4, "steps": 256, "hot_rows": 128, "transport": "mooncake"}),
        (
            ["--sparse", "--prompts", "2", "--steps", "7", "--hot-rows", "64"],
            {"prompts": 2, "steps": 7, "hot_rows": 64},
        ),
        (["--device", "cuda"], {"device": "cuda:0", "transport": "local"}),
        (["--device", "cuda", "--transport", "nixl"], {"transport": "nixl"}),
    ],
)
def test_defaults_follow_from_what_is_asked(demo, monkeypatch, tmp_path, arguments, expected):
    monkeypatch.setattr(command, "reason_without_device", lambda: "")
    demo(report(), *arguments)
    plan = DemoPlan.of(EndingDemo.options)
    job = plan.job(tmp_path, tmp_path, tmp_path, logits_dir=tmp_path)
    found = {
        "prompts": job.requests,
        "steps": job.steps,
        "device": job.device,
        "hot_rows": job.sparse and job.sparse.hot_rows,
        "transport": plan.cluster_spec("demo", tmp_path).transport,
    }
    assert {name: found[name] for name in expected} == expected


def test_transformers_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "pip install 'kvbridge[demo]'" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["demo"], "not installed: mooncake; "),
        (["demo", "--transport", "nixl"], "not installed: nixl_cu12; "),
        (["replay", "--trace", "/nowhere", "--transport", "mooncake"], "not installed: mooncake; "),
    ],
)
def test_the_transport_is_asked_for_by_name(monkeypatch, arguments, missing):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "transformers" else None)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert missing in result.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prefill-pp", "8"], "--prefill-pp 8: tiny_deepseek_v4 has only 7 layers"),
        (["--hf-config", "/nowhere/config.json"], "--hf-config: cannot read /nowhere/config.json"),
        (["--keep-logs", "/"], "--keep-logs /: there is something already"),
        (["--transport", "pigeon"], "pigeon"),
        (["--prompts", "0"], "--prompts"),
        (["--steps", "0"], "--steps"),
        (["--hot-rows", "128"], "--hot-rows is the size of the hot buffer, which only --sparse has"),
        (["--sparse", "--hot-rows", "100"], "--hot-rows 100: need a multiple of 64"),
        (["--device", "cuda"], "--device cuda: the driver finds nothing"),
    ],
)
def test_wrong_options_are_exit_code_2(monkeypatch, arguments, said):
    monkeypatch.setattr(command, "reason_without_device", lambda: "the driver finds nothing")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr


def test_another_model_family_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama"}')
    result = CliRunner().invoke(app, ["demo", "--hf-config", str(file)])
    assert result.exit_code == 2
    assert "'deepseek_v4', got 'llama'" in result.stderr


@pytest.mark.outside
def test_the_command_line_loads_no_tensor_library():
    code = "import sys, kvbridge.cli.main; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

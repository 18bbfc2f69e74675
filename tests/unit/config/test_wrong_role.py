"""A configuration that was written for another daemon is told as that, not as a list of mistakes."""

from __future__ import annotations

import pytest
import yaml
from typer.testing import CliRunner

from kvbridge.cli.main import app
from tests.helpers.example_configs import CONFIGS

NODE = {"instance": "a", "model": {"preset": "tiny-v4"}, "pools": {"device": {"full": 8}}}


def show(role: str, file):
    return CliRunner().invoke(app, ["config", "show", "--role", role, "--config", str(file)])


@pytest.mark.parametrize("role", ["prefill", "decode", "bootstrap"])
@pytest.mark.parametrize("other", ["prefill", "decode", "bootstrap"])
def test_a_complete_file_is_recognised(role, other):
    result = show(role, CONFIGS / f"{other}.yaml")
    if role == other:
        assert result.exit_code == 0
        return
    assert result.exit_code == 2
    _, line = result.stderr.strip().splitlines()
    assert f"{other}.yaml: this is a {other} configuration, not one of {role}, which does not have " in line


def test_one_that_says_little_is_recognised_by_its_keys(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(NODE))
    assert "this is a prefill configuration, not one of bootstrap, which does not have instance, model, pools" in (
        show("bootstrap", file).stderr
    )


def test_one_that_could_be_of_either_role_has_its_mistakes_and_the_hint(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(NODE))
    _, mistake, hint = show("decode", file).stderr.strip().splitlines()
    assert "c4_kv would live in a host pool without pages" in mistake
    assert hint.endswith("c.yaml: as it stands, this is a valid prefill configuration")


def test_a_key_that_nobody_has_is_a_mistake_as_ever(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({**NODE, "insance": "b"}))
    for role in ("prefill", "bootstrap"):
        assert "insance: unknown key, there is no 'insance'" in show(role, file).stderr
        assert "this is a" not in show(role, file).stderr


def test_a_wrong_variable_says_nothing_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBRIDGE_NONSENSE", "1")
    result = show("prefill", CONFIGS / "prefill.yaml")
    assert "configuration, not one of" not in result.stderr
    assert "NONSENSE" in result.stderr


def test_three_daemons_with_minimal_configurations_do_not_collide(tmp_path):
    for role, more in (
        ("prefill", {}),
        ("decode", {"pools": {"device": {"full": 8}, "host": {"pages": 8}}}),
        ("bootstrap", None),
    ):
        (tmp_path / role).write_text("{}" if more is None else yaml.safe_dump({**NODE, **more}))
    shown = {role: yaml.safe_load(show(role, tmp_path / role).stdout) for role in ("prefill", "decode", "bootstrap")}
    assert [each["http"]["port"] for each in shown.values()] == [7901, 7902, 7900]
    assert shown["prefill"]["runtime_dir"] != shown["decode"]["runtime_dir"]
    other = CliRunner().invoke(
        app, ["config", "show", "--role", "prefill", "--config", str(tmp_path / "prefill"), "--set", "instance=b"]
    )
    assert yaml.safe_load(other.stdout)["runtime_dir"] != shown["prefill"]["runtime_dir"]

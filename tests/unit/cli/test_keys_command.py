"""`kvbridge keys`: what is written, what is printed, what is found."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbridge.cli.keys import app
from kvbridge.control.keys import generate_keys, load_keys, read_allowed, write_keys

PREFILL = "instance: p\nmodel: {preset: tiny-v4}\npools: {device: {full: 8, swa: 8, request: 2}}\n"


def keys(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)], env={})


def check(tmp_path: Path, text: str, role: str = "prefill") -> Result:
    file = tmp_path / "config.yaml"
    file.write_text((PREFILL if role == "prefill" else "") + text)
    return keys("check", "--role", role, "--config", file)


def test_a_pair_is_written_and_its_use_explained(tmp_path):
    file = tmp_path / "decode.key"
    result = keys("generate", file, "--instance", "decode-0")
    assert result.exit_code == 0, result.output
    pair = load_keys(file)
    assert pair.secret not in result.output
    assert f"secret_key_file: {file}" in result.output
    [entry] = [line for line in result.output.splitlines() if line.startswith(pair.public)]
    assert read_allowed([entry], None) == {pair.public: frozenset({"decode-0"})}, "the printed line is a right one"
    before = file.read_text()
    again = keys("generate", file)
    assert again.exit_code == 2
    assert "exists" in again.stderr
    assert file.read_text() == before


def test_a_token_is_written_and_not_printed(tmp_path):
    file = tmp_path / "node.token"
    result = keys("token", file)
    assert result.exit_code == 0
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_text().strip()
    assert len(token) >= 43
    assert token not in result.output
    assert keys("token", file).exit_code == 2
    assert file.read_text().strip() == token
    assert keys("token", tmp_path / "no" / "folder").exit_code == 2


def test_a_sound_configuration_is_told_who_is_allowed(tmp_path):
    pair, friend, other = generate_keys(), generate_keys().public, generate_keys().public
    write_keys(pair, tmp_path / "p.key")
    assert keys("token", tmp_path / "t").exit_code == 0
    (tmp_path / "allowed").write_text(f"{friend} decode-0\n")
    result = check(
        tmp_path,
        f"control: {{curve: {{secret_key_file: {tmp_path}/p.key, allowed_public_keys: ['{other}'], "
        f"allowed_keys_file: {tmp_path}/allowed}}}}\nhttp: {{token_file: {tmp_path}/t}}\n",
    )
    assert result.exit_code == 0, result.output
    for text in (pair.public, f"{friend} as decode-0", f"{other} as any instance", "no TLS"):
        assert text in result.output
    assert pair.secret not in result.output
    assert "PROBLEM" not in result.output


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("control: {curve: {secret_key_file: FOLDER/loose.key}}", "chmod 600"),
        ("control: {curve: {secret_key_file: FOLDER/none.key}}", "cannot be read"),
        ("control: {curve: {secret_key_file: FOLDER/mixed.key}}", "another pair's public key"),
        ("control: {curve: {secret_key_file: FOLDER/p.key, allowed_keys_file: FOLDER/t}}", "line 1"),
        ("http: {token_file: FOLDER/t}", "others can read it"),
        ("http: {token_file: FOLDER/none}", "http.token_file: cannot read"),
        ("http: {token: short}", "can be guessed"),
        ("bootstrap: {token_file: FOLDER/t}", "bootstrap.token_file"),
        ("http: {tls_key_file: FOLDER/t, tls_certificate_file: FOLDER/t}", "http.tls_key_file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, problem):
    for name in ("loose", "mixed", "p"):
        write_keys(generate_keys(), tmp_path / f"{name}.key")
    (tmp_path / "loose.key").chmod(0o644)
    (tmp_path / "mixed.pub").write_text(generate_keys().public)
    (tmp_path / "t").write_text("a-token-of-a-good-length\n")
    (tmp_path / "t").chmod(0o644)
    result = check(tmp_path, text.replace("FOLDER", str(tmp_path)))
    assert result.exit_code == 2, result.output
    [line] = [line for line in result.output.splitlines() if line.startswith("PROBLEM") and problem in line]
    assert "a-token-of-a-good-length" not in line


def test_a_wrong_configuration_is_refused(tmp_path):
    result = check(tmp_path, "htp: {}")
    assert result.exit_code == 2
    assert "unknown key" in result.stderr

"""Secrets in the right places, and in the wrong ones: no message about a configuration repeats them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.cli import config as config_command, keys as keys_command
from kvbridge.config.loading import load_config, read_secret, render_config
from kvbridge.config.schema import BootstrapConfig, PrefillConfig
from kvbridge.control.keys import generate_keys, load_keys, read_allowed
from kvbridge.core.errors import ConfigError

TOKEN = "q7VHm3Zx0Y2n5cR8tK1wLpAe9sDfGbJu"  # drawn, 32 characters
KEYS = generate_keys()
GOOD = "instance: p\nmodel: {preset: tiny-v4}\npools: {device: {full: 8}}\n"

FILES = [
    f"http: {{token: {TOKEN}}}",
    f"http: {{token: {TOKEN}, token_file: /x}}",
    f"http: {{token: [{TOKEN}]}}",
    f"http: {{token: {{value: {TOKEN}}}}}",
    f"http: {{tokn: {TOKEN}}}",
    f"http: {{token_file: [{TOKEN}]}}",
    f"http: {{port: {TOKEN}}}",
    f"http: {{host: '{TOKEN} '}}",
    f"http: {TOKEN}",
    f"token: {TOKEN}",
    f"bootstrap: {{token: {TOKEN}, url: nonsense}}",
    f"bootstrap: {{url: {TOKEN}}}",
    f"bootstrap: {{heartbeat_interval_s: {TOKEN}}}",
    f"insecure: {TOKEN}",
    f"instance: '{TOKEN} '",
    f"timeouts: {{offer_s: {TOKEN}}}",
    f"telemetry: {{log_level: {TOKEN}}}",
    f"control: {{curve: {{secret_key: '{KEYS.secret}'}}}}",
    f"control: {{curve: {{secret_key_file: '{KEYS.secret}'}}}}",
    f"control: {{curve: {{public_key: '{KEYS.secret[:-1]}'}}}}",
    f"control: {{curve: {{allowed_public_keys: ['{KEYS.secret[1:]}']}}}}",
    f"control: {{curve: {{allowed_public_keys: '{KEYS.secret}'}}}}",
    f"control: {{bind: '{KEYS.secret}'}}",
    f"http: {{token: {TOKEN}",  # not YAML
    f"http: {{token: '{TOKEN}}}\n",
    f"{TOKEN}",
    f"- {TOKEN}",
    f"http:\n  token: {TOKEN}\n  token: {TOKEN}\n",
    f"http: !!binary {TOKEN}",
    f"http: !!int {TOKEN}",
]
SETS = [
    f"control.curve.secret_key_file={KEYS.secret[:-2]}//",
    f"control.curve.secret_key_file=./{KEYS.secret[:-2]}",
    f"control.bind=/{KEYS.secret[:-1]}",
    f"http.token={TOKEN}",
    f"http.token={TOKEN}: [",
    f"http.token:{TOKEN}",
    TOKEN,
    f"http.port={TOKEN}",
    f"http.tokn={TOKEN}",
    f"control.curve.secret_key_file={KEYS.secret}",
]
VARIABLES = [
    {"KVBRIDGE_HTTP__TOKEN": TOKEN},
    {"KVBRIDGE_HTTP_TOKEN": TOKEN},
    {"KVBRIDGE_TOKEN": TOKEN},
    {"KVBRIDGE_HTTP": TOKEN},
    {"KVBRIDGE_HTTP__PORT": TOKEN},
    {"KVBRIDGE_HTTP": f'{{"token": "{TOKEN}", "port": "x"}}'},
]


def clean(text: str) -> None:
    assert text
    for secret in (TOKEN, KEYS.secret, KEYS.secret[1:-2], TOKEN[1:-1]):
        assert secret not in text, text


@pytest.mark.parametrize(
    ("text", "override"),
    [(text, None) for text in FILES] + [("", override) for override in SETS],
    ids=range(len(FILES) + len(SETS)),
)
def test_files_and_flags(tmp_path: Path, text: str, override: str | None):
    file = tmp_path / "config.yaml"
    file.write_text(text if text.startswith((TOKEN, "-")) else GOOD + text)
    arguments = ["--role", "prefill", "--config", str(file), *(["--set", override] if override else [])]
    for app, command in ((config_command.app, "show"), (keys_command.app, "check")):
        result = CliRunner().invoke(app, [command, *arguments], env={})
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        clean(result.output + result.stderr)


@pytest.mark.parametrize("environment", VARIABLES, ids=range(len(VARIABLES)))
def test_variables(tmp_path: Path, environment: dict[str, str]):
    file = tmp_path / "config.yaml"
    file.write_text(GOOD)
    try:
        config = load_config(PrefillConfig, file=file, environment=environment)
    except ConfigError as error:
        clean(str(error))
    else:
        clean(render_config(config) + repr(config) + str(config))


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for call in (
        lambda: read_secret(None, Path(TOKEN), key="http.token_file"),
        lambda: load_keys(tmp_path / "none"),
        lambda: read_allowed([KEYS.secret[1:]], None),
        lambda: read_allowed([f"{KEYS.secret} a b"], None),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        clean(str(caught.value))
    for content in (KEYS.secret[1:], KEYS.secret + KEYS.secret, f"key: {KEYS.secret}"):
        (tmp_path / "node.key").write_text(content)
        (tmp_path / "node.key").chmod(0o600)
        with pytest.raises(ConfigError) as caught:
            load_keys(tmp_path / "node.key")
        clean(str(caught.value))


def test_bootstrap_shows_neither_of_its_tokens():
    config = load_config(BootstrapConfig, environment={}, flags={"http.token": TOKEN, "daemons.token": TOKEN[::-1]})
    text = render_config(config) + repr(config)
    clean(text)
    assert TOKEN[::-1] not in text

"""From files, variables and flags to a configuration: precedence, origins, mistakes in words, and secrets that stay hidden."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from kvbridge.cli import config as cli, config as config_command, keys as keys_command
from kvbridge.cli.config import ROLES
from kvbridge.config.endpoints import TokenConfig
from kvbridge.config.loading import load_config, read_grants, read_secret, read_secrets, read_token, render_config
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.control.keys import generate_keys, load_keys, read_allowed
from kvbridge.core.errors import ConfigError

NODE = {"instance": "a", "model": {"preset": "tiny-v4"}, "pools": {"device": {"full": 8}}}


def load(kind=PrefillConfig, *, text: str = "", env=None, overrides=(), path: Path | None = None, **flags):
    """Load on top of the smallest valid configuration."""
    if path is not None:
        path.write_text(text)
    given = {"instance": "p0", "model": {"preset": "tiny-v4"}, "pools.device.full": 8, **flags}
    if kind is DecodeConfig:
        given.setdefault("pools.host.pages", 8)
    if kind is BootstrapConfig:
        given = dict(flags)
    return load_config(kind, file=path, environment=env or {}, overrides=overrides, flags=given)


def mistake(kind=PrefillConfig, **options) -> str:
    with pytest.raises(ConfigError) as raised:
        load(kind, **options)
    return str(raised.value)


def test_later_sources_win(tmp_path):
    file = tmp_path / "p.yaml"
    text = "http:\n  port: 1\n  host: localhost\n"
    env = {"KVBRIDGE_HTTP__PORT": "2"}
    assert load().http.port == 7901
    assert load(path=file, text=text).http.port == 1
    assert load(path=file, text=text, env=env).http.port == 2
    assert load(path=file, text=text, env=env, overrides=["http.port=3"]).http.port == 3
    last = load(path=file, text=text, env=env, overrides=["http.port=3"], **{"http.port": 4})
    assert (last.http.port, last.http.host) == (4, "localhost")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("KVBRIDGE_HTTP_PORT", "two underscores"), ("KVBRIDGE_BOOTSTRAP_SERVICE_HOST", "enableServiceLinks")],
)
def test_variables_that_look_like_settings_get_a_hint(name, hint):
    assert hint in mistake(env={name: "1"})


def test_a_wrong_value_is_shown_with_its_origin(tmp_path):
    file = tmp_path / "p.yaml"
    text = mistake(path=file, text="http: {port: 70000}\n", env={"KVBRIDGE_TIMEOUTS__OFFER_S": "soon"})
    assert "http.port: Input should be less than or equal to 65535, got 70000" in text
    assert f"(from {file} line 1)" in text
    assert "got 'soon' (from environment KVBRIDGE_TIMEOUTS__OFFER_S)" in text


def test_all_mistakes_are_listed_at_once():
    text = mistake(overrides=["http.port=-1", "timeouts.drain_s=0", "nonsense"], env={"KVBRIDGE_X": ""})
    assert all(part in text for part in ("http.port", "timeouts.drain_s", "--set nonsense", "KVBRIDGE_X"))


def test_a_wrong_secret_is_not_shown_and_an_empty_one_refused():
    text = mistake(overrides=["http.token=[hunter2]"])
    assert "http.token" in text
    assert "hunter2" not in text
    assert "token is empty" in mistake(**{"http.token": " "})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("- a\n- b\n", "expected a mapping"),
        ("a: [\n", "not valid YAML"),
        ("http: {port: 1}\nhttp: {port: 2}\n", "line 2: http is set twice, first on line 1"),
        ("http:\n  port: 1\n  port: 2\n", "line 3: http.port is set twice"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, content, expected):
    assert expected in mistake(path=tmp_path / "p.yaml", text=content)


def test_environment_names_ignore_case_and_what_begins_a_list_must_be_one():
    config = load(env={"kvbridge_Transports__ORDER": '["mooncake"]', "KVBRIDGE_CONFIG": "/x", "OTHER": "1"})
    assert [name.value for name in config.transports.order] == ["mooncake"]
    assert "environment KVBRIDGE_PARALLELISM__RANKS: not a valid list or mapping: line 1" in mistake(
        env={"KVBRIDGE_PARALLELISM__RANKS": "[{pp: 0"}
    )
    assert "parallelism.ranks: Input should be a valid" in mistake(env={"KVBRIDGE_PARALLELISM__RANKS": "pp0"})


def test_what_stands_behind_a_token_is_not_shown_to_others(tmp_path):
    """One file may be the `http.token_file` of daemons and the `token_file` of their callers."""
    file = tmp_path / "token"
    file.write_text("abc namespaces=*\nsecond namespaces=acme\nthird\n")
    section = TokenConfig(token_file=file)
    assert read_token(section, key="bootstrap.token_file") == "abc"
    grants = read_grants(section, key="http.token_file")
    assert [grant.token for grant in grants] == ["abc", "second", "third"]
    assert [str(grant.namespaces) for grant in grants] == ["any namespace", "'acme'", "the default one"]
    assert read_token(TokenConfig(), key="bootstrap.token_file") == ""


def test_secrets_come_from_files(tmp_path):
    file = tmp_path / "token"
    file.write_text("abc\n\n# the former one\nrest\n")
    assert read_secret(None, file, key="http.token_file") == "abc"
    assert read_secrets(None, file, key="http.token_file") == ("abc", "rest")
    assert read_secrets(None, None, key="-") == ()
    assert read_secret(load(**{"http.token": "xyz"}).http.token, None, key="-") == "xyz"
    assert read_secret(None, None, key="-") == ""
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"http\.token_file"):
        read_secret(None, file, key="http.token_file")
    with pytest.raises(ConfigError, match="cannot read"):
        read_secret(None, tmp_path / "none", key="http.token_file")


def test_a_rendered_configuration_loads_again_and_hides_secrets(tmp_path):
    rendered = render_config(load(DecodeConfig, **{"http.token": "hunter2"}))
    assert "hunter2" not in rendered
    file = tmp_path / "d.yaml"
    file.write_text(rendered)
    again = load_config(DecodeConfig, file=file, environment={})
    assert render_config(again) == rendered


def test_mappings_of_several_sources_merge_and_do_not_hide_one_another(tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("http: {port: 1, host: localhost}\n")
    http = load_config(
        BootstrapConfig,
        file=file,
        environment={"KVBRIDGE_HTTP": '{"max_wait_s": 5}'},
        overrides=["http={max_body_bytes: 9}", "http={}"],
        flags={"http": {"port": 7}},
    ).http
    assert (http.port, http.host, http.max_wait_s, http.max_body_bytes) == (7, "localhost", 5.0, 9)


def test_a_file_for_another_role_is_recognised(tmp_path):
    """A prefill node needs less than a decode node, so a small file of one has mistakes as the other's."""
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(NODE))
    with pytest.raises(ConfigError) as raised:
        load_config(DecodeConfig, file=file, environment={}, roles=ROLES)
    _, wrong, hint = str(raised.value).splitlines()
    assert "c4_kv would live in a host pool without pages" in wrong
    assert hint.endswith("c.yaml: as it stands, this is a valid prefill configuration")
    for values, environment in ((NODE | {"insance": "b"}, {}), (NODE, {"KVBRIDGE_NONSENSE": "1"})):
        file.write_text(yaml.safe_dump(values))
        with pytest.raises(ConfigError) as raised:
            load_config(PrefillConfig, file=file, environment=environment, roles=ROLES)
        assert "as it stands" not in str(raised.value)


def test_config_show_prints_the_merged_configuration(tmp_path):
    file = tmp_path / "b.yaml"
    file.write_text("http: {port: 1, token: hunter2}\n")
    arguments = ["--role", "bootstrap", "--config", str(file), "--set", "http.port=2"]
    result = CliRunner().invoke(cli.app, ["show", *arguments], env={})
    assert result.exit_code == 0, result.output
    assert "port: 2" in result.output
    assert "hunter2" not in result.output


STORE = {"tier.enabled": True, "tier.model_name": "m", "tier.model_revision": "1", "tier.host.pages": 8}


@pytest.mark.parametrize(
    ("store", "said"),
    [
        (
            "{kind: files, directory: /x, max_byte: 1GiB}",
            "tier.store.max_byte: unknown key, 'tier.store' has no 'max_byte'; did you mean 'max_bytes'?",
        ),
        ("{kind: files, directory: /x}", "tier.store.max_bytes: is required and has no default"),
        ("{kind: mooncake, master: here}", "tier.store.master: String should match pattern"),
        ("{kind: file, directory: /x, max_bytes: 1GiB}", "tier.store.kind: one of files, mooncake (from"),
    ],
)
def test_mistakes_in_a_section_of_several_kinds_name_the_keys_of_the_file(store, said):
    text = mistake(DecodeConfig, overrides=[*(f"{key}={value}" for key, value in STORE.items()), f"tier.store={store}"])
    assert said in text
    assert "store.files" not in text
    assert "store.mooncake" not in text


def test_what_follows_from_a_mistake_is_no_mistake():
    """The default of `runtime_dir` needs the instance's name; pydantic reports that it was not made, which is no news."""
    text = mistake(**{"http.port": "x"})
    assert "http.port" in text
    assert "runtime_dir" not in text


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
    try:
        config = load(path=tmp_path / "config.yaml", text=GOOD, env=environment)
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
    config = load(BootstrapConfig, **{"http.token": TOKEN, "daemons.token": TOKEN[::-1]})
    text = render_config(config) + repr(config)
    clean(text)
    assert TOKEN[::-1] not in text

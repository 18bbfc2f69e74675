"""`kvbridge init`: what it writes loads, fits together, and is refused where it would not."""

import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvbridge.cli.config import DaemonRole
from kvbridge.cli.init import POOL_BYTES
from kvbridge.cli.main import app
from kvbridge.cli.up import read_cluster
from kvbridge.config.schema import BootstrapConfig, DecodeConfig, PrefillConfig
from kvbridge.core.errors import ConfigError
from kvbridge.core.geometry.models import PRESETS
from kvbridge.daemon.layout import load_geometry, plan_memory


def init(folder: Path, *arguments: str):
    return CliRunner().invoke(app, ["init", str(folder), *arguments])


def written(folder: Path, *arguments: str) -> tuple[BootstrapConfig, PrefillConfig, DecodeConfig]:
    result = init(folder, *arguments)
    assert result.exit_code == 0, result.output
    bootstrap, prefill, decode = (daemon.config for daemon in read_cluster(folder))
    return bootstrap, prefill, decode


@pytest.mark.parametrize("arguments", [[], ["--one-host"], ["--complete"], ["--secure"]])
def test_what_it_writes_fits_together(tmp_path, arguments):
    bootstrap, prefill, decode = written(tmp_path / "c", *arguments)
    assert (bootstrap.http.port, prefill.http.port, decode.http.port) == (7900, 7901, 7902)
    assert prefill.bootstrap.url == decode.bootstrap.url == "http://127.0.0.1:7900"
    assert prefill.runtime_dir != decode.runtime_dir
    assert prefill.model == decode.model
    assert prefill.transports == decode.transports
    order = ["local"] if "--one-host" in arguments else ["local", "mooncake"]
    assert [name.value for name in prefill.transports.order] == order


@pytest.mark.parametrize("model", PRESETS)
def test_pools_of_every_model_can_be_laid_out_and_are_small(tmp_path, model):
    for config in written(tmp_path / "c", "--model", model)[1:]:
        assert 0 < plan_memory(config, load_geometry(config.model)).total_bytes <= POOL_BYTES


def test_secure_writes_keys_that_the_check_finds_good(tmp_path):
    bootstrap, prefill, decode = written(tmp_path / "c", "--secure")
    assert bootstrap.http.token_file == prefill.bootstrap.token_file == decode.bootstrap.token_file
    assert bootstrap.daemons.token_file == prefill.http.token_file == decode.http.token_file
    assert bootstrap.http.token_file.read_text() != prefill.http.token_file.read_text()
    secrets = [*(tmp_path / "c" / "keys").glob("*.key"), *(tmp_path / "c" / "keys").glob("*.token")]
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets} == {0o600}
    for role in DaemonRole:
        file = str(tmp_path / "c" / f"{role}.yaml")
        found = CliRunner().invoke(app, ["keys", "check", "--role", role, "--config", file])
        assert found.exit_code == 0, found.output
        if role is DaemonRole.PREFILL:
            peer = decode.control.curve.secret_key_file.with_suffix(".pub").read_text().strip()
            assert f"{peer} as decode-0" in found.output


def test_several_hosts(tmp_path):
    hosts = {"bootstrap": "10.0.0.1", "prefill": "10.0.0.2", "decode": "fd00::3"}
    arguments = [part for role, address in hosts.items() for part in ("--host", f"{role}={address}")]
    bootstrap, prefill, decode = written(tmp_path / "c", "--secure", *arguments)
    assert (bootstrap.http.host, prefill.http.host, decode.http.host) == tuple(hosts.values())
    assert prefill.bootstrap.url == decode.bootstrap.url == "http://10.0.0.1:7900"
    assert prefill.control.bind == "tcp://10.0.0.2:7911"
    assert (decode.transports.mooncake.host, decode.transports.mooncake.ipv6) == ("fd00::3", True)
    assert read_cluster(tmp_path / "c")[2].url == "http://[fd00::3]:7902"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "gpt-9"], "'gpt-9' is no file, and no model among deepseek-v4-flash"),
        (["--host", "prefill=10.0.0.2"], "others could reach prefill on 10.0.0.2; add --secure"),
        (["--host", "router=10.0.0.2"], "with a role of prefill, decode, bootstrap, got 'router=10.0.0.2'"),
        (["--secure", "--one-host", "--host", "prefill=10.0.0.2"], "prefill and decode have different addresses"),
        (["--secure", "--host", "prefill=a b"], "http.host"),
    ],
)
def test_what_would_not_work_is_refused_and_nothing_is_written(tmp_path, arguments, said):
    result = init(tmp_path / "c", *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("there", ["decode.yaml", "keys"])
def test_nothing_is_overwritten(tmp_path, there):
    (tmp_path / there).mkdir()
    result = init(tmp_path, "--secure")
    assert result.exit_code == 1
    assert f"{tmp_path / there}: exists" in result.stderr
    assert [each.name for each in tmp_path.iterdir()] == [there]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "decode.yaml").unlink(), "has no decode.yaml"),
        (lambda folder: shutil.copy(folder / "prefill.yaml", folder / "decode.yaml"), "prefill configuration"),
        (lambda folder: (folder / "bootstrap.yaml").write_text("http: {port: 0}"), "http.port is 0"),
    ],
)
def test_a_cluster_that_cannot_run_is_named(tmp_path, spoil, said):
    written(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ConfigError, match=said):
        read_cluster(tmp_path)

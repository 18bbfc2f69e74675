"""The exit codes of daemons: what gets better by itself, and what does not."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from kvbridge.cli import daemons
from kvbridge.cli.config import EXIT_CONFIG, EXIT_FAILED, EXIT_UNAVAILABLE
from kvbridge.config.loading import read_secret
from kvbridge.control.keys import load_keys
from kvbridge.control.sockets import bind_error
from kvbridge.control.unix_sockets import group_number, prepare_runtime_directory
from kvbridge.core.errors import BridgeError, ConfigError, ConflictError, PeerError
from kvbridge.daemon.layout import read_hf_config
from kvbridge.http.server import TlsFiles, _listen


def code_of(error: BridgeError, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a daemon that ends with this error."""
    monkeypatch.setattr(daemons, "raise_open_files", lambda: None)

    def build() -> daemons.Daemon:
        raise error

    with pytest.raises(typer.Exit) as ended:
        daemons._run(build)
    return ended.value.exit_code


def raised(call: Callable[[], object]) -> BridgeError:
    with pytest.raises(BridgeError) as found:
        call()
    return found.value


def open_to_all(path: Path) -> Path:
    path.write_text("k" * 40)
    path.chmod(0o644)
    return path


@pytest.mark.outside
def test_what_is_missing_or_held_now_may_be_there_at_the_next_start(tmp_path, monkeypatch, capsys):
    """A service manager starts such a daemon again; after a wrong configuration it does not."""
    missing, empty, short = tmp_path / "missing", tmp_path / "empty", tmp_path / "short.key"
    empty.touch()
    short.write_text("k" * 39)
    short.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        unavailable = [
            raised(lambda: _listen("127.0.0.1", port)),
            raised(lambda: _listen("192.0.2.1", 0)),
            raised(lambda: read_secret(None, missing, key="http.token_file")),
            raised(lambda: read_secret(None, empty, key="http.token_file")),
            raised(lambda: load_keys(missing)),
            raised(lambda: load_keys(open_to_all(tmp_path / "loose.key"))),
            raised(TlsFiles(missing, missing).read),
            raised(lambda: read_hf_config(missing)),
            raised(lambda: prepare_runtime_directory(Path("/proc/kvbridge"))),
            raised(lambda: group_number("kvbridge-no-such-group")),
            bind_error("tcp://127.0.0.1:7801", 98, "Address already in use"),
            bind_error("tcp://192.0.2.1:7801", 99, "Cannot assign requested address"),
            ConflictError("another process serves worker.sock"),
        ]
    wrong = [
        ConfigError("the configuration is wrong"),
        raised(lambda: load_keys(short)),
        bind_error("tcp://127.0.0.1:1", 13, "Permission denied"),
    ]
    broken = [PeerError("its workers cannot be started")]
    for code, errors in ((EXIT_UNAVAILABLE, unavailable), (EXIT_CONFIG, wrong), (EXIT_FAILED, broken)):
        assert {str(error): code_of(error, monkeypatch) for error in errors} == dict.fromkeys(map(str, errors), code)
    assert "daemon_failed" in "".join(capsys.readouterr())

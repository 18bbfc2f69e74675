"""The file in which a daemon says where it is."""

import os

import pytest

from kvbridge.api.endpoint_file import ENDPOINT_FILE, DaemonEndpoint, read_endpoint, write_endpoint
from kvbridge.core.errors import ConfigError


def test_the_file_of_another_user_is_refused_and_half_of_one_is_none_yet(tmp_path, monkeypatch):
    assert read_endpoint(tmp_path) is None
    write_endpoint(tmp_path, DaemonEndpoint(role="prefill", incarnation="i", pid=1, http_url="http://127.0.0.1:1"))
    assert read_endpoint(tmp_path) is not None
    monkeypatch.setattr("kvbridge.api.endpoint_file.os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=f"was written by user {os.getuid()}, not by user {os.getuid() + 1}"):
        read_endpoint(tmp_path)
    monkeypatch.undo()
    (tmp_path / ENDPOINT_FILE).write_text("{")
    assert read_endpoint(tmp_path) is None

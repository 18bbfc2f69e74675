"""How an engine finds its node."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvbridge.core.errors import BridgeError
from kvbridge.engine import DecodeEngine


def test_the_runtime_directory_may_be_relative_to_where_the_engine_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `cluster/run/decode`: what is missing is the daemon, not a slash."""
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as folder:
        monkeypatch.chdir(folder)
        (Path(folder) / "run").mkdir(mode=0o700)
        with pytest.raises(BridgeError) as raised:
            DecodeEngine.attach("run", call_timeout_s=0.1)
    assert "must be absolute" not in str(raised.value)

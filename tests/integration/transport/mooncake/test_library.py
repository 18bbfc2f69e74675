"""Refusals of mooncake, without a peer; each environment in a process of its own, since it is read once."""

import os
import subprocess
import sys

import pytest

from kvbridge.config.transports import MooncakeProtocol
from kvbridge.core.errors import TransportError
from kvbridge.transport.mooncake import library as mooncake_library
from kvbridge.transport.mooncake.library import require_adapter, why_no_device_memory

SLOW_START_S = 100
"""An interpreter with the library takes a second; on a machine that has stalled, more than a minute."""
NONE_FOUND = '{"cpu:0": [[], []]}'


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}  # of tests before this one
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SLOW_START_S, check=False)
    assert done.returncode == 0, f"it ended with {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout


def test_adapter_is_required_in_the_topology() -> None:
    require_adapter('{"cpu:0": [["mlx5_0"], []], "cuda:0": [[], ["mlx5_0"]]}', "")
    for topology in (NONE_FOUND, "{}", "not json", "[1]"):
        with pytest.raises(TransportError, match="no RDMA adapter among mlx5_7 and would use TCP"):
            require_adapter(topology, "mlx5_7")


def test_settings_that_the_library_reads_once_must_agree_and_reach_it() -> None:
    code = """
import os
from kvbridge.config.transports import MooncakeSettings, TransportSettings
from kvbridge.core.errors import ConfigError
from kvbridge.transport import create_transport
def make(**changes):
    return create_transport("mooncake", TransportSettings(mooncake=MooncakeSettings(**changes)))
make(progress_timeout_s=3)
make(progress_timeout_s=3, window_operations=5)
print(os.environ["MC_TCP_PROGRESS_TIMEOUT_SEC"], os.environ["MC_TRANSFER_TIMEOUT"])
try:
    make(progress_timeout_s=4, transfer_timeout_s=9)
except ConfigError as error:
    print(error)
"""
    output = python(code)
    assert output.startswith("3 30\n")
    assert "MC_TCP_PROGRESS_TIMEOUT_SEC, MC_TRANSFER_TIMEOUT once a process" in output


def test_only_the_backend_asked_for_is_loaded() -> None:
    code = """
import sys
import kvbridge.transport
from kvbridge.config.transports import TransportSettings
print(sorted(name for name in sys.modules if name.startswith(("mooncake", "nixl", "kvbridge.transport."))))
kvbridge.transport.create_transport("mooncake", TransportSettings())
print("mooncake.engine" in sys.modules, any(name.startswith("nixl") for name in sys.modules))
"""
    assert python(code).splitlines() == [
        "['kvbridge.transport.base', 'kvbridge.transport.threads']",
        "True False",
    ]


def test_device_memory_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would take it over TCP, and say that it is written before it is."""
    installed: set[str] = set()
    monkeypatch.setattr(mooncake_library.importlib.metadata, "distributions", lambda name: installed & {name})
    assert "non-CUDA build" in why_no_device_memory(MooncakeProtocol.RDMA)
    for distribution in mooncake_library.CUDA_DISTRIBUTIONS:
        installed.clear()
        installed.add(distribution)
        assert "rdma, or transports.order to local" in why_no_device_memory(MooncakeProtocol.TCP)
        assert why_no_device_memory(MooncakeProtocol.RDMA) == ""

"""The configuration of a node beside vLLM: vLLM's part, the user's part, and settings that are refused."""

import fcntl
import os
import stat
import tempfile
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config.loading import load_config
from kvbridge.config.schema import DecodeConfig, PrefillConfig, fits_sockets
from kvbridge.config.transports import TransportName
from kvbridge.core.errors import ConfigError, ConflictError, UnsupportedError
from kvbridge.core.geometry.manifest import fingerprint
from kvbridge.core.ids import Rank, Role
from kvbridge.daemon.layout import load_geometry, plan_memory
from kvbridge.engine.kit import node as node_module
from kvbridge.engine.kit.node import (
    NodePlace,
    NodePlan,
    NodeProcess,
    node_config,
    own_directory,
    remove_orphans,
    write_node,
)
from kvbridge.engine.kit.tensors import instance_cache, rank_cache
from kvbridge.engine.sglang import SGLANG
from kvbridge.engine.vllm import VLLM
from kvbridge.transport import is_installed
from tests.helpers.vllm_links import TOKENS, caches

ENGINE = "0a3c5f52-9c7e-4d0e-8a35-1d1f3e1f7a11_dp0"
RANKS = [Rank(pp=pp, tp=tp) for pp in range(2) for tp in range(2)]
CACHE = instance_cache(
    {
        rank: rank_cache(caches(range(3 * rank.pp, 3 + rank.pp), 2, 6), block_tokens=TOKENS, product=VLLM)
        for rank in RANKS
    },
    name="tiny",
    kv_heads=4,
    facts={"attention_backend": "CPU_ATTN"},
)
HERE = {Rank(pp=1, tp=0): "cpu", Rank(pp=1, tp=1): "cuda:3"}


def place(role: Role, extra: dict[str, Any], engine_id: str = ENGINE) -> NodePlace:
    return NodePlace(VLLM, role, engine_id, extra)


def plan(role: Role = Role.PREFILL, **extra: Any) -> NodePlan:
    return NodePlan(place(role, extra), CACHE, tp_size=2, devices=HERE)


@pytest.mark.parametrize(("role", "kind"), [(Role.PREFILL, PrefillConfig), (Role.DECODE, DecodeConfig)])
def test_a_daemon_takes_what_is_written_and_knows_the_tensors(role, kind, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home:
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        written, file, owned = write_node(
            plan(role, http={"token": "a-secret"}, timeouts={"room_s": 100}, node="node-1")
        )
        owned.close()
        read = load_config(kind, file=file, environment={})
        assert read == written
        assert (read.instance, read.node, read.timeouts.room_s) == (ENGINE, "node-1", 100)
        assert (read.http.port, read.http.token.get_secret_value()) == (0, "a-secret")
        geometry = load_geometry(read.model)
        assert fingerprint(geometry) == fingerprint(CACHE.geometry)
        layout = plan_memory(read, geometry)
        assert layout.node_bytes == 0
        assert set(layout.parts) == set(HERE)
        assert {layer for part in layout.parts.values() for layer in part.layers} == {3}
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (read.runtime_dir, file)]
        assert modes == [0o700, 0o600]


@pytest.mark.parametrize(
    ("role", "extra", "complaint"),
    [
        (Role.PREFILL, {"transport": {"order": ["nixl"]}}, "transport: unknown key, .* did you mean 'transports'"),
        (Role.DECODE, {"timeouts": {"room_s": "long"}}, "timeouts.room_s: .*kv_connector_extra_config"),
        (Role.DECODE, {"decode": {"timeouts": {"room_s": 0}}}, r"from kv_connector_extra_config\.decode"),
        (Role.DECODE, {"decode": 1}, "kv_connector_extra_config.decode: expected a section"),
        (Role.PREFILL, {"pools": {"memory": "owned"}}, "kv_connector_extra_config.pools: is decided by vLLM"),
        (Role.DECODE, {"decode": {"model": {}}}, "kv_connector_extra_config.decode.model: is decided by vLLM"),
        (Role.PREFILL, {"runtime_dir": "/run/kvbridge", "http": {}}, "a prefill node that you run, so http would have no effect"),
    ],
)  # fmt: skip
def test_what_the_user_got_wrong_is_named(role: Role, extra: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        node_config(plan(role, **extra))


def test_a_library_that_is_not_installed_is_done_without_or_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "is_installed", lambda name: name == "local")
    with pytest.raises(ConfigError, match="local alone, which does not reach host memory"):
        node_config(plan())
    on_gpu = replace(plan(transports={"mooncake": {"host": "10.0.0.1"}}), devices=dict.fromkeys(HERE, "cuda:0"))
    config, values = node_config(on_gpu)  # not even reachable from there
    assert config.transports.order == ("local",)
    assert values["transports"]["order"] == ["local"]
    with pytest.raises(ConfigError, match=r"transports\.order names nixl.*pip install.*take nixl out"):
        node_config(plan(transports={"order": ["local", "nixl"]}))


def test_what_is_installed_here_is_known() -> None:
    assert {name: is_installed(name) for name in TransportName} == dict.fromkeys(TransportName, True)


@pytest.mark.parametrize("role", Role)
def test_what_others_can_reach_has_keys_or_is_told_insecure(role: Role) -> None:
    open_to_others = {"transports": {"mooncake": {"host": "10.0.0.1"}}}
    with pytest.raises(UnsupportedError, match=r"has no keys.*control\.curve.*insecure"):
        node_config(plan(role, **open_to_others))
    keys = {"control": {"curve": {"secret_key_file": "/etc/kvbridge/vllm.key"}}}
    for way_out in (keys, {"insecure": True}, {role: {"insecure": True}}):
        config, _ = node_config(plan(role, **open_to_others, **way_out))
        assert config.transports.mooncake.host == "10.0.0.1"
    node_config(plan(role, transports={"order": ["local", "nixl"], "mooncake": {"host": "10.0.0.1"}}))


@pytest.mark.parametrize("home", [None, "/run/user/1000", "/" + "x" * 80])
@pytest.mark.parametrize("temporary", ["/tmp", "/" + "y" * 80])
def test_directories_are_short_and_each_engine_and_role_has_its_own(home, temporary, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    if home is not None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    first, again = (
        {place(role, {}, engine).runtime_dir for role in Role for engine in (ENGINE, "other", "x" * 300)}
        for _ in range(2)
    )
    assert len(first) == 6
    assert first == again
    assert all(map(fits_sockets, first))
    assert home == "/run/user/1000" or all(f"kvbridge-{os.getuid()}-" in str(one) for one in first)


def test_a_node_that_somebody_runs_is_where_it_was_said() -> None:
    assert place(Role.PREFILL, {}).operated is None
    extra = {"prefill": {"runtime_dir": "/run/p"}, "decode": {"runtime_dir": "/run/d"}}
    assert [place(role, extra).operated for role in Role] == [Path("/run/p"), Path("/run/d")]
    assert place(Role.DECODE, {"runtime_dir": "/run/x"}).runtime_dir == Path("/run/x")


@pytest.mark.parametrize("engine_id", [ENGINE, "a b/c", "_x", "é" * 200, "", "y" * 101])
def test_any_engine_id_makes_a_name(engine_id: str) -> None:
    named = place(Role.PREFILL, {}, engine_id)
    config, _ = node_config(replace(plan(), place=named))
    assert config.instance == named.instance
    assert place(Role.PREFILL, {}, engine_id + "z").instance != named.instance


def test_directories_of_a_vllm_that_was_killed_are_removed_and_no_others(tmp_path: Path) -> None:
    names = ["kvbridge-0-vllm-prefill-1", "kvbridge-vllm-decode-2", "kvbridge-0-vllm-decode-3", "kvbridge-0-prefill"]
    held = [own_directory(tmp_path / name) for name in names]
    (tmp_path / "kvbridge-0-vllm-decode-4").mkdir()
    for one in (0, 1, 3):
        held[one].close()
    remove_orphans(tmp_path, VLLM)
    assert sorted(path.name for path in tmp_path.iterdir()) == [names[3], names[2], "kvbridge-0-vllm-decode-4"]
    held[2].close()


@pytest.fixture
def runtime_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvb-", dir="/tmp") as home:
        monkeypatch.setenv("XDG_RUNTIME_DIR", home)
        yield Path(home)


def test_the_files_of_a_node_that_starts_are_no_orphans_though_its_vllm_was_killed_before(runtime_home: Path) -> None:
    """Two servers that restart together, each with a fixed engine id, look for orphans at the same time."""
    write_node(plan()).owned.close()
    again = write_node(plan())
    remove_orphans(runtime_home, VLLM)
    assert again.file.exists()
    with pytest.raises(ConflictError, match="another process has the directory"):  # though no node listens in it
        write_node(plan())
    again.owned.close()
    write_node(plan()).owned.close()
    remove_orphans(runtime_home, VLLM)
    assert not list(runtime_home.iterdir())


@pytest.mark.parametrize("when", ["before the lock is taken", "before the file is opened"])
def test_a_directory_that_is_removed_meanwhile_is_nobodys_and_can_be_had_at_the_next_try(
    when: str, runtime_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its next owner would have a lock on a file that nobody finds any more."""
    place = runtime_home / "kvbridge-vllm-prefill-1"
    own_directory(place).close()
    module, name = (
        (fcntl, "flock") if when == "before the lock is taken" else (node_module, "prepare_runtime_directory")
    )
    kept = getattr(module, name)

    def removed_meanwhile(*given: Any) -> Any:
        monkeypatch.undo()
        if module is fcntl:
            remove_orphans(runtime_home, VLLM)
            return kept(*given)
        made = kept(*given)
        remove_orphans(runtime_home, VLLM)
        return made

    monkeypatch.setattr(module, name, removed_meanwhile)
    with pytest.raises(ConflictError, match="or removes it"):
        own_directory(place)
    held = own_directory(place)
    remove_orphans(runtime_home, VLLM)
    assert place.exists()
    held.close()


def test_a_node_is_started_again_though_the_one_before_could_not_be_followed() -> None:
    """For example when no descriptor is left for a moment."""
    node, runs = NodeProcess.__new__(NodeProcess), iter([OSError("no descriptors are left"), "exit code 0"])
    node._role, node.ends, node._closing = Role.DECODE, deque(), threading.Event()
    node._closing.wait = lambda *_: False

    def run() -> str:
        match next(runs):
            case str() as how:
                node._closing.set()
                return how
            case error:
                raise error

    node._run = run
    node._keep()
    assert (list(runs), list(node.ends)) == ([], ["it could not be followed: OSError: no descriptors are left"])


@pytest.mark.parametrize(("extra", "wait_s"), [({}, 60), ({"timeouts": {"early_offer_s": 5}}, 5)])
def test_a_node_beside_sglang_waits_for_a_scheduler_that_computes_a_long_chunk(extra, wait_s):
    beside = replace(plan(), place=NodePlace(SGLANG, Role.PREFILL, ENGINE, extra))
    config, _ = node_config(beside)
    assert (config.timeouts.early_offer_s, config.timeouts.control_heartbeat_s) == (wait_s, 1)

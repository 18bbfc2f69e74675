"""Daemons that end and start again with pools that are kept: what their prefixes were is there, byte for byte, or is not used."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import BackupPolicy, CopyBackend
from kvbridge.core.ids import Role
from kvbridge.daemon.memory import file_prefix
from kvbridge.daemon.twin_journal import Contents, read_journal
from kvbridge.engine import DecodeRoom, PrefillRoom
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import http, live_cluster, status
from tests.helpers.matrices import kept
from tests.integration.test_load_back import PAGE, Conversation, Setting, Tiers

SETTING = Setting(HostLayout.LAYER_FIRST, DeviceLayout.LAYER_FIRST, CopyBackend.KERNEL, BackupPolicy.WRITE_THROUGH)
TIER = {"enabled": True, "model_name": "tiny", "model_revision": "1"}
DEVICE = {"full": 24, "swa": 12, "request": 6}
KEEP_S = 600

pytestmark = pytest.mark.timeout(300)  # a pair of daemons is started up to three times


def instance(role: Role) -> str:
    """Of this process of the tests alone: kept pools are found by it."""
    return f"warm-{role}-{os.getpid()}"


def files(role: Role) -> list[Path]:
    prefix = file_prefix(instance(role), f"{role}-node-0")
    return sorted(DEFAULT_DIRECTORY.glob(f"{prefix}keep*"))


def journal(role: Role) -> Contents:
    [found] = [path for path in files(role) if path.name.endswith(".journal")]
    return read_journal(found.read_bytes())[1]


def settings(role: Role, **host: Any) -> dict[str, Any]:
    checkpoints = {"checkpoint_pages": 24} if role is Role.PREFILL else {}
    pools: dict[str, Any] = {"device": DEVICE, "keep_s": KEEP_S}
    pools |= {"host": {"pages": 48}} if role is Role.DECODE else {}
    return {
        "instance": instance(role),
        "pools": pools,
        "tier": TIER | {"host": {"pages": 48} | checkpoints | host},
    }


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    try:
        with live_cluster(prefill=settings(Role.PREFILL), decode=settings(Role.DECODE)) as running:
            yield Tiers(running, SETTING)
            running.no_traceback()
    finally:
        for path in (*files(Role.PREFILL), *files(Role.DECODE)):
            path.unlink()


def crossed(conversation: Conversation, tokens: int) -> tuple[PrefillRoom, DecodeRoom]:
    """Have it cross, and wait until both journals have all of its pages, and prefill's every checkpoint that was asked for."""
    begun, claimed = conversation.cross(tokens)
    keys = conversation.keys(tokens).in_namespace("")
    for role in Role:
        eventually("in the journal", lambda role=role: {*keys} <= {page.key for page in journal(role).pages.values()})
    ends = {keys[stop // PAGE - 1] for stop in begun.checkpoints}
    eventually("its checkpoints, too", lambda: ends <= journal(Role.PREFILL).checkpoints.keys())
    return begun, claimed


def warmed(tiers: Tiers, number: int, pages: int) -> Conversation:
    """A conversation that both journals have, its checkpoint too."""
    conversation = Conversation(tiers, number)
    begun, _ = crossed(conversation, pages * PAGE + 9)
    assert pages * PAGE in begun.checkpoints
    return conversation


def end(tiers: Tiers, how: signal.Signals) -> None:
    for daemon in tiers.both:
        if how is signal.SIGKILL:
            daemon.kill()
        else:
            assert daemon.stop() == 0
    tiers.live.detach()


def end_and_start(tiers: Tiers, how: signal.Signals, **changed: Any) -> None:
    """End both nodes, with engines attached, and start them again. `changed`: of `tier.host`, from then on."""
    end(tiers, how)
    for role, daemon in zip((Role.PREFILL, Role.DECODE), tiers.both, strict=True):
        daemon.config |= settings(role, **changed)
        daemon.start()
    tiers.live.cluster.wait_ready()
    assert tiers.live.sender
    assert tiers.live.reader


def lines(daemon: DaemonProcess, event: str) -> list[str]:
    return [line for line in daemon.log(10_000).splitlines() if f'"event": "{event}"' in line]


def on_host(daemon: DaemonProcess) -> int:
    return int(status(daemon)["host_tier"]["host_pages"])


@pytest.mark.parametrize("how", [signal.SIGKILL, kept(signal.SIGTERM, False)])
def test_what_was_on_the_host_is_found_and_used(tiers: Tiers, how: signal.Signals) -> None:
    conversation = warmed(tiers, 1, 4)
    end_and_start(tiers, how)
    for daemon in tiers.both:
        eventually("taken up", lambda daemon=daemon: on_host(daemon) == 4)
        assert status(daemon)["pools"]["full_twin"]["cached"] == 4
    begun, claimed = crossed(conversation, 6 * PAGE + 9)
    assert (begun.host_tokens, claimed.host_tokens) == (4 * PAGE, 4 * PAGE)
    for daemon in tiers.both:
        assert not lines(daemon, "kept_pools_refused")
        [restored] = eventually("looked at", lambda daemon=daemon: lines(daemon, "prefixes_restored"))
        assert '"lost": 0' in restored
        found = status(daemon)["kept_pools"]
        assert (found["restored_pages"], found["waiting_pages"], found["lost_pages"], found["refused"]) == (4, 0, 0, "")
        assert found["restored_bytes"] > 0
    end_and_start(tiers, how)  # and once more, with what has come since
    begun, claimed = conversation.cross(7 * PAGE + 9)
    assert (begun.host_tokens, claimed.host_tokens) == (6 * PAGE, 6 * PAGE)


def test_a_page_that_changed_meanwhile_is_not_used(tiers: Tiers) -> None:
    conversation = warmed(tiers, 2, 4)
    end(tiers, signal.SIGTERM)
    for role, daemon in zip((Role.PREFILL, Role.DECODE), tiers.both, strict=True):
        held = journal(role).pages
        [pool] = [path for path in files(role) if ".twins." in path.name]
        with pool.open("r+b") as file:  # layer_first: the pages of one layer are the first of the file
            size = pool.stat().st_size
            for start in range(0, size, size // 512):
                file.seek(start)
                byte = file.read(1)
                file.seek(start)
                file.write(bytes([byte[0] ^ 0xFF]))
        assert held
        daemon.start()
    tiers.live.cluster.wait_ready()
    assert tiers.live.sender
    assert tiers.live.reader
    for daemon in tiers.both:
        [restored] = eventually("looked at", lambda daemon=daemon: lines(daemon, "prefixes_restored"))
        assert '"lost": 0' not in restored
    begun, claimed = conversation.cross(4 * PAGE + 9)  # compares every byte
    assert begun.host_tokens < 4 * PAGE
    assert claimed.host_tokens < 4 * PAGE


@pytest.mark.thorough
def test_a_pool_of_another_layout_is_refused_and_made_anew(tiers: Tiers) -> None:
    conversation = warmed(tiers, 3, 3)
    end_and_start(tiers, signal.SIGTERM, layout="page_first")
    for daemon in tiers.both:
        assert "its layout is" in lines(daemon, "kept_pools_refused")[0]
        assert "its layout is" in status(daemon)["kept_pools"]["refused"]
        assert status(daemon)["kept_pools"]["refused_pages"] == 3
        assert on_host(daemon) == 0
    begun, claimed = conversation.cross(3 * PAGE + 9)
    assert (begun.host_tokens, claimed.host_tokens) == (0, 0)


@pytest.mark.thorough
def test_what_was_dropped_does_not_come_back(tiers: Tiers) -> None:
    conversation = warmed(tiers, 4, 3)
    tiers.forget()
    for role, daemon in zip((Role.PREFILL, Role.DECODE), tiers.both, strict=True):
        daemon.endpoint()
        assert status(daemon)["host_tier"]["host_pages"] == 3
        dropped = http("DELETE", daemon, "/v1/prefixes")
        assert dropped.json()["dropped_pages"] == 3
        assert not journal(role).pages
    end_and_start(tiers, signal.SIGKILL)
    begun, claimed = conversation.cross(3 * PAGE + 9)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (0, 0)

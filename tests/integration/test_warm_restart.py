"""Daemons that end and start again with pools that are kept: what their prefixes were is there, byte for byte, or is not used."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbridge.core.ids import Role
from kvbridge.daemon.kept_pools import Contents, read_journal
from kvbridge.daemon.memory import file_prefix
from kvbridge.pool.memory.shared_mapping import DEFAULT_DIRECTORY
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.conversation import MODEL, PAGE, Conversation, Turn
from tests.helpers.host_tiers import host_tier
from tests.helpers.live_rooms import LiveCluster, live_cluster, status
from tests.helpers.matrices import kept

DEVICE = {"full": 24, "swa": 12, "request": 6}
KEEP_S = 600

pytestmark = pytest.mark.timeout(300)  # a pair of daemons is started up to three times


def instance(role: Role) -> str:
    """For this process of the tests alone: kept pools are found by it."""
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
    return {"instance": instance(role), "pools": pools, "tier": MODEL | {"host": {"pages": 48} | checkpoints | host}}


@pytest.fixture
def live() -> Iterator[LiveCluster]:
    try:
        with live_cluster(prefill=settings(Role.PREFILL), decode=settings(Role.DECODE)) as running:
            yield running
            running.no_traceback()
    finally:
        for path in (*files(Role.PREFILL), *files(Role.DECODE)):
            path.unlink()


def in_journals(talk: Conversation, tokens: int) -> Turn:
    """Have it cross, and wait until both journals have all of its pages, and prefill's every checkpoint that was asked for."""
    turn = talk.cross(tokens)
    keys = turn.keys.in_namespace("")
    for role in Role:
        eventually("in the journal", lambda role=role: {*keys} <= {page.key for page in journal(role).pages.values()})
    assert turn.begun is not None
    ends = {keys[stop // PAGE - 1] for stop in turn.begun.checkpoints}
    eventually("its checkpoints, too", lambda: ends <= journal(Role.PREFILL).checkpoints.keys())
    return turn


def warmed(live: LiveCluster, number: int, pages: int) -> Conversation:
    """A conversation that both journals have, its checkpoint too."""
    turn = in_journals(Conversation(live, number), pages * PAGE + 9)
    assert turn.begun is not None
    assert pages * PAGE in turn.begun.checkpoints
    return turn.talk


def end(live: LiveCluster, how: signal.Signals) -> None:
    for daemon in live.nodes:
        if how is signal.SIGKILL:
            daemon.kill()
        else:
            assert daemon.stop() == 0
    live.detach()


def start(live: LiveCluster, **changed: Any) -> None:
    """Start both nodes again. `changed`: of `tier.host`, from then on."""
    for role, daemon in zip((Role.PREFILL, Role.DECODE), live.nodes, strict=True):
        daemon.config |= settings(role, **changed)
        daemon.start()
    live.cluster.wait_ready()


def lines(daemon: DaemonProcess, event: str) -> list[str]:
    return [line for line in daemon.log(10_000).splitlines() if f'"event": "{event}"' in line]


@pytest.mark.parametrize("how", [signal.SIGKILL, kept(signal.SIGTERM, False)])
def test_what_was_on_the_host_is_found_and_used(live: LiveCluster, how: signal.Signals) -> None:
    talk = warmed(live, 1, 4)
    end(live, how)
    start(live)
    for daemon in live.nodes:
        eventually("taken up", lambda daemon=daemon: host_tier(daemon)["host_pages"] == 4)
        assert status(daemon)["pools"]["full_twin"]["cached"] == 4
    assert in_journals(talk, 6 * PAGE + 9).from_host == (4 * PAGE, 4 * PAGE)
    for daemon in live.nodes:
        assert not lines(daemon, "kept_pools_refused")
        [restored] = eventually("looked at", lambda daemon=daemon: lines(daemon, "prefixes_restored"))
        assert '"lost": 0' in restored
        found = status(daemon)["kept_pools"]
        assert (found["restored_pages"], found["waiting_pages"], found["lost_pages"], found["refused"]) == (4, 0, 0, "")
        assert found["restored_bytes"] > 0
    end(live, how)
    start(live)  # and once more, with what has come since
    assert talk.cross(7 * PAGE + 9).from_host == (6 * PAGE, 6 * PAGE)


def test_a_page_that_changed_meanwhile_is_not_used(live: LiveCluster) -> None:
    talk = warmed(live, 2, 4)
    end(live, signal.SIGTERM)
    for role in (Role.PREFILL, Role.DECODE):
        assert journal(role).pages
        [pool] = [path for path in files(role) if ".twins." in path.name]
        with pool.open("r+b") as file:  # layer_first: the pages of one layer are the first of the file
            size = pool.stat().st_size
            for place in range(0, size, size // 512):
                file.seek(place)
                byte = file.read(1)
                file.seek(place)
                file.write(bytes([byte[0] ^ 0xFF]))
    start(live)
    for daemon in live.nodes:
        [restored] = eventually("looked at", lambda daemon=daemon: lines(daemon, "prefixes_restored"))
        assert '"lost": 0' not in restored
    assert max(talk.cross(4 * PAGE + 9).from_host) < 4 * PAGE

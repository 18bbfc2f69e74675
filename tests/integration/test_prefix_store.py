"""Prefixes in a store below host memory, through real daemons: they come back when device and host have nothing of them any more.

Bytes follow from a conversation and the place of a row, and all are looked at, windows and states included.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.stores import StoreSettings
from kvbridge.config.tier import BackupPolicy, CopyBackend
from tests.contract.stores_harness import KINDS, settings_of
from tests.helpers.cluster import DaemonProcess, eventually
from tests.helpers.live_rooms import all_free, http, live_cluster, metric, status
from tests.helpers.mooncake_servers import MooncakeServers
from tests.helpers.stopping import stop
from tests.integration.test_load_back import PAGE, Conversation, Setting, Tiers

SETTING = Setting(HostLayout.PAGE_FIRST, DeviceLayout.LAYER_FIRST, CopyBackend.KERNEL, BackupPolicy.WRITE_THROUGH)
PREFETCH_S, PUT_S = 4.0, 8.0
"""Long: nothing is missed for being slow on a machine that is busy."""
BUSY_S = 10.0
"""What a request may take besides on such a machine."""
REVIVED_S = 120.0
"""For a store's process to be there again, and to be asked."""

pytestmark = pytest.mark.timeout(3 * REVIVED_S)
Below = tuple[StoreSettings, MooncakeServers | None]


@pytest.fixture(scope="module", params=KINDS)
def below(request: pytest.FixtureRequest) -> Iterator[Below]:
    """A store of the module's own."""
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="kvbridge-test-") as path,
        settings_of(request.param, Path(path)) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def tiers(below: Below) -> Iterator[Tiers]:
    tier: dict[str, Any] = {
        "enabled": True,
        "model_name": "tiny",
        "model_revision": "1",
        "store": below[0].model_dump(mode="json"),
        "prefetch_s": PREFETCH_S,
        "store_limits": {"failures": 2, "remember_s": 0.0, "settle_s": 1.0, "put_s": PUT_S},
    }
    host = {"pages": 64, "layout": SETTING.host.value, "backend": SETTING.backend.value}
    with live_cluster(
        prefill={"tier": tier | {"host": host | {"checkpoint_pages": 16}}},
        decode={"tier": tier | {"host": host}},
        pages={"full": 24, "swa": 12, "request": 6},
        host_pages=96,
    ) as running:
        assert running.sender
        assert running.reader
        yield Tiers(running, SETTING)
        running.no_traceback()


@pytest.fixture(autouse=True)
def _stores_work(tiers: Tiers) -> Iterator[None]:
    for daemon in tiers.both:
        eventually("its store is asked", lambda daemon=daemon: revived(tiers, daemon), REVIVED_S)
    yield
    for daemon in tiers.both:
        all_free(daemon)
        eventually("no page is kept from others", lambda daemon=daemon: not status(daemon)["quarantine"])


def store(daemon: DaemonProcess) -> dict[str, Any]:
    found = status(daemon)["store"]
    assert found is not None
    return dict(found)


def process_starts(daemon: DaemonProcess) -> float:
    return metric(daemon, "kvbridge_store_process_starts_total")


def stored(tiers: Tiers) -> None:
    """Wait until all that the devices have is on the host, and all of that in the store."""
    tiers.on_host()
    for daemon in tiers.both:

        def settled(daemon: DaemonProcess = daemon) -> bool:
            found = store(daemon)
            return not (found["waiting_prompts"] or found["unsettled"] or status(daemon)["prefixes"]["readers"])

        eventually(f"{daemon.name} has written", settled, REVIVED_S)


def forget(tiers: Tiers) -> None:
    """Device and host forget everything."""
    for daemon in tiers.both:
        all_free(daemon)
        assert http("DELETE", daemon, "/v1/prefixes", params={"store": "keep"}).json()["store"]["outcome"] == "kept"
        counts = status(daemon)["pools"]
        assert not counts["full"]["cached"] + counts["full_twin"]["cached"]


def test_a_conversation_goes_on_from_the_store(tiers: Tiers) -> None:
    talk = Conversation(tiers, 1)
    talk.cross(3 * PAGE + 40)
    stored(tiers)
    forget(tiers)
    before = [store(daemon)["fetched_pages"] for daemon in tiers.both]
    begun, claimed = talk.cross(5 * PAGE + 7)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (3 * PAGE, 3 * PAGE)
    assert (begun.host_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE)
    assert [store(daemon)["fetched_pages"] for daemon in tiers.both] == [pages + 3 for pages in before]
    for daemon in tiers.both:
        assert metric(daemon, "kvbridge_prefix_store_objects_total", verb="get", outcome="hit") >= 3
        assert metric(daemon, "kvbridge_prefix_store_bytes_total", verb="get") > 0
        assert metric(daemon, "kvbridge_prefix_store_prefetches_total", outcome="found") >= 1
        assert metric(daemon, "kvbridge_prefix_store_state", state="closed") == 1
        assert metric(daemon, "kvbridge_store_process_starts_total") >= 1


def test_every_turn_of_several_conversations_comes_from_the_store(tiers: Tiers) -> None:
    talks = [Conversation(tiers, 10 + number) for number in range(3)]
    for turn in range(3):
        for talk in talks:
            talk.begun = None
            begun, claimed = talk.cross(2 * PAGE + turn * PAGE + 30)
            expected = (1 + turn) * PAGE if turn else 0
            assert (begun.computed_tokens, claimed.prefix_tokens) == (expected, expected)
        stored(tiers)
        forget(tiers)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["hangs", "dies"])
def test_a_store_that_hangs_or_dies_costs_a_request_its_deadline_at_most(tiers: Tiers, number: signal.Signals) -> None:
    talk = Conversation(tiers, 20 + number)
    talk.cross(3 * PAGE)
    stored(tiers)
    forget(tiers)
    pids = [store(daemon)["pid"] for daemon in tiers.both]
    starts = [process_starts(daemon) for daemon in tiers.both]
    for pid in pids:
        if number is signal.SIGSTOP:
            stop(pid)
        else:
            os.kill(pid, number)
    talk.begun = None
    begun_s = time.monotonic()
    talk.admit(4 * PAGE)
    waited_s = time.monotonic() - begun_s
    assert waited_s < (2 * PREFETCH_S if number is signal.SIGSTOP else 0.0) + BUSY_S
    assert talk.begin().computed_tokens in ({0} if number is signal.SIGSTOP else {0, 3 * PAGE}), (
        "unless it came back at once"
    )
    talk.compute()
    talk.check()
    talk.end()
    for daemon, pid in zip(tiers.both, pids, strict=True):
        eventually("there is another process", lambda daemon=daemon, pid=pid: store(daemon)["pid"] not in {0, pid})
        eventually("it is asked", lambda daemon=daemon: revived(tiers, daemon), REVIVED_S)
    for daemon, before in zip(tiers.both, starts, strict=True):
        assert process_starts(daemon) > before
    stored(tiers)
    forget(tiers)
    talk.begun = None
    begun, claimed = talk.cross(5 * PAGE)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (4 * PAGE, 4 * PAGE), "nothing is lost with a process"


@pytest.mark.parametrize("below", ["files"], indirect=True)
@pytest.mark.parametrize(("lie", "kind"), [("a bit", "wrong_digest"), ("half", "short"), ("another", "other_key")])
def test_a_store_that_lies_is_found_out_and_the_prompt_computed(
    tiers: Tiers, below: Below, lie: str, kind: str
) -> None:
    talk = Conversation(tiers, 40 + len(lie))
    talk.cross(3 * PAGE)
    stored(tiers)
    forget(tiers)
    forms: dict[str, list[Path]] = {}
    for path in below[0].directory.glob("??/*"):
        forms.setdefault(path.name.partition("-")[0], []).append(path)
    for paths in forms.values():
        whole = [path.read_bytes() for path in paths]
        for path, data, other in zip(paths, whole, [*whole[1:], whole[0]], strict=True):
            changed = {"a bit": data[:-1] + bytes([data[-1] ^ 1]), "half": data[: len(data) // 2], "another": other}
            path.write_bytes(changed[lie])
    talk.begun = None
    begun, claimed = talk.cross(4 * PAGE)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (0, 0)
    name = "kvbridge_prefix_store_objects_total"
    found = sum(metric(daemon, name, verb="get", outcome=kind) for daemon in tiers.both)
    assert found >= 1, "by whoever asked first, and dropped then: for the other it is absent"
    told = [
        line for daemon in tiers.both for line in daemon.log(10_000).splitlines() if "store_objects_refused" in line
    ]
    assert any(f'"outcome": "{kind}"' in line for line in told)
    stored(tiers)
    forget(tiers)
    talk.begun = None
    begun, claimed = talk.cross(5 * PAGE)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (4 * PAGE, 4 * PAGE), "bad ones have been replaced"
    for paths in forms.values():  # the next test's objects shall have neighbours that are right
        for path in paths:
            path.unlink(missing_ok=True)


@pytest.mark.thorough
@pytest.mark.parametrize("below", ["mooncake"], indirect=True)
def test_requests_go_on_while_mooncakes_master_is_away(tiers: Tiers, below: Below) -> None:
    talk, servers = Conversation(tiers, 50), below[1]
    assert servers is not None
    talk.cross(3 * PAGE)
    stored(tiers)
    forget(tiers)
    servers.kill_master()
    begun_s = time.monotonic()
    talk.begun = None
    begun, claimed = talk.cross(4 * PAGE)
    assert time.monotonic() - begun_s < 2 * PREFETCH_S + 2 * BUSY_S
    assert (begun.computed_tokens, claimed.prefix_tokens) == (0, 0)
    servers.start_master()
    for daemon in tiers.both:
        eventually("it is asked again", lambda daemon=daemon: revived(tiers, daemon), REVIVED_S)
    numbers = count(500)

    def comes_back() -> bool:
        """The owner of the memory comes to the new master by itself, and until then there is no room."""
        again = Conversation(tiers, next(numbers))
        again.cross(2 * PAGE)
        stored(tiers)
        forget(tiers)
        again.begun = None
        begun, claimed = again.cross(3 * PAGE)
        return (begun.computed_tokens, claimed.prefix_tokens) == (2 * PAGE, 2 * PAGE)

    eventually("prefixes come back", comes_back, REVIVED_S)


_tries = count(1_000)
"""Conversations of which no store has anything."""


def revived(tiers: Tiers, daemon: DaemonProcess) -> bool:
    """Have a daemon try its store again, by a request; whether it works."""
    if store(daemon)["state"] in {"closed", "starting"}:
        return bool(store(daemon)["state"] == "closed")
    for each in tiers.both:
        all_free(each)
    Conversation(tiers, next(_tries)).cross(2 * PAGE)
    return False


@pytest.mark.thorough
def test_daemons_that_are_killed_find_their_prefixes_in_the_store_again(tiers: Tiers) -> None:
    talk = Conversation(tiers, 60)
    talk.cross(3 * PAGE)
    stored(tiers)
    tiers.live.detach()
    for daemon in tiers.both:
        daemon.kill()
        daemon.start()
    tiers.live.cluster.wait_ready()
    for daemon in tiers.both:
        eventually("its store is asked", lambda daemon=daemon: store(daemon)["state"] == "closed", REVIVED_S)
    talk.begun = None
    begun, claimed = talk.cross(4 * PAGE)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (3 * PAGE, 3 * PAGE)
    assert (begun.host_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE)

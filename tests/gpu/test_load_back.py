"""Prefixes that come back from host memory to GPUs: every byte, the order of streams, and that no host waits.

The same conversations as in tests/integration/test_load_back.py, with both pools on one GPU and this process as both engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvbridge.config.pools import DeviceLayout, HostLayout
from kvbridge.config.tier import BackupPolicy, CopyBackend
from kvbridge.engine import Engine
from tests.gpu.test_cuda_daemons import on_devices
from tests.helpers.cluster import eventually
from tests.helpers.gpu_children import SLEEP_CYCLES
from tests.helpers.live_rooms import http, live_cluster, report, status
from tests.integration.test_load_back import PAGE, POOL_PAGES, Conversation, Setting, Tiers, load_backs

pytestmark = pytest.mark.gpu
LAYER_FIRST, PAGE_FIRST = DeviceLayout
SETTINGS = [
    Setting(HostLayout.LAYER_FIRST, LAYER_FIRST, CopyBackend.KERNEL, BackupPolicy.WRITE_THROUGH),
    Setting(HostLayout.PAGE_FIRST, LAYER_FIRST, CopyBackend.KERNEL, BackupPolicy.WRITE_THROUGH),
    Setting(HostLayout.PAGE_FIRST, PAGE_FIRST, CopyBackend.DIRECT, BackupPolicy.WRITE_THROUGH),
]
QUICK_S = 0.3
"""Host time of a call, while a stream sleeps for about a second."""


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def tiers(request: pytest.FixtureRequest, device: int) -> Iterator[Tiers]:
    setting: Setting = request.param
    host = {"pages": 96, "layout": setting.host.value, "backend": setting.backend.value}
    tier = {"enabled": True, "model_name": "tiny", "model_revision": "1"}
    with live_cluster(
        prefill={"tier": tier | {"host": host | {"checkpoint_pages": 24}}, **on_devices(device)},
        decode={"tier": tier | {"host": host}, **on_devices(device)},
        pages={"full": POOL_PAGES, "swa": 12, "request": 6},
        device_layout=setting.device.value,
        host_pages=96,
    ) as running:
        made = Tiers(running, setting)
        assert running.sender
        assert running.reader
        yield made
        running.no_traceback()


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_the_device_has_lost_comes_back_from_the_host(tiers: Tiers, by_layer: bool) -> None:
    tiers.by_layer = by_layer
    turns = Conversation(tiers, 1 + by_layer)
    turns.cross(3 * PAGE + 40)
    tiers.on_host()
    tiers.forget()
    copies = load_backs(tiers)
    begun, claimed = turns.cross(5 * PAGE + 7)
    assert (begun.host_tokens, claimed.host_tokens) == (3 * PAGE, 3 * PAGE)
    assert [after - before for before, after in zip(copies, load_backs(tiers), strict=True)] == [1, 1]
    begun, claimed = turns.cross(5 * PAGE + 90)
    assert (begun.computed_tokens, claimed.prefix_tokens) == (5 * PAGE, 5 * PAGE)
    assert (begun.host_tokens, claimed.host_tokens) == (0, 0)


def put_to_sleep(engine: Engine, device: int) -> torch.cuda.Event:
    """Have an engine's load stream sleep for about a second; the event is reached afterwards."""
    stream, event = engine._loads._streams[device], torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    event.record(stream)
    return event


@pytest.mark.alone
@pytest.mark.parametrize("by_layer", [False, True])
def test_no_host_waits_for_a_load_and_the_engines_stream_does(tiers: Tiers, device: int, by_layer: bool) -> None:
    """What is read on the engine's stream behind `begin` or `claim` is there, though the load had not begun when they returned."""
    tiers.by_layer = by_layer
    turns = Conversation(tiers, 10 + by_layer)
    turns.cross(3 * PAGE + 40)
    tiers.on_host()
    tiers.forget()
    turns.begun = None
    turns.admit(5 * PAGE + 7)
    calls: dict[str, float] = {}

    def timed(engine: Engine, verb: str) -> Any:
        """The engine's verb, with its load stream asleep, and its time taken."""
        real = getattr(engine, verb)

        def call(*given: Any, **more: Any) -> Any:
            asleep, began_s = put_to_sleep(engine, device), time.monotonic()
            made = real(*given, **more)
            calls[verb] = time.monotonic() - began_s
            assert not asleep.query(), f"{verb} waited for the load"
            return made

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiers.live.sender, "begin", timed(tiers.live.sender, "begin"))
        turns.begin()  # compares every byte of the prefix, windows and states
    turns.compute()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tiers.live.reader, "claim", timed(tiers.live.reader, "claim"))
        assert turns.check().host_tokens == 3 * PAGE
    turns.end()
    assert max(calls.values()) < QUICK_S, calls


@pytest.mark.alone
def test_rows_that_are_being_loaded_are_sent_by_nobody(tiers: Tiers, device: int) -> None:
    """Decode holds nothing of the prompt, so that prefill sends all of it: what it loads only when that is there."""
    turns = Conversation(tiers, 20)
    turns.cross(3 * PAGE + 40)
    tiers.on_host()
    tiers.forget()
    assert http("DELETE", tiers.live.decode, "/v1/prefixes").is_success
    before = sent_bytes(tiers)
    turns.begun = None
    turns.admit(5 * PAGE + 7)
    asleep = put_to_sleep(tiers.live.sender, device)
    sender = tiers.live.sender
    turns.begun = sender.begin(
        turns.room, prompt_tokens=turns.length, page_hashes=turns.keys(turns.length), by_layer=True
    )
    assert turns.begun.host_tokens == 3 * PAGE
    while not asleep.query():
        sent = sent_bytes(tiers)
        assert asleep.query() or sent == before, "sent before it was loaded"
    turns.compute()
    assert turns.check().prefix_tokens == 0
    turns.end()


def sent_bytes(tiers: Tiers) -> int:
    return sum(peer["sent_bytes"] for peer in status(tiers.live.prefill)["traffic"].values())


@pytest.mark.alone
def test_an_abort_in_the_middle_of_a_load_leaves_nothing_behind(tiers: Tiers, device: int) -> None:
    """Pages go back when the load is over, and not before; what is on the host stays there."""
    turns = Conversation(tiers, 30)
    turns.cross(3 * PAGE + 40)
    tiers.on_host()
    tiers.forget()
    turns.begun = None
    room = turns.admit(5 * PAGE + 7)
    asleep = put_to_sleep(tiers.live.sender, device)
    begun = tiers.live.sender.begin(
        room, prompt_tokens=turns.length, page_hashes=turns.keys(turns.length), by_layer=True
    )
    assert begun.host_tokens == 3 * PAGE
    tiers.live.sender.abort(room, "a test")
    tiers.live.sender.events()
    has_pages = report(tiers.live.prefill, room)["pages"]
    assert has_pages or asleep.query(), "they are still being written"
    eventually("all let go of", tiers.let_go)
    assert asleep.query()
    assert turns.cross(5 * PAGE + 8)[0].host_tokens == 3 * PAGE

"""Prefixes that come back from host memory to GPUs: every byte, the order of streams, and that no host waits."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvbridge.engine import Engine
from tests.gpu.test_cuda_daemons import on_devices
from tests.helpers.conversation import PAGE, Conversation
from tests.helpers.gpu_children import SLEEP_CYCLES
from tests.helpers.host_tiers import copies, forget, host_tiers, let_go, on_host
from tests.helpers.live_rooms import LiveCluster, http, report, status

pytestmark = pytest.mark.gpu
SETTINGS = ["layer_first layer_first kernel", "page_first layer_first kernel", "page_first page_first direct"]
"""Layouts of host and device, and copy backend."""
QUICK_S = 0.3
"""Host time of a call, while a stream sleeps for about a second."""


@pytest.fixture(scope="module", params=SETTINGS)
def live(request: pytest.FixtureRequest, device: int) -> Iterator[LiveCluster]:
    layout, device_layout, backend = request.param.split()
    host, place = {"layout": layout, "backend": backend}, on_devices(device)
    with host_tiers(host=host, device_layout=device_layout, prefill=place, decode=place) as running:
        yield running


def on_host_alone(live: LiveCluster, number: int, *, by_layer: bool = False) -> Conversation:
    talk = Conversation(live, number, by_layer=by_layer)
    talk.cross(3 * PAGE + 40)
    on_host(*live.nodes)
    forget(live)
    return talk


@pytest.mark.parametrize("by_layer", [False, True])
def test_what_the_device_has_lost_comes_back_from_the_host(live: LiveCluster, by_layer: bool) -> None:
    talk = on_host_alone(live, 1 + by_layer, by_layer=by_layer)
    before = [copies(daemon, "load_back") for daemon in live.nodes]
    assert talk.cross(5 * PAGE + 7).from_host == (3 * PAGE, 3 * PAGE)
    assert [copies(daemon, "load_back") for daemon in live.nodes] == [count + 1 for count in before]
    turn = talk.cross(5 * PAGE + 90)
    assert (turn.reused, turn.from_host) == ((5 * PAGE, 5 * PAGE), (0, 0))


def put_to_sleep(engine: Engine, device: int) -> torch.cuda.Event:
    """Have an engine's load stream sleep for about a second; the event is reached afterwards."""
    stream, event = engine._loads._streams[device], torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
    event.record(stream)
    return event


@pytest.mark.alone
@pytest.mark.parametrize("by_layer", [False, True])
def test_no_host_waits_for_a_load_and_the_engines_stream_does(live: LiveCluster, device: int, by_layer: bool) -> None:
    """Reads on the engine's stream behind `begin` or `claim` find the bytes, though the load had not begun when those returned."""
    turn = on_host_alone(live, 10 + by_layer, by_layer=by_layer).turn(5 * PAGE + 7)
    calls: dict[str, float] = {}

    def timed(engine: Engine, verb: str) -> Any:
        real = getattr(engine, verb)

        def call(*given: Any, **more: Any) -> Any:
            asleep, began_s = put_to_sleep(engine, device), time.monotonic()
            made = real(*given, **more)
            calls[verb] = time.monotonic() - began_s
            assert not asleep.query(), f"{verb} waited for the load"
            return made

        return call

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live.sender, "begin", timed(live.sender, "begin"))
        turn.begin()  # compares every byte of the prefix, windows and states
    turn.compute()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live.reader, "claim", timed(live.reader, "claim"))
        turn.read().release()
    assert turn.from_host[1] == 3 * PAGE
    turn.end()
    assert max(calls.values()) < QUICK_S, calls


@pytest.mark.alone
def test_rows_that_are_being_loaded_are_sent_by_nobody(live: LiveCluster, device: int) -> None:
    """Decode holds nothing of the prompt, so that prefill sends all of it: what it loads only when that is there."""
    talk = on_host_alone(live, 20)
    assert http("DELETE", live.decode, "/v1/prefixes").is_success
    before, turn = sent_bytes(live), talk.turn(5 * PAGE + 7)
    asleep = put_to_sleep(live.sender, device)
    turn.begun = live.sender.begin(turn.room, prompt_tokens=turn.tokens, page_keys=turn.keys, by_layer=True)
    assert turn.begun.host_tokens == 3 * PAGE
    while not asleep.query():
        sent = sent_bytes(live)
        assert asleep.query() or sent == before, "sent before it was loaded"
    turn.compute()
    turn.read().release()
    assert turn.reused[1] == 0
    turn.end()


def sent_bytes(live: LiveCluster) -> int:
    return sum(peer["sent_bytes"] for peer in status(live.prefill)["traffic"].values())


@pytest.mark.alone
def test_an_abort_in_the_middle_of_a_load_leaves_nothing_behind(live: LiveCluster, device: int) -> None:
    """Pages go back when the load is over, and not before; what is on the host stays there."""
    talk = on_host_alone(live, 30)
    turn = talk.turn(5 * PAGE + 7)
    asleep = put_to_sleep(live.sender, device)
    begun = live.sender.begin(turn.room, prompt_tokens=turn.tokens, page_keys=turn.keys, by_layer=True)
    assert begun.host_tokens == 3 * PAGE
    begun.abort("a test")
    live.sender.events()
    has_pages = report(live.prefill, turn.room)["pages"]
    assert has_pages or asleep.query(), "they are still being written"
    let_go(live)
    assert asleep.query()
    assert talk.cross(5 * PAGE + 8).from_host[0] == 3 * PAGE

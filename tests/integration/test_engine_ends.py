"""Real engine processes that leave without a word: their pages are nobody else's before the process has ended.

The engine here closes its connection and writes on into the page that it had begun, as the GPU of an engine that is being killed
does for some milliseconds.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvbridge.core.ids import Role
from kvbridge.core.wire.engine_messages import Accepted, Attach, Attached, Detach, RoomEvent
from kvbridge.engine.link import EVENTS_KEPT, EngineLink
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import LiveCluster, all_free, busy_pages, ends, http, live_cluster, metric, report, status

TOKENS = 600
SETTLE_S = 4.0
"""Long enough to be looked at meanwhile on a busy machine."""

_ENGINE = """
import sys, time
import numpy as np
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine
folder, role, room, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
kind = PrefillEngine if role == "prefill" else DecodeEngine
engine = kind.attach(folder)
if role == "prefill":
    tables = engine.begin(room, prompt_tokens=tokens).tables
else:
    tables = engine.claim(room, timeout_s=20).tables
view = next(iter(engine.views.values()))
buffer = engine._memory.mapped.mappings[0].buffer
page = np.frombuffer(buffer, dtype=np.uint8)
print("there", flush=True)
how = sys.stdin.readline().strip()
if how == "vanish":
    engine._link.close()
elif how == "leave":
    del page
    buffer.release()
    engine.close()
print("gone", flush=True)
while how == "vanish":
    page[:64] += 1
    time.sleep(0.001)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def live() -> Iterator[LiveCluster]:
    overrides = {"timeouts": {"engine_settle_s": SETTLE_S, "drain_s": 1.0}}
    with live_cluster(prefill=overrides, decode=overrides) as live:
        yield live


@contextmanager
def an_engine(live: LiveCluster, role: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """An engine process that has begun (or claimed) a room, and waits to be told how to leave."""
    room = live.pair(TOKENS)
    daemon = live.prefill if role == "prefill" else live.decode
    if role == "decode":
        live.write(room, TOKENS)
        live.begun[room].finish()
    command = [sys.executable, "-c", _ENGINE, str(daemon.runtime_dir), role, str(room), str(TOKENS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        yield process, room
    finally:
        process.kill()
        process.communicate(timeout=10)
        http("DELETE", live.decode, f"/v1/requests/{room}")
        for daemon in (live.prefill, live.decode):
            all_free(daemon)


def tell(process: subprocess.Popen[str], how: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{how}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "gone\n"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pages_are_not_free_before_the_process_has_ended(live, role):
    daemon = live.prefill if role == "prefill" else live.decode
    with an_engine(live, role) as (process, room):
        tell(process, "vanish")
        eventually("the room fails", lambda: report(daemon, room)["state"] == "failed")
        reason = report(daemon, room)["reason"]
        assert f"the {role} engine engine-{process.pid}" in reason
        if role == "prefill":
            assert reason in ends(live.decode, room, "failed", "peer_failed")
        [left] = [engine for engine in status(daemon)["engines"] if engine["gone"]]
        assert (left["pid"], left["gone"]) == (process.pid, "its connection has ended; its process has not ended")
        counted = {"reason": "engine_process_alive"}
        eventually("it is shown", lambda: metric(daemon, "kvbridge_rooms_quarantined", **counted) == 1)
        [reason] = status(daemon)["quarantine"]
        assert "their processes have not ended (limit: timeouts.drain_s)" in reason
        assert process.poll() is None
        assert busy_pages(daemon), "its engine still writes"
        process.kill()
        process.wait(10)
        ended_s = time.monotonic()
        assert busy_pages(daemon), "its GPU may still write"
        all_free(daemon)
        assert time.monotonic() - ended_s >= SETTLE_S / 2
        assert metric(daemon, "kvbridge_rooms_quarantined", **counted) == 0
        assert not [engine for engine in status(daemon)["engines"] if engine["gone"]]


def test_events_that_nobody_asks_for_do_not_grow_without_bound(live):
    link = EngineLink(live.prefill.runtime_dir, timeout_s=10)
    try:
        link.call(Attach(call=link.number(), role=Role.PREFILL), Attached)
        for room in range(EVENTS_KEPT + 3):
            link._take(RoomEvent(room=room, generation=1, kind="failed"))
        events = link.events()
        assert (len(events), events[0].room) == (EVENTS_KEPT, 3)
        link.call(Detach(call=link.number()), Accepted)
    finally:
        link.close()

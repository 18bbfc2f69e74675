"""Rooms that engines admit themselves, with pages of their own; and engines that leave without a word, writing on for a moment."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import PeerError
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.geometry.models import preset
from kvbridge.core.ids import IndexSpace, PageTable, Rank, Role, Tables
from kvbridge.core.wire.engine_messages import Accepted, Attach, Attached, Detach, RoomEvent
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.link import EVENTS_KEPT, EngineLink
from kvbridge.engine.memory import adopted_region
from kvbridge.engine.prefill import PrefillEngine
from tests.helpers.cluster import Cluster, cluster, eventually
from tests.helpers.live_rooms import LiveCluster, all_free, busy_pages, ends, http, live_cluster, metric, report, status

TINY = preset("tiny-gqa")
PAGE = TINY.tokens_per_page
R0 = Rank(pp=0, tp=0)
PAGES = 16
LIMIT_S = 30.0


def memory(fill: int) -> tuple[torch.Tensor, list[Region]]:
    """All layers in one tensor [layer, page, byte], as vLLM has them on a CPU."""
    [component] = TINY.components
    tensor = torch.full((TINY.layer_count, PAGES, component.page_bytes()), fill, dtype=torch.uint8)
    return tensor, [adopted_region(component, at, tensor[at], lanes=(0, component.lanes)) for at in component.layers]


def pages(*ids: int, first: int = 0) -> Tables:
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(ids, dtype=np.int32), first)}


@dataclass
class Pair:
    running: Cluster
    sender: PrefillEngine
    reader: DecodeEngine
    source: torch.Tensor
    target: torch.Tensor

    @property
    def place(self) -> tuple[PeerAddress, ...]:
        control = self.running.prefill.endpoint().control
        return (PeerAddress(endpoint=control.endpoint, public_key=control.public_key),)

    def write(self, *ids: int) -> None:
        for page in ids:
            self.source[:, page] = torch.randint(0, 256, self.source[:, page].shape, dtype=torch.uint8)

    def hear(self, engine: PrefillEngine | DecodeEngine, room: int) -> RoomEvent:
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            for event in engine.events(0.2):
                if event.room == room:
                    return event
        raise AssertionError(f"nothing was said of room {room}")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with running_pair() as made:
        yield made


@contextmanager
def running_pair() -> Iterator[Pair]:
    pools = {"memory": "adopted"}
    with (
        cluster(
            {"preset": "tiny-gqa"},
            transport="mooncake",
            prefill={"pools": pools},
            decode={"pools": pools | {"host": {"components": []}}},
            wait=False,
        ) as running,
        engines(running) as made,
    ):
        yield made


@contextmanager
def engines(running: Cluster) -> Iterator[Pair]:
    for daemon in (running.prefill, running.decode):
        daemon.endpoint()
    (source, theirs), (target, ours) = memory(1), memory(2)
    with ExitStack() as stack:
        sender = stack.enter_context(PrefillEngine.adopt(running.prefill.runtime_dir, {R0: theirs}))
        reader = stack.enter_context(DecodeEngine.adopt(running.decode.runtime_dir, {R0: ours}))
        running.wait_ready()
        made = Pair(running, sender, reader, source, target)
        sender.hold(99, prompt_tokens=1, pages=[0], published_tokens=1)
        reader.fetch(99, prompt_tokens=1, prefill=made.place, pages=[0])
        heard = made.hear(reader, 99)
        assert heard.kind == "committed", heard.reason  # so the nodes know each other
        assert made.hear(sender, 99).kind == "completed"
        yield made


def test_a_prompt_crosses_by_one_message_a_side(pair: Pair) -> None:
    pair.write(3, 4)
    pair.sender.hold(1, prompt_tokens=PAGE + 9, pages=[3, 4], published_tokens=PAGE + 9, metadata=b"first token")
    pair.reader.fetch(1, prompt_tokens=PAGE + 9, prefill=pair.place, pages=[7, 6])
    event = pair.hear(pair.reader, 1)
    assert (event.kind, event.metadata) == ("committed", {str(R0): b"first token"})
    assert pair.hear(pair.sender, 1).kind == "completed"
    assert torch.equal(pair.target[:, 7], pair.source[:, 3])


def test_pages_follow_while_it_is_computed_and_decode_comes_when_it_has_some(pair: Pair) -> None:
    pair.reader.fetch(2, prompt_tokens=3 * PAGE, prefill=pair.place)
    pair.sender.hold(2, prompt_tokens=3 * PAGE)
    pair.write(8, 9, 10)
    room = pair.sender.begin(2, prompt_tokens=3 * PAGE, pages=[8])
    room.publish(PAGE)
    pair.reader.fetch(2, pages=[8, 9], held_by_decode=PAGE)
    room.publish(2 * PAGE, pages=[9])
    room.publish(3 * PAGE, pages=[10])
    room.finish()
    assert pair.hear(pair.reader, 2).kind == "committed"
    assert pair.hear(pair.sender, 2).kind == "completed"
    assert torch.equal(pair.target[:, 8:10], pair.source[:, 9:11])


def test_the_end_of_a_node_is_seen_by_its_engine_and_its_worker_holds_nothing_any_more() -> None:
    with running_pair() as pair:
        pair.reader.fetch(1, prompt_tokens=PAGE, prefill=pair.place, pages=[3])
        pair.running.decode.kill()
        deadline_s, ends = time.monotonic() + LIMIT_S, []
        while not ends and time.monotonic() < deadline_s:
            ends = pair.reader.worker_ends()
            time.sleep(0.01)
        assert [end.rank for end in ends] == [R0]
        with pytest.raises(PeerError):
            pair.hear(pair.reader, 1)


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

"""Control messages lost, doubled, late and out of order: rooms end as they would have, and everything is given back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.faults.cells import HEARTBEAT_S, PEER_SILENCE_S, SLACK_S
from tests.faults.fault_cluster import TOKENS, FaultCluster
from tests.faults.stages import scene
from tests.helpers.cluster import eventually
from tests.helpers.frame_proxy import (
    TO_DECODE,
    TO_PREFILL,
    FrameProxy,
    calm,
    frame_proxy,
    lose_first,
    partition,
    storm,
)
from tests.helpers.live_rooms import all_free, http, status

short = pytest.mark.faults_short
ROOMS = 6
"""Crossing rooms of a storm; as many again are cancelled on either side."""


class ProxiedCluster(FaultCluster):
    """A stage whose decode daemon reaches the prefill daemon through a proxy."""

    proxy: FrameProxy

    @property
    def address(self) -> dict[str, str]:
        return {"endpoint": self.proxy.endpoint} if hasattr(self, "proxy") else super().address


@pytest.fixture(scope="module")
def stage() -> Iterator[ProxiedCluster]:
    with scene() as opened:
        proxied = ProxiedCluster(opened.cluster, opened.engines)
        with frame_proxy(opened.address["endpoint"]) as proxied.proxy:
            yield proxied


@pytest.fixture(autouse=True)
def _whole_again(stage: ProxiedCluster) -> Iterator[None]:
    """Calm weather after each test: everything is free and the next room crosses."""
    yield
    stage.proxy.weather = calm
    for daemon in stage.nodes:
        all_free(daemon)
        assert not http("GET", daemon, "/ready").json()["reasons"]
    stage.cross()
    for daemon in stage.nodes:
        all_free(daemon)
        stage.accounted(daemon)
        assert "Traceback" not in daemon.log_path.read_text()


def begun(stage: FaultCluster) -> int:
    room = stage.pair()
    stage.sender.call("begin", room, TOKENS)
    stage.sender.call("write", room, TOKENS, 0, TOKENS // 2)
    stage.taken([room])
    return room


@pytest.mark.parametrize("kind", ["hello", "welcome", *(pytest.param(kind, marks=short) for kind in ("offer", "done"))])
def test_a_message_of_a_crossing_room_is_lost(stage: ProxiedCluster, kind: str) -> None:
    if kind in {"hello", "welcome"}:  # the nodes lose each other, and every room begins with Hello
        stage.proxy.weather = partition
        for daemon in stage.nodes:
            eventually("lost", lambda daemon=daemon: not status(daemon)["peers"])
    stage.proxy.lost.clear()
    stage.proxy.weather = lose_first(kind, 3)
    stage.cross()
    assert sum(stage.proxy.lost.values()) == 3


@short
@pytest.mark.parametrize("kind", ["abort", "drained"])
def test_a_message_of_an_ending_is_lost(stage: ProxiedCluster, kind: str) -> None:
    room = begun(stage)
    stage.proxy.lost.clear()
    stage.proxy.weather = lose_first(kind, 4)
    stage.cancel(stage.decode, room)
    for daemon in stage.nodes:
        state, code, reason = stage.end(daemon, room)
        assert (state, code) == ("aborted", "aborted"), reason
    stage.sender.call("abort", room)
    # The rooms are over for users before the last of these messages has been sent again.
    eventually("four messages lost", lambda: sum(stage.proxy.lost.values()) == 4)
    all_free(stage.decode)


@pytest.mark.parametrize(
    ("seed", "loss", "doubled", "longest_delay_s"),
    [
        pytest.param(3, 0.3, 0.2, 0.1, id="all of it", marks=short),
        pytest.param(5, 0.6, 0.1, 0.05, id="hardly anything passes"),
    ],
)
def test_a_storm(stage: ProxiedCluster, seed: int, loss: float, doubled: float, longest_delay_s: float) -> None:
    """Rooms that cross and rooms that are cancelled on either side, all at once."""
    stage.proxy.weather = storm(seed, loss=loss, doubled=doubled, longest_delay_s=longest_delay_s)
    sender, reader = stage.sender, stage.reader
    crossing, cancelled_here, cancelled_there = ([stage.pair() for _ in range(ROOMS)] for _ in range(3))
    for room in (*crossing, *cancelled_here, *cancelled_there):
        sender.call("begin", room, TOKENS)
        sender.call("write", room, TOKENS, 0, TOKENS)
    for room in cancelled_here:
        stage.cancel(stage.prefill, room)
    for room in cancelled_there:
        stage.cancel(stage.decode, room)
    for room in crossing:
        sender.call("finish", room)
    for room in (*cancelled_here, *cancelled_there):
        sender.call("abort", room)
    for room in crossing:
        reader.call("claim", room, TOKENS)
        reader.call("release", room)
        assert stage.end(stage.prefill, room)[0] == stage.end(stage.decode, room)[0] == "completed"
    for room in (*cancelled_here, *cancelled_there):
        for daemon in stage.nodes:
            state, code, reason = stage.end(daemon, room)
            assert state in {"aborted", "failed"}, reason
            assert code == "aborted", reason


@short
def test_a_short_partition_is_not_noticed(stage: ProxiedCluster) -> None:
    room = begun(stage)
    before = [status(daemon)["peers"] for daemon in stage.nodes]
    stage.proxy.weather = partition
    stage.sender.call("write", room, TOKENS, TOKENS // 2, TOKENS)
    stage.sender.call("finish", room)
    time.sleep(PEER_SILENCE_S / 2)
    stage.proxy.weather = calm
    stage.reader.call("claim", room, TOKENS)
    stage.reader.call("release", room)
    assert [status(daemon)["peers"] for daemon in stage.nodes] == before


def test_a_long_partition_fails_rooms_and_heals(stage: ProxiedCluster) -> None:
    """Both sides give each other up, pages wait for proof, and get it from the same lives once the network is back."""
    room, draining = begun(stage), begun(stage)
    lives = [status(daemon)["incarnation"] for daemon in stage.nodes]
    began_s = time.monotonic()
    stage.proxy.weather = partition
    stage.cancel(stage.decode, draining)
    for daemon in stage.nodes:
        state, code, reason = stage.end(daemon, room)
        assert (state, code) == ("failed", "peer_failed"), reason
        assert "timeouts.peer_silence_s" in reason
    assert time.monotonic() - began_s < PEER_SILENCE_S + HEARTBEAT_S + SLACK_S
    shown = status(stage.decode)["quarantine"]
    assert len(shown) == 2, shown  # not a page is free without proof
    assert all(stage.prefill.config["instance"] in reason for reason in shown), shown
    stage.accounted(stage.decode)
    for each in (room, draining):
        stage.sender.call("abort", each)
    all_free(stage.prefill)
    stage.proxy.weather = calm
    all_free(stage.decode)
    assert stage.end(stage.decode, draining)[0] == "aborted"
    assert [status(daemon)["incarnation"] for daemon in stage.nodes] == lives


@pytest.mark.parametrize("deaf", [TO_DECODE, TO_PREFILL])
def test_one_deaf_direction(stage: ProxiedCluster, deaf: str) -> None:
    """One of both hears nothing: decode gives up, and is told the truth when both can hear again."""
    room = begun(stage)
    stage.proxy.weather = lambda direction, _kind: [] if direction == deaf else [0.0]
    state, code, reason = stage.end(stage.decode, room)
    assert (state, code) == ("failed", "peer_failed"), reason
    stage.proxy.weather = calm
    all_free(stage.decode)
    assert stage.end(stage.prefill, room)[0] in {"failed", "aborted"}
    stage.sender.call("abort", room)

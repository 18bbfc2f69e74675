"""The rank workers of a node: who is there, what is missing in words, and whose words are refused."""

from __future__ import annotations

import pytest

from kvbridge.core.errors import NotReadyError, ProtocolError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Heartbeat
from kvbridge.core.wire.shared_memory import FileOrigin, SharedRegion
from kvbridge.core.wire.worker_messages import Shutdown, TransportsNotBuilt, WorkerFailed, WorkerProgress
from kvbridge.telemetry.facts import MemoryRegistered, SuccessorsFailed
from tests.helpers.node_bench import WorkerBench, setup
from tests.helpers.rooms import R0, R1, manifest

STRANGE = Rank(pp=3, tp=0)


def progress(bench: WorkerBench, done_bytes: int, total_bytes: int, rank: Rank = R0) -> None:
    bench.workers.progress(WorkerProgress(rank=rank, done_bytes=done_bytes, total_bytes=total_bytes))


def test_a_worker_comes_to_life_and_what_is_missing_is_said_in_words():
    bench = WorkerBench()
    assert bench.workers.missing() == "rank worker pp0.tp0 is not there; rank worker pp0.tp1 is not there"
    assert bench.hello() == ""
    assert bench.messages == [("link", setup(R0))]
    progress(bench, 1, 4)
    progress(bench, 0, 0)
    assert [fact.share for fact in bench.events.of(MemoryRegistered)] == [0.25, 1.0]
    assert "pp0.tp0 is starting (100% of its memory is registered)" in bench.workers.missing()
    bench.ready()
    bench.hello(R1, "link1")
    bench.ready(R1)
    assert bench.workers.missing() == ""
    assert [found.rank for found in bench.workers.manifests()] == [R0, R1]
    bench.workers.send(R1, Heartbeat())
    assert bench.messages[-1] == ("link1", Heartbeat())
    assert bench.workers.rank_of("link1") is R1
    assert bench.workers.status()[0].transports == ("local",)


def test_a_dead_worker_is_sent_nothing_and_names_its_first_error():
    bench = WorkerBench()
    bench.hello()
    bench.ready()
    bench.workers.failed(WorkerFailed(rank=R0, code="registration_failed", message="memlock is too small"))
    assert bench.workers.manifests() == ()
    for _ in range(2):
        bench.workers.gone(R0, "exit code 3")
    bench.workers.send(R0, Heartbeat())
    assert len(bench.messages) == 1
    assert "pp0.tp0 is not there: memlock is too small" in bench.workers.missing()
    assert (bench.workers.rank_of("link"), bench.workers.status()[0].restarts) == (None, 0)
    bench.hello(link="next")
    assert bench.workers.status()[0].restarts == 1
    assert "is starting (0%" in bench.workers.missing()


def test_a_worker_of_another_node_is_told_to_end_and_words_of_strangers_change_nothing():
    bench = WorkerBench()
    with pytest.raises(ProtocolError, match="does not live on this node"):
        bench.hello(STRANGE)
    assert bench.messages == [("link", Shutdown())]
    with pytest.raises(ProtocolError):
        progress(bench, 1, 1, STRANGE)
    with pytest.raises(ProtocolError):
        bench.workers.failed(WorkerFailed(rank=STRANGE, code="x", message="y"))
    with pytest.raises(ProtocolError, match="without having said hello"):
        bench.ready()
    assert "pp0.tp0 is not there" in bench.workers.missing()


def test_device_memory_that_a_worker_has_made_is_there_while_it_is_ready():
    bench = WorkerBench()
    vram = (SharedRegion(region=manifest().regions[0], origins=(FileOrigin(path="/dev/shm/x"),)),)
    with pytest.raises(NotReadyError, match=r"nothing to attach to yet: rank worker pp0\.tp0 is not there"):
        bench.workers.device(R0)
    bench.hello()
    progress(bench, 1, 4)
    with pytest.raises(NotReadyError, match="is starting \\(25% of its memory is registered\\); try again shortly"):
        bench.workers.device(R0)
    bench.ready(device=vram)
    assert bench.workers.device(R0) == vram
    bench.workers.gone(R0, "killed by SIGKILL")
    with pytest.raises(NotReadyError, match="killed by SIGKILL"):
        bench.workers.device(R0)


def test_a_worker_that_cannot_build_a_transport_anew_serves_on_and_says_why():
    """Until it can: rooms that wait for the fence see the reason beside the rank."""
    bench = WorkerBench()
    bench.hello()
    bench.ready()
    about = {"rank": R0, "transports": ("nixl",)}
    bench.workers.not_built(TransportsNotBuilt(**about, error_code="registration_failed", error="ulimit -l"))
    status = bench.workers.status()[0]
    assert (status.state, status.error) == ("ready", "ulimit -l")
    assert bench.events.of(SuccessorsFailed) == [SuccessorsFailed(**about, reason="ulimit -l")]
    bench.ready()
    assert bench.workers.status()[0].error == ""

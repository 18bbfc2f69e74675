from __future__ import annotations

import pytest

from kvbridge.core.errors import NotReadyError, ProtocolError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.messages import Heartbeat, RankDescription, TransportEndpoint
from kvbridge.core.wire.shared_memory import FileOrigin, SharedRegion
from kvbridge.core.wire.worker_messages import (
    Shutdown,
    TransportsNotBuilt,
    WorkerFailed,
    WorkerHello,
    WorkerProgress,
    WorkerReady,
    WorkerSetup,
)
from kvbridge.node.workers import WorkerSet
from kvbridge.telemetry.events import MemoryRegistered
from kvbridge.telemetry.path_events import SuccessorsFailed
from tests.helpers.rooms import GEOMETRY, R0, R1, RecordedEvents, manifest

STRANGE = Rank(pp=3, tp=0)


def setup(rank: Rank) -> WorkerSetup:
    return WorkerSetup(
        geometry=GEOMETRY,
        rank=rank,
        pp_size=1,
        tp_size=2,
        layers=(0,),
        device=(),
        host=(),
        transports="{}",
        transfer_timeout_s=1.0,
    )


class Bench:
    def __init__(self) -> None:
        self.messages: list[tuple[str, object]] = []
        self.events = RecordedEvents()
        self.workers = WorkerSet({R0: (0, 1), R1: (0, 1)}, self.events)
        self.workers.connect(lambda link, message: self.messages.append((link, message)))

    @property
    def shares(self) -> list[float]:
        return [fact.share for fact in self.events.of(MemoryRegistered)]

    def hello(self, rank: Rank = R0, link: str = "link") -> str:
        return self.workers.hello(link, WorkerHello(rank=rank, pid=11), setup)

    def ready(self, rank: Rank = R0) -> None:
        endpoint = TransportEndpoint(transport="local", data=b"1")
        described = RankDescription(manifest=manifest(rank=rank, tp_size=2), endpoints=(endpoint,))
        self.workers.ready(WorkerReady(rank=rank, pid=11, description=described))


def test_a_worker_comes_to_life_and_what_is_missing_is_said_in_words():
    bench = Bench()
    assert bench.workers.missing() == "rank worker pp0.tp0 is not there; rank worker pp0.tp1 is not there"
    assert bench.hello() == ""
    assert bench.messages == [("link", setup(R0))]
    bench.workers.progress(WorkerProgress(rank=R0, done_bytes=1, total_bytes=4))
    bench.workers.progress(WorkerProgress(rank=R0, done_bytes=0, total_bytes=0))
    assert bench.shares == [0.25, 1.0]
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
    bench = Bench()
    bench.hello()
    bench.ready()
    bench.workers.failed(WorkerFailed(rank=R0, code="registration_failed", message="memlock is too small"))
    assert bench.workers.manifests() == ()
    for _ in range(2):
        bench.workers.gone(R0, "exit code 3")
    bench.workers.send(R0, Heartbeat())
    assert len(bench.messages) == 1
    assert "pp0.tp0 is not there: memlock is too small" in bench.workers.missing()
    assert bench.workers.rank_of("link") is None
    assert bench.workers.status()[0].restarts == 0
    bench.hello(link="next")
    assert bench.workers.status()[0].restarts == 1
    assert "is starting (0%" in bench.workers.missing()


def test_a_worker_of_another_node_is_told_to_end():
    bench = Bench()
    with pytest.raises(ProtocolError, match="does not live on this node"):
        bench.hello(STRANGE)
    assert bench.messages == [("link", Shutdown())]
    assert bench.workers.rank_of("link") is None


def test_words_of_strangers_are_refused_and_change_nothing():
    bench = Bench()
    with pytest.raises(ProtocolError):
        bench.workers.progress(WorkerProgress(rank=STRANGE, done_bytes=1, total_bytes=1))
    with pytest.raises(ProtocolError):
        bench.workers.failed(WorkerFailed(rank=STRANGE, code="x", message="y"))
    with pytest.raises(ProtocolError, match="without having said hello"):
        bench.ready()
    assert "pp0.tp0 is not there" in bench.workers.missing()


def test_device_memory_that_a_worker_has_made_is_there_while_it_is_ready():
    bench = Bench()
    vram = (SharedRegion(region=manifest().regions[0], origins=(FileOrigin(path="/dev/shm/x"),)),)
    with pytest.raises(NotReadyError, match=r"nothing to attach to yet: rank worker pp0\.tp0 is not there"):
        bench.workers.device(R0)
    bench.hello()
    bench.workers.progress(WorkerProgress(rank=R0, done_bytes=1, total_bytes=4))
    with pytest.raises(NotReadyError, match="is starting \\(25% of its memory is registered\\); try again shortly"):
        bench.workers.device(R0)
    described = RankDescription(manifest=manifest(rank=R0, tp_size=2), endpoints=())
    bench.workers.ready(WorkerReady(rank=R0, pid=11, description=described, device=vram))
    assert bench.workers.device(R0) == vram
    bench.workers.gone(R0, "killed by SIGKILL")
    with pytest.raises(NotReadyError, match="killed by SIGKILL"):
        bench.workers.device(R0)
    bench.hello(link="again")
    bench.ready()
    assert bench.workers.device(R0) == ()


def test_a_worker_that_cannot_build_a_transport_anew_serves_on_and_says_why():
    """Until it can: rooms that wait for the fence see the reason beside the rank."""
    bench = Bench()
    bench.hello()
    bench.ready()
    bench.workers.not_built(
        TransportsNotBuilt(rank=R0, transports=("nixl",), error_code="registration_failed", error="ulimit -l")
    )
    status = bench.workers.status()[0]
    assert (status.state, status.error) == ("ready", "ulimit -l")
    assert bench.events.of(SuccessorsFailed) == [SuccessorsFailed(rank=R0, transports=("nixl",), reason="ulimit -l")]
    bench.ready()
    assert bench.workers.status()[0].error == ""

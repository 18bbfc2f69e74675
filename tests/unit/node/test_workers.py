"""The rank workers of a node: whose words count, when they are believed, and what is missing in words."""

import time

import pytest

from kvbridge.core.errors import NotReadyError, ProtocolError
from kvbridge.core.ids import Rank
from kvbridge.core.wire import worker_messages
from kvbridge.core.wire.messages import FileOrigin, Heartbeat, RankDescription, SharedRegion
from kvbridge.node.workers import WorkerState
from kvbridge.telemetry.facts import FrameRefused, MemoryRegistered, SuccessorsFailed
from tests.helpers.node_bench import WorkerBench, setup
from tests.helpers.rooms import R0, R1, manifest

LIMIT_S = 15.0
STRANGE = Rank(pp=3, tp=0)
REVOKED = worker_messages.EndpointsRevoked(rank=R0, before_epoch=1)


@pytest.fixture
def bench() -> WorkerBench:
    return WorkerBench(LIMIT_S)


@pytest.fixture
def served(bench: WorkerBench) -> WorkerBench:
    """Both ranks are there, behind the links `a` and `b`."""
    for link, rank in (("a", R0), ("b", R1)):
        bench.hello(rank, link)
    bench.messages.clear()
    return bench


def refused(bench: WorkerBench) -> list[str]:
    return [fact.detail for fact in bench.events.of(FrameRefused)]


def progress(bench: WorkerBench, done_bytes: int, total_bytes: int) -> None:
    bench.workers.hear("link", worker_messages.WorkerProgress(rank=R0, done_bytes=done_bytes, total_bytes=total_bytes))


def test_a_worker_comes_to_life_and_what_is_missing_is_said_in_words(bench):
    assert bench.workers.missing() == "rank worker pp0.tp0 is not there; rank worker pp0.tp1 is not there"
    bench.hello()
    assert bench.messages == [("link", setup(R0))]
    progress(bench, 1, 4)
    progress(bench, 0, 0)
    assert [fact.share for fact in bench.events.of(MemoryRegistered)] == [0.25, 1.0]
    assert "pp0.tp0 is starting (100% of its memory is registered)" in bench.workers.missing()
    bench.ready()
    bench.hello(R1, "link1")
    bench.ready(R1, "link1")
    assert bench.workers.missing() == ""
    assert [found.rank for found in bench.workers.manifests()] == bench.up == [R0, R1]
    bench.workers.send(R1, Heartbeat())
    assert bench.messages[-1] == ("link1", Heartbeat())
    assert bench.workers.status()[0].transports == ("local",)


def test_a_dead_worker_is_sent_nothing_and_names_its_first_error(bench):
    bench.hello()
    bench.ready()
    bench.workers.hear(
        "link", worker_messages.WorkerFailed(rank=R0, code="registration_failed", message="memlock is too small")
    )
    assert bench.workers.manifests() == ()
    for _ in range(2):
        bench.workers.gone(R0, "exit code 3")
    bench.workers.send(R0, Heartbeat())
    assert len(bench.messages) == 1
    assert "pp0.tp0 is not there: memlock is too small" in bench.workers.missing()
    assert bench.workers.status()[0].restarts == 0
    bench.hello(link="next")
    assert bench.workers.status()[0].restarts == 1
    assert "is starting (0%" in bench.workers.missing()


def test_a_worker_of_another_node_is_told_to_end(bench):
    with pytest.raises(ProtocolError, match="does not live on this node"):
        bench.hello(STRANGE)
    assert bench.messages == [("link", worker_messages.Shutdown())]
    assert "pp0.tp0 is not there" in bench.workers.missing()


def test_device_memory_that_a_worker_has_made_is_there_while_it_is_ready(bench):
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


def test_a_worker_that_cannot_build_a_transport_anew_serves_on_and_says_why(bench):
    """Rooms that wait for the fence see the reason beside the rank."""
    bench.hello()
    bench.ready()
    about = {"rank": R0, "transports": ("nixl",)}
    bench.workers.hear(
        "link", worker_messages.TransportsNotBuilt(**about, error_code="registration_failed", error="ulimit -l")
    )
    status = bench.workers.status()[0]
    assert (status.state, status.error) == ("ready", "ulimit -l")
    assert bench.events.of(SuccessorsFailed) == [SuccessorsFailed(**about, reason="ulimit -l")]
    bench.ready()
    assert bench.workers.status()[0].error == ""


@pytest.mark.parametrize("link", ["b", "a", "stranger"])
def test_a_worker_speaks_for_its_own_rank_and_for_no_other(served, link):
    """One rank's end of a room would count as another's, which may still write."""
    heard_s = served.workers._workers[R1].heard_s
    for message in (
        worker_messages.WorkerReady(rank=R1, pid=11, description=RankDescription(manifest=manifest(), endpoints=())),
        worker_messages.RoomClosed(room=1, generation=1, rank=R1, quiet=True),
    ):
        served.workers.hear(link, message)
    if link == "b":
        assert (served.up, len(served.said), refused(served)) == ([R1], 1, [])
        return
    served.workers.hear(link, worker_messages.WorkerFailed(rank=R1, code="transport_failed", message="no device"))
    assert len(refused(served)) == 3
    assert f"worker {link}, which does not serve that rank" in refused(served)[0]
    assert (served.up, served.said) == ([], [])
    assert served.workers.states()[R1] is WorkerState.STARTING
    assert served.workers._workers[R1].heard_s == heard_s


def test_a_stranger_has_no_heartbeat(served):
    served.workers.hear("a", Heartbeat())
    assert refused(served) == []
    served.workers.hear("stranger", Heartbeat())
    assert len(refused(served)) == 1


ALL_SENT = [worker_messages.CloseRoom(room=room, generation=1, all_sent=True) for room in (1, 2)]
STOPPED = worker_messages.CloseRoom(room=3, generation=1)


def test_that_rooms_are_over_is_told_ahead_of_the_next_message_to_that_worker(served):
    for message in ALL_SENT:
        served.workers.send(R0, message)
    sent = served.messages
    assert sent == []
    served.workers.send(R1, STOPPED)
    assert sent == [("b", STOPPED)]
    served.workers.send(R0, STOPPED)
    assert sent[1:] == [("a", ALL_SENT[0]), ("a", ALL_SENT[1]), ("a", STOPPED)]


def test_that_rooms_are_over_is_told_with_the_next_tick(served):
    for rank in (R0, R1):
        served.workers.send(rank, ALL_SENT[0])
    served.server.gone.add("a")
    served.workers.watch()
    served.workers.watch()
    assert served.messages == [("b", ALL_SENT[0])]
    served.workers.send(R1, worker_messages.Shutdown())
    assert served.messages[1:] == [("b", worker_messages.Shutdown())]


@pytest.mark.parametrize("how", ["its connection ends", "another takes its place"])
def test_a_successor_is_believed_when_the_process_of_its_predecessor_has_ended(bench, how):
    bench.hello(link="first")
    process = bench.server.process("first")
    if how == "its connection ends":
        bench.workers._link_gone("first", process)
        bench.hello(link="second")
    else:
        bench.hello(link="second")
        assert bench.server.dropped == ["first"]
    assert len(bench.down) == 1, "rooms fail at once"
    bench.workers.hear("second", REVOKED)
    assert bench.said == []
    process.end()
    assert bench.said == [REVOKED]
    bench.workers.hear("second", REVOKED)
    assert bench.said == [REVOKED, REVOKED]


def silent(bench: WorkerBench) -> None:
    """Let the worker be silent for longer than it may, while the node was there."""
    bench.workers._looked_s = time.monotonic()
    bench.workers._workers[R0].heard_s = time.monotonic() - 2 * LIMIT_S
    bench.workers.watch()


def test_a_worker_that_says_nothing_is_given_up_and_its_process_is_left_alone(bench):
    bench.hello(link="first")
    bench.workers.watch()
    assert bench.down == []
    silent(bench)
    bench.workers.watch()
    [reason] = bench.down
    assert "said nothing for 30.0 s" in reason, "rooms fail, and whoever it may still write to shuts it out"
    assert bench.server.dropped == ["first"], "when it goes on, it hears with its next message that it is not served"
    assert bench.workers.has_endpoints(R0)
    bench.hello(link="second")
    bench.workers.hear("second", REVOKED)
    assert bench.said == [], "another process's word is no proof"
    bench.server.process("first").end()
    assert bench.said == [REVOKED]


def test_a_process_that_serves_its_rank_again_has_closed_what_it_had(bench):
    bench.hello(link="first")
    silent(bench)
    bench.server.processes["again"] = bench.server.process("first")
    bench.hello(link="again")
    bench.workers.hear("again", REVOKED)
    assert bench.said == [REVOKED]
    bench.server.process("first").end()
    assert bench.said == [REVOKED]


def test_a_worker_that_has_closed_everything_is_not_waited_for(bench):
    bench.hello(link="first")
    bench.workers.hear("first", worker_messages.WorkerClosed(rank=R0))
    assert bench.messages[-1] == ("first", worker_messages.Shutdown())
    assert (bench.server.dropped, bench.down) == (["first"], ["its engine has closed it"])
    assert not bench.workers.has_endpoints(R0)
    bench.hello(link="second")
    bench.workers.hear("second", REVOKED)
    assert bench.said == [REVOKED]


def test_a_worker_that_leaves_before_its_memory_is_there_is_answered_too(bench):
    bench.workers._early = {}
    bench.hello(link="first")
    bench.workers.hear("first", worker_messages.WorkerClosed(rank=R0))
    assert (bench.messages, bench.workers._early, refused(bench)) == ([("first", worker_messages.Shutdown())], {}, [])

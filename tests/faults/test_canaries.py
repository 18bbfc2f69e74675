"""No byte of a page that was used again was written by an old room; daemons that free pages too soon prove that this is seen."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest

from tests.faults.fault_cluster import Gpus
from tests.faults.late_writer_cluster import (
    AWAKE_S,
    BELIEVE_QUIET,
    FILL_TOKENS,
    FREE_BY_TIMER,
    LATE_TOKENS,
    WHILE_COPYING,
    LateWriterCluster,
    freed,
    frozen_node,
    over,
)
from tests.faults.stages import ClusterCache, late_writer_cluster
from tests.helpers.cluster import eventually
from tests.helpers.stand_in_engines import prepare, stand_in_for_daemons

LIBRARIES = ["mooncake", "nixl"]
EXPIRING = ", expiring"
SHARING = ", sharing"
"""Behind a transport: the late room begins like one that another daemon has written, and that is read all the time."""
DEVICES = "device memory"
MUCH_BYTES = 50_000
"""More than connecting and acknowledging leave in a socket."""
LATE_S = 1.0
LATE = {"late_delivery_s": LATE_S}

short = pytest.mark.faults_short


def with_devices(**more: str) -> AbstractContextManager[LateWriterCluster]:
    """A stand-in plays CUDA. `tests/gpu/test_late_writers.py` has what a real GPU adds."""
    return late_writer_cluster("local", gpus=Gpus(prefill=0, decode=1, prepare_engine=prepare), **more)


@pytest.fixture(scope="module")
def stages() -> Iterator[ClusterCache[LateWriterCluster]]:
    opened = ClusterCache(
        lambda key: (
            with_devices()
            if key == DEVICES
            else late_writer_cluster(key.partition(",")[0], expiring=key.endswith(EXPIRING), shares=SHARING in key)
        )
    )
    yield opened
    opened.clear()


@pytest.mark.parametrize(
    "transport", ["local", *LIBRARIES, pytest.param("local" + SHARING, marks=short), "nixl" + SHARING]
)
def test_a_frozen_prefill_node_whose_worker_wakes(stages: ClusterCache[LateWriterCluster], transport: str) -> None:
    with stages.on(transport) as stage:
        is_local = transport.startswith("local")
        landed = frozen_node(stage, fenced=not is_local)
        if is_local:
            assert landed, "the late writer did not write: this test has looked at nothing"
        stage.everything_given_back()
        stage.meet()


ENDINGS: dict[str, Callable[[LateWriterCluster, int], None]] = {
    "cancelled on decode": lambda stage, room: stage.cancel(stage.decode, room),
    "its engine dies": lambda stage, _room: stage.detach(stage.sender.role),
    "expired": lambda _stage, _room: None,
}


@pytest.mark.parametrize("ending", list(ENDINGS))
@pytest.mark.parametrize("transport", LIBRARIES)
def test_a_prefill_worker_frozen_in_mid_transfer(stages: ClusterCache[LateWriterCluster], transport: str, ending: str):
    """It has handed over more than the network took: the rest goes out when it wakes, whatever became of the room."""
    with stages.on(transport + (EXPIRING if ending == "expired" else "")) as stage:
        room = stage.begin_late()
        writer, reader = stage.worker_pid(stage.prefill), stage.worker_pid(stage.decode)
        stage.freeze(reader)
        stage.sender.call("publish", room, LATE_TOKENS)
        eventually("the transfer begun", lambda: stage.unread_bytes(reader) > MUCH_BYTES)
        stage.freeze(writer)
        stage.resume(reader)
        ENDINGS[ending](stage, room)
        over(stage, room)
        freed(stage)
        assert stage.fill_free_pages()
        before = stage.rows_landed(room)
        stage.resume(writer)
        eventually("quiet", lambda: stage.state(stage.prefill, room) in {"aborted", "failed"})
        time.sleep(AWAKE_S)
        print(f"{transport}, {ending}: {before} rows had come when it woke, {stage.rows_landed(room)} in the end")
        stage.check_filled()
        if "engine" not in ending:
            stage.sender.call("abort", room)
        stage.everything_given_back()
        stage.meet()


def killed(stage: LateWriterCluster, room: int) -> None:
    """The prefill daemon dies and comes back, which proves that the old one does not write."""
    stage.prefill.kill()
    stage.detach(stage.sender.role)
    stage.restart(stage.prefill)
    stage.letter(stage.decode, room, "L")


def cancelled(stage: LateWriterCluster, room: int) -> None:
    """The prefill side tears its transport down, and says that it is quiet."""
    stage.cancel(stage.decode, room)
    eventually("quiet", lambda: stage.state(stage.prefill, room) == "aborted")
    stage.sender.call("abort", room)


@pytest.mark.parametrize("end", [cancelled, killed])
@pytest.mark.parametrize("transport", LIBRARIES)
def test_bytes_that_the_receiver_has_not_read(stages, transport, end):
    """The decode worker is frozen with bytes of the room in its sockets: they outlive their writer."""
    with stages.on(transport) as stage:
        room, reader = stage.begin_late(), stage.worker_pid(stage.decode)
        stage.freeze(reader)
        stage.sender.call("publish", room, LATE_TOKENS)
        eventually("the transfer begun", lambda: stage.unread_bytes(reader) > MUCH_BYTES)
        end(stage, room)
        assert stage.fill_free_pages()
        unread = stage.unread_bytes(reader)
        stage.resume(reader)
        time.sleep(AWAKE_S)
        print(f"{transport}: {unread} bytes were still to be read, {stage.rows_landed(room)} rows came")
        stage.check_filled()
        stage.everything_given_back()
        stage.meet()


def late_delivery(stage: LateWriterCluster) -> int:
    """A transport that reports a failure, is not quiet, and delivers everything a second later unless it is torn down."""
    other, room = stage.begin_late(FILL_TOKENS), stage.begin_late()
    stage.sender.call("publish", room, LATE_TOKENS)
    for daemon in stage.nodes:
        stage.letter(daemon, room, "T")
    stage.sender.call("abort", room)
    freed(stage)
    time.sleep(LATE_S)
    filled = stage.fill_free_pages()
    # What is late goes out when its transport is used again.
    stage.sender.call("publish", other, FILL_TOKENS)
    for daemon in stage.nodes:
        stage.letter(daemon, other, "T")
    stage.sender.call("abort", other)
    time.sleep(AWAKE_S)
    landed = stage.rows_landed(room)
    stage.check_filled()
    assert filled * FILL_TOKENS >= LATE_TOKENS, "the late room's pages were not used again: nothing was tried"
    return landed


@pytest.mark.parametrize(
    ("inner", "shares"),
    [pytest.param("local", False, marks=short), *((each, False) for each in LIBRARIES), ("local", True)],
)
def test_a_late_delivery(inner: str, shares: bool) -> None:
    with late_writer_cluster(inner, faults=LATE, shares=shares) as stage:
        assert not late_delivery(stage)
        stage.everything_given_back()
        stage.meet()


@pytest.mark.parametrize("late", WHILE_COPYING)
def test_a_process_that_is_struck_while_copies_run(stages, late):
    with stand_in_for_daemons(), stages.on(DEVICES) as stage:
        late(stage)
        stage.everything_given_back()
        stage.meet()


@pytest.mark.parametrize("stage_of", [pytest.param(partial(late_writer_cluster, "local"), marks=short), with_devices])
def test_pages_that_a_timer_freed_are_seen(stage_of: Callable[..., AbstractContextManager[LateWriterCluster]]) -> None:
    with (
        stand_in_for_daemons() if stage_of is with_devices else nullcontext(),
        stage_of(daemon_mistake=FREE_BY_TIMER) as stage,
        pytest.raises(AssertionError, match="wrong bytes"),
    ):
        frozen_node(stage, fenced=False)


@pytest.mark.parametrize("inner", ["local", "nixl"])
def test_a_writer_that_was_believed_quiet_is_seen(inner: str) -> None:
    with (
        late_writer_cluster(inner, faults=LATE, worker_mistake=BELIEVE_QUIET) as stage,
        pytest.raises(AssertionError, match="wrong bytes"),
    ):
        late_delivery(stage)

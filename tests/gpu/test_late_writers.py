"""Late writers of `tests/faults` with pools on GPUs: a process is struck while slices of a transfer wait in its GPU's hands."""

from collections.abc import Iterator

import pytest

from kvbridge.kernels.cuda import runtime
from tests.faults.fault_cluster import Gpus
from tests.faults.late_writer_cluster import FREE_BY_TIMER, WHILE_COPYING, LateWriterCluster, frozen_node
from tests.faults.stages import ClusterCache, late_writer_cluster

pytestmark = pytest.mark.gpu


def gpus() -> Gpus:
    two = runtime.device_count() > 1 and runtime.can_reach(0, 1)
    return Gpus(prefill=0, decode=1 if two else 0)


@pytest.fixture(scope="module")
def stages() -> Iterator[ClusterCache[LateWriterCluster]]:
    opened = ClusterCache(lambda _: late_writer_cluster("local", gpus=gpus()))
    yield opened
    opened.clear()


@pytest.mark.parametrize("late", WHILE_COPYING)
def test_a_process_that_is_struck_while_copies_run(stages, late):
    with stages.on("gpu") as stage:
        late(stage)
        stage.everything_given_back()
        stage.meet()


def test_a_frozen_prefill_node_whose_worker_wakes(stages: ClusterCache[LateWriterCluster]) -> None:
    with stages.on("gpu") as stage:
        assert frozen_node(stage, fenced=False), "the late writer did not write: this has looked at nothing"
        stage.everything_given_back()
        stage.meet()


def test_pages_that_a_timer_freed_are_seen() -> None:
    """The canaries of this file see what a GPU writes into pages of others."""
    with (
        late_writer_cluster("local", daemon_mistake=FREE_BY_TIMER, gpus=gpus()) as stage,
        pytest.raises(AssertionError, match="wrong bytes"),
    ):
        frozen_node(stage, fenced=False)

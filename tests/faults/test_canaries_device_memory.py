"""The late writers that `tests/gpu/test_late_writers.py` meets on GPUs, with a stand-in for CUDA."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults import late_writers
from tests.faults.cluster_cache import ClusterCache
from tests.faults.fault_cluster import Gpus
from tests.faults.late_writer_cluster import LateWriterCluster, late_writer_cluster
from tests.faults.mutations import FREE_BY_TIMER
from tests.helpers.stand_in_engines import prepare, stand_in_for_daemons

GPUS = Gpus(prefill=0, decode=1, prepare_engine=prepare)


@pytest.fixture(scope="module")
def stages() -> Iterator[ClusterCache[LateWriterCluster]]:
    with stand_in_for_daemons():
        opened = ClusterCache(lambda _: late_writer_cluster("local", gpus=GPUS))
        yield opened
        opened.clear()


@pytest.mark.parametrize("late", late_writers.WHILE_COPYING)
def test_a_process_that_is_struck_while_copies_run(
    stages: ClusterCache[LateWriterCluster], late: Callable[[LateWriterCluster], None]
) -> None:
    with stages.on("device memory") as stage:
        late(stage)
        stage.everything_given_back()
        stage.meet()


def test_pages_that_a_timer_freed_are_seen() -> None:
    """The look into device memory sees what it is for."""
    with (
        stand_in_for_daemons(),
        late_writer_cluster("local", daemon_mistake=FREE_BY_TIMER, gpus=GPUS) as stage,
        pytest.raises(AssertionError, match="wrong bytes"),
    ):
        late_writers.frozen_node(stage, fenced=False)

"""The strikes that `tests/gpu/test_strikes.py` makes on GPUs, with a stand-in for CUDA: what nodes do about pools of their workers.

What a real GPU adds, kernels that write on and drivers that take their time, is seen there alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cells import ON_GPUS, Fault, Victim
from tests.faults.cluster_cache import ClusterCache
from tests.faults.fault_cluster import FaultCluster, Gpus, scene
from tests.faults.matrix import Matrix
from tests.faults.strikes import cases, play
from tests.helpers.stand_in_engines import prepare, stand_in_for_daemons

NAME = "local, device memory"


@pytest.fixture(scope="module")
def stages() -> Iterator[ClusterCache[FaultCluster]]:
    with stand_in_for_daemons():
        opened = ClusterCache(lambda _: scene(gpus=Gpus(prefill=0, decode=1, prepare_engine=prepare)))
        yield opened
        opened.clear()


@pytest.mark.parametrize(("victim", "fault"), cases(ON_GPUS, short=((Victim.DECODE_WORKER, Fault.KILL),)))
def test_strike_to_an_engine_or_a_worker_with_device_memory(
    stages: ClusterCache[FaultCluster], matrix: Matrix, victim: Victim, fault: Fault
) -> None:
    with stages.on(NAME) as stage, matrix.notes_failure(NAME, victim, fault):
        ends, noticed_s, recovered_s = play(stage, "local", victim, fault)
    matrix.add(NAME, victim, fault, ends, noticed_s=noticed_s, recovered_s=recovered_s)

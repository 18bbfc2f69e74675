"""The strikes of `tests/faults` at engines and rank workers whose pools are on GPUs, while kernels of both engines write pages."""

from collections.abc import Iterator

import pytest

from tests.faults.cells import ON_GPUS, Fault, Victim
from tests.faults.fault_cluster import FaultCluster
from tests.faults.stages import ClusterCache, scene
from tests.faults.strikes import cases, play
from tests.gpu.test_late_writers import gpus

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def stages() -> Iterator[ClusterCache[FaultCluster]]:
    opened = ClusterCache(lambda _: scene(gpus=gpus()))
    yield opened
    opened.clear()


@pytest.mark.parametrize(("victim", "fault"), cases(ON_GPUS))
def test_strike_while_kernels_run(stages: ClusterCache[FaultCluster], victim: Victim, fault: Fault) -> None:
    with stages.on("gpu") as stage:
        ends, noticed_s, recovered_s = play(stage, "local", victim, fault)
    print(f"{' '.join(ends.values())}; noticed after {noticed_s} s, recovered in {recovered_s} s")

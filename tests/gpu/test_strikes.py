"""kill -9 and freezes of engines and rank workers whose pools are on GPUs, with a room in every state of the session.

The strikes, the rooms and the look afterwards are those of `tests/faults`; here kernels of both engines write to pages of theirs
while the strike is made, and every byte of every room that ends well is compared. Two GPUs where there are two. A rank worker is
the exporter of its pool: its engine has it open, and so has the worker that writes there.
"""

from __future__ import annotations

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

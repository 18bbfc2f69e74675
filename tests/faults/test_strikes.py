"""kill -9 and freezes of every process, with a room in every state of the session."""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from kvbridge.core.ids import Role
from tests.faults.cells import ON_GPUS, SHORT, SHORT_SHARING, STRIKES, Fault, State, Victim
from tests.faults.conftest import Row
from tests.faults.fault_cluster import SHARED_TOKENS, FaultCluster, Gpus
from tests.faults.stages import ClusterCache, scene
from tests.faults.strikes import cases, play
from tests.helpers.live_rooms import all_free
from tests.helpers.stand_in_engines import prepare, stand_in_for_daemons

SHARING = ", sharing"
"""Behind a transport: all rooms begin with the same page, which stays on both nodes."""
DEVICES = ", device memory"
"""Behind a transport: a stand-in plays CUDA. `tests/gpu/test_strikes.py` has what a real GPU adds."""


@pytest.fixture(scope="module")
def stages() -> Iterator[ClusterCache[FaultCluster]]:
    def build(key: str) -> AbstractContextManager[FaultCluster]:
        gpus = Gpus(prefill=0, decode=1, prepare_engine=prepare) if key.endswith(DEVICES) else None
        return scene(transport=key.partition(",")[0], shares=key.endswith(SHARING), gpus=gpus)

    opened = ClusterCache(build)
    yield opened
    opened.clear()


@pytest.mark.parametrize(("victim", "fault"), cases(STRIKES, short=SHORT))
def test_strike(stages: ClusterCache[FaultCluster], matrix: list[Row], victim: Victim, fault: Fault) -> None:
    _strike(stages, matrix, "local", victim, fault)


@pytest.mark.parametrize(
    ("victim", "fault"),
    cases(
        (victim, fault)
        for fault in (Fault.KILL, Fault.LONG_FREEZE)
        for victim in (Victim.PREFILL, Victim.PREFILL_WORKER, Victim.DECODE, Victim.DECODE_WORKER)
    ),
)
@pytest.mark.parametrize("transport", ["mooncake", "nixl"])
def test_strike_over_a_library(stages, matrix, transport, victim, fault):
    """Connections behave like copies on one host."""
    _strike(stages, matrix, transport, victim, fault)


@pytest.mark.parametrize(("victim", "fault"), cases(STRIKES, short=SHORT_SHARING))
def test_strike_where_rooms_share(stages: ClusterCache[FaultCluster], matrix: list[Row], victim: Victim, fault: Fault):
    """Whatever becomes of one room, those that read the same page end right, and so does the next turn."""
    with stages.on("local" + SHARING) as stage:
        for _ in range(2):  # the second leaves a checkpoint where it leaves the first
            stage.cross()
        assert stage.turn(stage.pair()) == (SHARED_TOKENS, SHARED_TOKENS)
    _strike(stages, matrix, "local" + SHARING, victim, fault)
    with stages.on("local" + SHARING) as stage:
        kept = _kept(victim, fault)
        assert stage.turn(stage.pair()) == kept
        stage.cross()
        assert stage.turn(stage.pair()) == (SHARED_TOKENS, SHARED_TOKENS)
        for daemon in stage.nodes:
            stage.nobody_reads(daemon)


@pytest.mark.parametrize(("victim", "fault"), cases(ON_GPUS, short=((Victim.DECODE_WORKER, Fault.KILL),)))
def test_strike_to_an_engine_or_a_worker_with_device_memory(stages, matrix, victim, fault):
    with stand_in_for_daemons():
        _strike(stages, matrix, "local" + DEVICES, victim, fault)


def _kept(victim: Victim, fault: Fault) -> tuple[int, int]:
    """How much of a prompt prefill and decode have after a strike: all but what died with a daemon."""
    died = fault is Fault.KILL
    return 0 if died and victim is Victim.PREFILL else SHARED_TOKENS, SHARED_TOKENS


def _strike(stages: ClusterCache[FaultCluster], matrix: list[Row], transport: str, victim: Victim, fault: Fault):
    row: Row = {"transport": transport, "victim": victim, "fault": fault}
    matrix.append(row)
    with stages.on(transport) as stage:
        ends, noticed_s, recovered_s = play(stage, transport.partition(",")[0], victim, fault)
    row |= {**ends, "noticed_s": noticed_s or "", "recovered_s": recovered_s}


@pytest.mark.usefixtures("executed")
def test_a_prefill_daemon_that_returns_at_another_port(stages: ClusterCache[FaultCluster]) -> None:
    with stages.on("local") as stage:
        room = stage.bring([State.PARTIAL])[State.PARTIAL]
        stage.prefill.kill()
        stage.letter(stage.decode, room, "L")
        stage.accounted(stage.decode)
        stage.detach(Role.PREFILL)
        stage.restart(stage.prefill, other_port=True)
        stage.cross(stage.ticket())
        all_free(stage.decode)

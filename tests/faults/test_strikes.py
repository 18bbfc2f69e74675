"""kill -9 and freezes of every process, with a room in every state of the session.

Each strike leaves the stage whole, or the next one gets a new stage.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from kvbridge.core.ids import Role
from kvbridge.testbed.cluster import DaemonProcess
from tests.faults.cells import (
    BEGUN_HERE,
    FREEZE_S,
    LONG_FREEZE_S,
    LOST,
    NOTICED_WITHIN_S,
    SHORT,
    SHORT_SHARING,
    STRIKES,
    Fault,
    State,
    Victim,
    outcomes,
)
from tests.faults.cluster_cache import ClusterCache
from tests.faults.fault_cluster import SHARED_TOKENS, FaultCluster, scene, seconds_since
from tests.faults.matrix import Matrix
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import all_free, http, status


def cases(strikes: Iterable[tuple[Victim, Fault]], *, short: Collection[tuple[Victim, Fault]] = ()) -> list[Any]:
    """Strikes as parameters, with names that a shell likes."""
    mark = pytest.mark.faults_short
    return [
        pytest.param(*strike, marks=mark if strike in short else (), id="-".join(strike).replace(" ", "_"))
        for strike in strikes
    ]


SHARING = ", sharing"
"""Behind a transport: all rooms begin with the same page, which stays on both nodes."""
WORKERS = {Victim.PREFILL_WORKER, Victim.DECODE_WORKER}
ENGINES = {Victim.PREFILL_ENGINE: Role.PREFILL, Victim.DECODE_ENGINE: Role.DECODE}


@pytest.fixture(scope="module")
def stages() -> Iterator[ClusterCache[FaultCluster]]:
    opened = ClusterCache(lambda key: scene(transport=key.removesuffix(SHARING), shares=key.endswith(SHARING)))
    yield opened
    opened.clear()


class Strike:
    """One blow to one process, and the end of it."""

    def __init__(self, stage: FaultCluster, victim: Victim, fault: Fault) -> None:
        self.stage, self.victim, self.fault = stage, victim, fault
        self.held_up = stage.worker_pid(stage.prefill)
        """The prefill rank worker that `furnish` froze."""
        self.pid = self._pid()

    @property
    def daemon(self) -> DaemonProcess | None:
        """The daemon that is struck, itself or its worker; none for engines."""
        stage = self.stage
        return {
            Victim.PREFILL: stage.prefill,
            Victim.PREFILL_WORKER: stage.prefill,
            Victim.DECODE: stage.decode,
            Victim.DECODE_WORKER: stage.decode,
            Victim.BOOTSTRAP: stage.bootstrap,
        }.get(self.victim)

    def _pid(self) -> int:
        if self.victim in ENGINES:
            return self.stage.engines[ENGINES[self.victim]].pid
        assert self.daemon is not None
        return self.stage.worker_pid(self.daemon) if self.victim in WORKERS else self.stage.pid(self.daemon)

    @property
    def dies(self) -> bool:
        """Whether the process is dead in the end: a frozen worker is killed by its node."""
        return self.fault is Fault.KILL or (self.fault is Fault.LONG_FREEZE and self.victim in WORKERS)

    def begin(self) -> None:
        """Strike, and let the worker go on that was held up."""
        if self.fault is not Fault.KILL:
            os.kill(self.pid, signal.SIGSTOP)
        elif self.victim in ENGINES:
            self.stage.engines[ENGINES[self.victim]].kill()
        elif self.victim in WORKERS:
            os.kill(self.pid, signal.SIGKILL)
        else:
            assert self.daemon is not None
            self.daemon.kill()
        if self.held_up != self.pid and psutil.pid_exists(self.held_up):
            os.kill(self.held_up, signal.SIGCONT)

    def end(self) -> None:
        """Let a frozen process go on, start a killed one again."""
        if self.dies and self.daemon is not None and self.victim not in WORKERS:
            role = {Victim.PREFILL: (Role.PREFILL,), Victim.DECODE: (Role.DECODE,)}.get(self.victim, ())
            if role:
                self.stage.detach(*role)
            self.stage.restart(self.daemon)
        elif self.dies and self.victim in ENGINES:
            self.stage.detach(ENGINES[self.victim])
        elif not self.dies:
            os.kill(self.pid, signal.SIGCONT)


@pytest.mark.parametrize(("victim", "fault"), cases(STRIKES, short=SHORT))
def test_strike(stages: ClusterCache[FaultCluster], matrix: Matrix, victim: Victim, fault: Fault) -> None:
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
def test_strike_over_a_library(
    stages: ClusterCache[FaultCluster], matrix: Matrix, transport: str, victim: Victim, fault: Fault
) -> None:
    """What holds for copies on one host holds for connections as well."""
    _strike(stages, matrix, transport, victim, fault)


@pytest.mark.parametrize(("victim", "fault"), cases(STRIKES, short=SHORT_SHARING))
def test_strike_where_rooms_share(
    stages: ClusterCache[FaultCluster], matrix: Matrix, victim: Victim, fault: Fault
) -> None:
    """Whatever becomes of one room, those that read the same page end right, and so does the next turn.

    Each byte of that page is looked at by every engine that starts from it or claims it, before the strike and after it.
    """
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


def _kept(victim: Victim, fault: Fault) -> tuple[int, int]:
    """How much of a prompt prefill and decode have after a strike: all but what died with a daemon.

    What recovered had a room cross, so a new daemon has the page; but for a checkpoint at its end it takes a second room.
    """
    died = fault is Fault.KILL
    return 0 if died and victim is Victim.PREFILL else SHARED_TOKENS, SHARED_TOKENS


def _strike(stages: ClusterCache[FaultCluster], matrix: Matrix, transport: str, victim: Victim, fault: Fault) -> None:
    with stages.on(transport) as stage, matrix.notes_failure(transport, victim, fault):
        ends, noticed_s, recovered_s = _play(stage, transport.removesuffix(SHARING), victim, fault)
    matrix.add(transport, victim, fault, ends, noticed_s=noticed_s, recovered_s=recovered_s)


def _play(stage: FaultCluster, transport: str, victim: Victim, fault: Fault) -> tuple[dict[State, str], float, float]:
    """Strike, look, and have everything recover: how the rooms ended, how long it took to notice and to recover."""
    expected, limit_s = outcomes(transport, victim, fault), NOTICED_WITHIN_S.get((victim, fault))
    before = {daemon.name: stage.facts(daemon) for daemon in stage.nodes}
    rooms = stage.furnish()
    began = stage.sender.pid
    strike = Strike(stage, victim, fault)
    struck_s, noticed_s = time.monotonic(), 0.0
    strike.begin()
    if limit_s is not None:
        _lost(stage, strike, {state: room for state, room in rooms.items() if LOST & set(expected[state])}, expected)
        noticed_s = seconds_since(struck_s)
        assert noticed_s <= limit_s, f"noticed after {noticed_s} s, allowed {limit_s} s"
    else:
        time.sleep(FREEZE_S if fault is Fault.FREEZE else LONG_FREEZE_S)
    _truth_meanwhile(stage, strike)
    ended_s = time.monotonic()
    strike.end()
    stage.wait_ready()
    for state in [state for state in rooms if LOST & set(expected[state])]:
        _end(stage, rooms[state], expected[state])  # the one that was struck has heard of it too
    for state, room in rooms.items():
        stage.conclude(state, room, expected[state], begun_by=began if state in BEGUN_HERE else 0)
    ends = {state: _end(stage, room, expected[state]) for state, room in rooms.items()}
    node_struck = strike.daemon if strike.dies and strike.daemon in stage.nodes else None
    stage.recovered(before, struck=node_struck, worker_struck=victim in WORKERS)
    return ends, noticed_s, seconds_since(ended_s)


def _end(stage: FaultCluster, room: int, expected: str) -> str:
    prefill, decode = expected.split("/")
    return f"{stage.letter(stage.prefill, room, prefill)}/{stage.letter(stage.decode, room, decode)}"


def _watchers(stage: FaultCluster, victim: Victim) -> list[DaemonProcess]:
    """Nodes that can be asked while the victim is struck."""
    away = {Victim.PREFILL: stage.prefill, Victim.DECODE: stage.decode}.get(victim)
    return [daemon for daemon in stage.nodes if daemon is not away]


def _lost(stage: FaultCluster, strike: Strike, rooms: dict[State, int], expected: dict[State, str]) -> None:
    """Wait until the rooms that the strike ends have ended, for everybody who can tell."""
    watched = [
        (daemon, room, expected[state].split("/")[0 if daemon is stage.prefill else 1])
        for daemon in _watchers(stage, strike.victim)
        for state, room in rooms.items()
    ]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(stage.letter, *each) for each in watched if LOST & set(each[2])]
        for each in asked:
            each.result()


def _truth_meanwhile(stage: FaultCluster, strike: Strike) -> None:
    """While somebody is missing: who is red says why, who is green serves, accounts are right."""
    watchers = _watchers(stage, strike.victim)
    for daemon in watchers:
        stage.accounted(daemon)
    if strike.fault is Fault.FREEZE:
        return
    red = strike.daemon if strike.victim in WORKERS else None
    for daemon in watchers:
        if daemon is not red:
            assert http("GET", daemon, "/ready").status_code == 200
    if red is not None:
        _red_until_it_is_back(stage, red, strike.pid)
    elif strike.victim is Victim.BOOTSTRAP:
        eventually("the loss shown", lambda: status(stage.prefill)["bootstrap"]["problem"])
        stage.cross()
    elif strike.victim in {Victim.PREFILL, Victim.DECODE}:
        eventually("bootstrap knows", lambda: http("GET", stage.bootstrap, "/ready").json()["reasons"])
        answer = http("POST", stage.bootstrap, "/v1/requests", json={"prompt_tokens": 1})
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready"), answer.text
    elif strike.fault is Fault.KILL:
        daemon = stage.prefill if ENGINES[strike.victim] is Role.PREFILL else stage.decode
        eventually("the engine gone", lambda: not status(daemon)["engines"])


def _red_until_it_is_back(stage: FaultCluster, daemon: DaemonProcess, dead: int) -> None:
    """A node whose worker has just died admits nothing, and says why, for as long as it takes to have another."""
    ready = http("GET", daemon, "/ready")
    if ready.status_code == 200:  # it was quicker than this test
        assert stage.worker_pid(daemon) != dead
        return
    assert ready.status_code == 503
    assert "rank worker pp0.tp0 is" in ready.json()["reasons"][0], ready.text
    # A request that could never be admitted: nothing is left behind should the worker be back by now.
    refused = http("POST", daemon, "/v1/requests", json={"prompt_tokens": 2**50})
    if refused.status_code != 400:
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready"), refused.text


def test_a_prefill_daemon_that_returns_at_another_port(stages: ClusterCache[FaultCluster]) -> None:
    """Its name proves that the old life has ended, wherever it is found."""
    with stages.on("local") as stage:
        room = stage.bring([State.PARTIAL])[State.PARTIAL]
        stage.prefill.kill()
        stage.letter(stage.decode, room, "L")
        stage.accounted(stage.decode)
        stage.detach(Role.PREFILL)
        stage.restart(stage.prefill, other_port=True)
        stage.cross(stage.ticket())
        all_free(stage.decode)

"""One strike from beginning to end: rooms in every state, the blow, the truth meanwhile, how every room ended."""

import os
import signal
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.core.ids import Role
from tests.faults.cells import (
    BEGUN_HERE,
    FREEZE_S,
    LONG_FREEZE_S,
    LOST,
    Fault,
    State,
    Victim,
    noticed_within_s,
    outcomes,
)
from tests.faults.fault_cluster import FaultCluster, seconds_since
from tests.helpers.cluster import eventually
from tests.helpers.live_rooms import http, status

WORKERS = {Victim.PREFILL_WORKER, Victim.DECODE_WORKER}
ENGINES = {Victim.PREFILL_ENGINE: Role.PREFILL, Victim.DECODE_ENGINE: Role.DECODE}


def cases(strikes: Iterable[tuple[Victim, Fault]], *, short: Collection[tuple[Victim, Fault]] = ()) -> list[Any]:
    mark = pytest.mark.faults_short
    return [
        pytest.param(*strike, marks=mark if strike in short else (), id="-".join(strike).replace(" ", "_"))
        for strike in strikes
    ]


class Strike:
    def __init__(self, stage: FaultCluster, victim: Victim, fault: Fault) -> None:
        self.stage, self.victim, self.fault = stage, victim, fault
        self.held_up = stage.worker_pid(stage.prefill)
        self.pid = self._pid()

    @property
    def daemon(self) -> DaemonProcess | None:
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

    def let_go(self) -> None:
        """Have the engine of a worker that dies with its device memory give up its rooms, and end: it has to attach anew."""
        if self.stage.gpus is not None and self.dies and self.victim in WORKERS:
            role = Role.PREFILL if self.victim is Victim.PREFILL_WORKER else Role.DECODE
            self.stage.engines[role].call("let_go")
            self.stage.detach(role)

    def end(self) -> None:
        if self.dies and self.daemon is not None and self.victim not in WORKERS:
            role = {Victim.PREFILL: (Role.PREFILL,), Victim.DECODE: (Role.DECODE,)}.get(self.victim, ())
            if role:
                self.stage.detach(*role)
            self.stage.restart(self.daemon)
        elif self.dies and self.victim in ENGINES:
            self.stage.detach(ENGINES[self.victim])
        elif not self.dies:
            os.kill(self.pid, signal.SIGCONT)


def play(stage: FaultCluster, transport: str, victim: Victim, fault: Fault) -> tuple[dict[State, str], float, float]:
    """Strike, look, and have everything recover: how the rooms ended, how long it took to notice and to recover."""
    gpus = stage.gpus is not None
    expected, limit_s = outcomes(transport, victim, fault, gpus=gpus), noticed_within_s(victim, fault, gpus=gpus)
    before = {daemon.name: stage.facts(daemon) for daemon in stage.nodes}
    rooms = stage.furnish()
    began = stage.sender.pid
    strike = Strike(stage, victim, fault)
    struck_s, noticed_s = time.monotonic(), 0.0
    strike.begin()
    strike.let_go()
    if limit_s is not None:
        _lost(stage, strike, {state: room for state, room in rooms.items() if LOST & set(expected[state])}, expected)
        noticed_s = seconds_since(struck_s)
        assert noticed_s <= limit_s, f"noticed after {noticed_s} s, allowed {limit_s} s"
    else:
        time.sleep(FREEZE_S if fault is Fault.FREEZE else LONG_FREEZE_S)
    _truth_meanwhile(stage, strike)
    ended_s = time.monotonic()
    strike.end()
    stage.cluster.wait_ready()
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

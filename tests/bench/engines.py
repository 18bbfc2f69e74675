"""Helpers of the comparisons inside engines: who comes first, and the processors that servers take."""

import time
from collections.abc import Sequence
from typing import Any

import psutil

LOOK_S = 10.0
"""For which processors are looked at."""


def in_turn(names: Sequence[str], turn: int) -> tuple[str, ...]:
    """Return the compared ones in the order of a turn: none is always first."""
    return tuple(names if turn % 2 else names[::-1])


def milliseconds(values: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 3) for value in values]


def cores(servers: Sequence[Any]) -> float:
    """Return the cores that servers take with their children."""
    processes = [one for server in servers for one in server.tree()]
    before_s, begun_s = _busy_s(processes), time.monotonic()
    time.sleep(LOOK_S)
    return round((_busy_s(processes) - before_s) / (time.monotonic() - begun_s), 4)


def _busy_s(processes: Sequence[psutil.Process]) -> float:
    times = [one.cpu_times() for one in processes]
    return sum(each.user + each.system for each in times)

"""Helpers of the comparisons inside engines: who comes first, and the processors that servers take."""

import time
from collections.abc import Sequence
from typing import Any

LOOK_S = 10.0


def in_turn(names: Sequence[str], turn: int) -> tuple[str, ...]:
    return tuple(names if turn % 2 else names[::-1])


def milliseconds(values: Sequence[float]) -> list[float]:
    return [round(1e3 * value, 3) for value in values]


def cores(servers: Sequence[Any]) -> float:
    before_s, begun_s = busy_s(servers), time.monotonic()
    time.sleep(LOOK_S)
    return round((busy_s(servers) - before_s) / (time.monotonic() - begun_s), 4)


def busy_s(servers: Sequence[Any]) -> float:
    times = [one.cpu_times() for server in servers for one in server.tree()]
    return sum(each.user + each.system for each in times)

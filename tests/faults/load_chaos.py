"""Strikes against a random load: kills, stops, cut connections, dropped caches, a damaged store.

The thread that started the daemons makes the strikes: daemons end with that thread.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

import psutil

from kvbridge.cli.local_cluster import DaemonProcess
from tests.helpers.live_rooms import http, status

if TYPE_CHECKING:
    from tests.faults.random_load import RandomLoad

EVERY_S = (1.0, 5.0)
STOP_S = (0.5, 6.0)
CUT_S = 0.5
RETURN_S = 90.0
"""A daemon that was struck is ready again within this time."""


class Chaos:
    """Strikes against one load. `strike` makes one when its time has come."""

    def __init__(self, load: RandomLoad, seed: int) -> None:
        self._load = load
        self._drawn = random.Random(seed)
        self._due_s = time.monotonic() + EVERY_S[1]
        self.done: Counter[str] = Counter()
        self._strikes: dict[str, tuple[int, Callable[[DaemonProcess], object]]] = {
            "engine killed": (4, lambda node: load.seats[node.name].kill()),
            "worker killed": (2, self._kill_worker),
            "node killed": (3, lambda node: self._restart(node, node.kill)),
            "node ended": (1, lambda node: self._restart(node, node.stop)),
            "bootstrap killed": (1, lambda _: self._restart(load.cluster.bootstrap, load.cluster.bootstrap.kill)),
            "store process killed": (2, self._kill_store),
            "process stopped": (5, self._stop),
            "prefixes dropped": (2, lambda node: http("DELETE", node, "/v1/prefixes")),
            "store damaged": (4, self._damage_store),
        }
        if load.prefill.config["transports"]["order"][0] == "mooncake":
            self._strikes["connections cut"] = (8, self._cut)

    def strike(self) -> None:
        """Make a strike, if it is time for one, and wait until all can serve again."""
        if time.monotonic() < self._due_s:
            return
        names = list(self._strikes)
        [name] = self._drawn.choices(names, [self._strikes[each][0] for each in names])
        self._strikes[name][1](self._drawn.choice(self._load.nodes))
        for node in self._load.nodes:
            node.wait_ready(RETURN_S)
        self.done[name] += 1
        self._due_s = time.monotonic() + self._drawn.uniform(*EVERY_S)

    def _kill_worker(self, node: DaemonProcess) -> None:
        for worker in _worker(node):
            worker.kill()

    def _restart(self, daemon: DaemonProcess, end: Callable[[], object]) -> None:
        end()
        time.sleep(self._drawn.random())
        daemon.start()
        daemon.wait_ready(RETURN_S)

    def _kill_store(self, node: DaemonProcess) -> None:
        for child in _process(node).children():
            if "stores" in " ".join(child.cmdline()):
                child.kill()

    def _stop(self, node: DaemonProcess) -> None:
        victim = self._drawn.choice([_process(node), *_worker(node), *_found(self._load.seats[node.name].pid)])
        try:
            victim.send_signal(signal.SIGSTOP)
            time.sleep(self._drawn.uniform(*STOP_S))
        finally:
            victim.send_signal(signal.SIGCONT)

    def _damage_store(self, _: DaemonProcess) -> None:
        """Flip a byte, cut, empty, or exchange objects of the store."""
        files = [path for path in self._load.store.rglob("*") if path.is_file() and path.stat().st_size > 1_000]
        for path in self._drawn.sample(files, min(3, len(files))):
            try:
                data = bytearray(path.read_bytes())
                match self._drawn.randrange(4):
                    case 0:
                        data[self._drawn.randrange(len(data))] ^= 1 << self._drawn.randrange(8)
                    case 1:
                        del data[self._drawn.randrange(len(data)) :]
                    case 2:
                        data[:] = bytes(len(data))
                    case 3:
                        data[:] = self._drawn.choice(files).read_bytes()
                path.write_bytes(data)
            except OSError:
                continue  # the store has just dropped it

    def _cut(self, _: DaemonProcess) -> None:
        self._load.cut_flag.touch()
        time.sleep(CUT_S)
        self._load.cut_flag.unlink(missing_ok=True)


def _process(node: DaemonProcess) -> psutil.Process:
    assert node.process is not None
    return psutil.Process(node.process.pid)


def _worker(node: DaemonProcess) -> list[psutil.Process]:
    return _found(status(node)["ranks"][0]["pid"])


def _found(pid: int | None) -> list[psutil.Process]:
    return [psutil.Process(pid)] if pid and psutil.pid_exists(pid) else []

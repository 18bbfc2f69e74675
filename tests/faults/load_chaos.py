"""Who is struck while a random load runs, and how: kills, stops, cut connections, dropped caches, a damaged store.

Strikes are made by the thread that started the daemons: daemons end with that thread.
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
        self._strikes: dict[str, tuple[int, Callable[[], None]]] = {
            "engine killed": (4, self._kill_engine),
            "worker killed": (2, self._kill_worker),
            "node killed": (3, lambda: self._restart(self._drawn.choice(load.nodes), signal.SIGKILL)),
            "node ended": (1, lambda: self._restart(self._drawn.choice(load.nodes), signal.SIGTERM)),
            "bootstrap killed": (1, lambda: self._restart(load.cluster.bootstrap, signal.SIGKILL)),
            "store process killed": (2, self._kill_store),
            "process stopped": (5, self._stop),
            "prefixes dropped": (2, self._drop_prefixes),
            "store damaged": (4, self._damage_store),
        }
        if load.prefill.config["transports"]["order"][0] == "mooncake":
            self._strikes["connections cut"] = (8, self._cut)

    def strike(self) -> None:
        """Make a strike, if it is time for one."""
        if time.monotonic() < self._due_s:
            return
        names = list(self._strikes)
        [name] = self._drawn.choices(names, [self._strikes[each][0] for each in names])
        self._strikes[name][1]()
        self.done[name] += 1
        self._due_s = time.monotonic() + self._drawn.uniform(*EVERY_S)

    def _kill_engine(self) -> None:
        node = self._drawn.choice(self._load.nodes)
        self._load.start_engine(node)

    def _worker(self, node: DaemonProcess) -> psutil.Process | None:
        pid = status(node)["ranks"][0]["pid"]
        return psutil.Process(pid) if pid and psutil.pid_exists(pid) else None

    def _kill_worker(self) -> None:
        worker = self._worker(self._drawn.choice(self._load.nodes))
        if worker is not None:
            worker.kill()
            self._ready()

    def _restart(self, daemon: DaemonProcess, how: signal.Signals) -> None:
        if how is signal.SIGKILL:
            daemon.kill()
        else:
            daemon.stop()
        time.sleep(self._drawn.random())
        daemon.start()
        daemon.wait_ready(RETURN_S)
        self._load.node_returned(daemon)

    def _kill_store(self) -> None:
        node = self._drawn.choice(self._load.nodes)
        for child in _process(node).children():
            if "stores" in " ".join(child.cmdline()):
                child.kill()

    def _stop(self) -> None:
        node = self._drawn.choice(self._load.nodes)
        victims = [_process(node), psutil.Process(self._load.engine(node).pid)]
        victims += [worker] if (worker := self._worker(node)) is not None else []
        victim = self._drawn.choice(victims)
        try:
            victim.suspend()
            time.sleep(self._drawn.uniform(*STOP_S))
        finally:
            victim.resume()
        self._ready()

    def _drop_prefixes(self) -> None:
        http("DELETE", self._drawn.choice(self._load.nodes), "/v1/prefixes")

    def _damage_store(self) -> None:
        """Flip a byte, cut, empty, or exchange objects of the store."""
        files = [path for path in self._load.store.rglob("*") if path.is_file() and path.stat().st_size > 1_000]
        for path in self._drawn.sample(files, min(3, len(files))):
            try:
                data = bytearray(path.read_bytes())
                how = self._drawn.randrange(4)
                if how == 0:
                    data[self._drawn.randrange(len(data))] ^= 1 << self._drawn.randrange(8)
                elif how == 1:
                    del data[self._drawn.randrange(len(data)) :]
                elif how == 2:
                    data[:] = bytes(len(data))
                else:
                    data[:] = self._drawn.choice(files).read_bytes()
                path.write_bytes(data)
            except OSError:
                continue  # the store has just dropped it

    def _cut(self) -> None:
        self._load.cut_flag.touch()
        time.sleep(CUT_S)
        self._load.cut_flag.unlink(missing_ok=True)

    def _ready(self) -> None:
        """Wait until all can serve again, so that the load goes on between two strikes."""
        for node in self._load.nodes:
            node.wait_ready(RETURN_S)


def _process(node: DaemonProcess) -> psutil.Process:
    assert node.process is not None
    return psutil.Process(node.process.pid)

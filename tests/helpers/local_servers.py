"""Mooncake's servers as processes, ports for whoever has to know theirs, and processes that are stopped."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvbridge.core.errors import PeerError
from kvbridge.processes import ChildProcess, wait_for

START_S = 60.0
SEGMENT_BYTES = 64 << 20
LEASE_MS = 30_000
"""For how long what was read cannot be evicted. A get that takes longer fails, so it is longer than any wait of a busy machine."""
_MASTER = Path(sys.executable).with_name("mooncake_master")
_OWNER = """
import os, sys
from mooncake.store import MooncakeDistributedStore
owner = MooncakeDistributedStore()
code = owner.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 20, "tcp", "", sys.argv[1])
print("owner", code, flush=True)
sys.stdin.read()
os._exit(0)
"""


class MooncakeServers:
    """Both processes end with the test process, however it ends."""

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._master = ChildProcess("mooncake_master", folder / "master.log", ends_with_us=True)
        self._owner = ChildProcess("owner of a segment", folder / "owner.log", ends_with_us=True)
        self._segment_bytes = segment_bytes
        self._ports: list[int] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def start(self) -> None:
        for attempt in range(5):  # somebody else may take the ports first
            self._ports = free_ports(2)
            try:
                self.start_master()
                break
            except PeerError:
                if attempt == 4:
                    raise
        process = self._owner.launch([sys.executable, "-c", _OWNER, self.address, str(self._segment_bytes)], piped=True)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == b"owner 0\n", (line, self._owner.log(20))

    def start_master(self) -> None:
        """Start it (again) where it was. It has forgotten everything; the owner gives it its memory again by itself."""
        port, metrics_port = self._ports
        self._master.launch(
            [
                *(str(_MASTER), f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics_port}"),
                *("--metrics_host=127.0.0.1", "--enable_metric_reporting=false", "--logtostderr"),
                f"--default_kv_lease_ttl={LEASE_MS}",
            ]
        )
        wait_for("mooncake_master answers", self._answers, timeout_s=START_S, watched=[self._master])

    def kill_master(self) -> None:
        self._master.kill()

    def halt_owner(self) -> None:
        assert self._owner.process is not None
        stop(self._owner.process.pid)

    def go_on(self) -> None:
        self._owner.kill(signal.SIGCONT)

    def stop(self) -> None:
        for child in (self._owner, self._master):
            if child.process is not None:
                child.kill()
                for pipe in (child.process.stdin, child.process.stdout):
                    if pipe is not None:
                        pipe.close()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self._ports[0]), 1.0).close()
        except OSError:
            return False
        return True


@contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Ports of 127.0.0.1 that nobody gets who does not name them. Whoever does, and sets SO_REUSEADDR, may listen there."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", 0))  # and never listens
        yield [each.getsockname()[1] for each in held]


LIMIT_S = 30.0


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until every thread has stopped: each does when it notices, which for a busy one is a moment later."""
    os.kill(pid, signal.SIGSTOP)
    ends_s = time.monotonic() + LIMIT_S
    while {_state(task) for task in Path(f"/proc/{pid}/task").iterdir()} - {"T"}:
        assert time.monotonic() < ends_s, f"process {pid} does not stop"
        time.sleep(0.001)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:  # it has ended
        return "T"


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports

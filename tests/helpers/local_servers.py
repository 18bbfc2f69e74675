"""Redis and Mooncake's servers as processes, ports for whoever has to know theirs, and processes that are stopped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import redis

from kvbridge.core.errors import PeerError
from kvbridge.processes import ChildProcess, wait_for
from tests.helpers.cluster import eventually

COMMAND = "redis-server"


class RedisServer:
    """One server, which can be killed, halted and started again; what it held is then gone."""

    def __init__(self, folder: Path, *, password: str = "") -> None:
        found = shutil.which(COMMAND)
        assert found, f"{COMMAND} is missing: `make servers` installs it (Debian package redis-server)"
        self.socket = folder / "redis.sock"
        self._process = ChildProcess("redis-server", folder / "redis.log")
        self._command = [found, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", str(folder)]
        if password:
            self._command += ["--requirepass", password]
        self._password = password or None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self._process.launch(self._command)
        eventually("redis-server answers", self._answers)

    def _answers(self) -> bool:
        self._process.check_running()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), password=self._password)

    def kill(self) -> None:
        self._process.kill()

    def halt(self) -> None:
        """Let it accept connections but answer nothing, until `go_on`."""
        self._process.kill(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.kill(signal.SIGCONT)

    def stop(self) -> None:
        self._process.stop()


@contextmanager
def redis_server(*, password: str = "") -> Iterator[RedisServer]:
    """A running server; ended, and its folder removed, afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="kvb-", dir="/tmp"))
    server = RedisServer(folder, password=password)
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def let_time_pass(client: redis.Redis, namespace: str, seconds: float) -> None:
    """Make everything of a namespace that much older, as if Redis's clock had gone on."""
    older_ms = round(seconds * 1e3)
    for key in client.keys(f"{namespace}:*"):
        kind = client.type(key)
        if kind == b"zset":
            for member, score in client.zrange(key, 0, -1, withscores=True):
                client.zadd(key, {member: score - older_ms})
        if kind == b"hash":
            for field in ("seen_ms", "claimed_ms", "settled_ms"):
                if client.hexists(key, field):
                    client.hincrby(key, field, -older_ms)
        if (left_ms := client.pttl(key)) > 0:
            client.pexpire(key, max(0, left_ms - older_ms))


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
        """Keep it from answering, though its connections stay."""
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

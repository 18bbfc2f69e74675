"""A Redis server as a process. Apart from other servers: where `redis` is not installed, tests of stores run all the same."""

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from kvbridge.processes import ChildProcess
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

"""Servers of a real inference engine on loopback, in the engine's own environment: started, looked into, struck and ended."""

import json
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import httpx
import psutil

from tests.engines import processes
from tests.engines.prompts import Answer

ROOT = Path(__file__).resolve().parents[2]
START_S = 480.0
ANSWER_S = 120.0
"""For one answer; a request that takes longer hangs."""
IDLE_S = 60.0
"""For a server to have given back all pages and rooms after its last answer."""
END_S = 15.0
NOT_GIVEN_OUT = 20_000, 32_000
"""Ports below those that Linux gives to whoever names none (`net.ipv4.ip_local_port_range`)."""
_LOOK_S = 0.05
_LAST_LINES = 60
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """Where servers find what they need."""

    python: Path
    """The interpreter of the engine's environment."""
    directory: Path
    """For logs and models."""

    def model(self, shape: str) -> Path:
        """Return a model, made when there is none of this making."""
        directory, script = self.directory / shape, ROOT / "tests/engines/models.py"
        written = directory / "model.safetensors"
        if not written.exists() or written.stat().st_mtime < script.stat().st_mtime:
            command = [self.python, script, shape, directory]
            subprocess.run(command, check=True, capture_output=True, timeout=START_S)
        return directory


def free_port() -> int:
    """Return a port for an engine, which wants a number and takes a minute to use it; none that the kernel gives out meanwhile."""
    while True:
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", random.randrange(*NOT_GIVEN_OUT)))
            return int(listening.getsockname()[1])


@dataclass(frozen=True)
class Plan:
    """One server."""

    name: str
    arguments: tuple[str, ...] = field(default=(), kw_only=True)
    shape: str = field(default="tiny", kw_only=True)
    """The model's (`models.py`)."""


class Server:
    """A running server. `wait_ready` before anything is asked."""

    FORGET: ClassVar[str]
    """The path of the call that empties the prefix cache."""

    def __init__(self, setup: Setup, plan: Any) -> None:
        """Start it, in the main thread, with which it ends."""
        self.plan = plan
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = setup.directory / f"{plan.name}.log"
        self._client = httpx.Client(base_url=self.url, timeout=ANSWER_S, trust_env=False)
        self._begun_s = time.monotonic()
        command, environment = self._command(setup)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=setup.directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours, and we end it
                preexec_fn=processes.die_with_parent,  # noqa: PLW1509 - one system call, and no lock is taken
            )
        self._is_ending = False
        self._known: dict[int, psutil.Process] = {}
        """All that were ever seen below it: a child outlives its parent."""

    def _command(self, setup: Setup) -> tuple[list[str], dict[str, str]]:
        """Return what starts the plan's server: words and all environment variables."""
        raise NotImplementedError

    def wait_ready(self) -> None:
        """Wait until it answers. Raises AssertionError with the end of its log."""
        until_s = self._begun_s + START_S
        while not self.is_healthy():
            assert self._process.poll() is None, f"{self.plan.name} has ended instead of starting:\n{self.tail()}"
            assert time.monotonic() < until_s, f"{self.plan.name} does not answer after {START_S:g} s:\n{self.tail()}"
            time.sleep(0.5)
        self.started_s = time.monotonic() - self._begun_s
        self.tree()

    def tree(self) -> list[psutil.Process]:
        """Return its processes, parents first."""
        found = processes.tree(self._process.pid)
        self._known.update({one.pid: one for one in found})
        return found

    def engine(self) -> list[psutil.Process]:
        """Return the processes in which it schedules and computes, without the node."""
        return [one for one in self.tree()[1:] if not processes.is_node(one)]

    def nodes(self) -> list[psutil.Process]:
        """Return the nodes that kvbridge runs beside it. Raises AssertionError when there is none."""
        nodes = [one for one in self.tree() if processes.is_node(one)]
        found = [one for one in nodes if one.parent() and one.parent() not in nodes]
        assert found, f"{self.plan.name} has no node"
        return found

    def node(self) -> psutil.Process:
        """Return its only node."""
        (found,) = self.nodes()
        return found

    def scheduler(self) -> psutil.Process:
        """Return the process that schedules: the node's parent. Raises AssertionError."""
        parent = self.node().parent()
        assert parent is not None
        return parent

    def ask_to_end(self) -> None:
        """Have it begin to end, as Ctrl-C does."""
        self.tree()
        if not self._is_ending:
            self._is_ending = True
            processes.send(signal.SIGINT, list(self._known.values())[:1])

    def end(self, *, grace_s: float = END_S) -> None:
        """End it with all that it has started. `grace_s` 0: without a warning."""
        if grace_s:
            self.ask_to_end()
        self.tree()
        processes.end(list(self._known.values()), grace_s=grace_s)
        self._process.wait(END_S)
        self._client.close()

    def tail(self, lines: int = _LAST_LINES) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def is_healthy(self) -> bool:
        """Whether it says that it is."""
        try:
            return self._client.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def has_node(self) -> bool:
        """Whether kvbridge runs a node beside it."""
        raise NotImplementedError

    def node_status(self) -> dict[str, Any]:
        """Return what kvbridge's only node beside it says of itself."""
        return _says(self.node(), "/status")

    def statuses(self) -> list[dict[str, Any]]:
        """Return what all nodes beside it say of themselves."""
        return [_says(node, "/status") for node in self.nodes()]

    def room(self, room: int) -> dict[str, Any]:
        """Return what kvbridge's node beside it says of a room."""
        return _says(self.node(), f"/v1/requests/{room}")

    def rooms_completed(self) -> int:
        """Return how many rooms kvbridge's nodes have completed."""
        return sum(int(peer["rooms_completed"]) for one in self.statuses() for peer in one["traffic"].values())

    def forget(self) -> None:
        """Forget the prefix cache."""
        self._client.post(self.FORGET).raise_for_status()

    def _post(
        self, path: str, body: Mapping[str, Any], timeout_s: float, read: Callable[[dict[str, Any]], Answer]
    ) -> Answer:
        """Ask and return the whole answer, timed. Raises httpx.HTTPError without any answer."""
        begun_s = time.monotonic()
        answer = self._client.post(path, json=body, timeout=timeout_s)
        seconds = time.monotonic() - begun_s
        if answer.status_code != 200:
            return Answer(answer.status_code, reason=answer.text[:800], seconds=seconds)
        return replace(read(answer.json()), seconds=seconds)


def _says(node: psutil.Process, path: str) -> dict[str, Any]:
    endpoint = json.loads((processes.config_of(node).parent / "daemon.json").read_text())
    answer = httpx.get(f"{endpoint['http_url']}{path}", timeout=20.0, trust_env=False)
    return dict(answer.raise_for_status().json())


@dataclass
class Pair:
    """A prefill and a decode server, asked as a router asks them."""

    prefill: Any
    decode: Any

    def ask(self, prompt: Sequence[int], max_tokens: int = 16, **how: Any) -> Answer:
        """Return decode's answer to a prompt that prefill has computed."""
        raise NotImplementedError

    def ask_together(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16, **how: Any) -> list[Answer]:
        """Ask for several at once."""
        return together([lambda one=one: self.ask(one, max_tokens, **how) for one in prompts])


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make calls at once, each in a thread of its own, and return what they return."""
    with under_way(calls) as results:
        return [one.result() for one in results]


@contextmanager
def under_way(calls: Sequence[Callable[[], T]]) -> Iterator[list[Future[T]]]:
    """Make calls at once, each in a thread of its own, beside what the block does."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        yield [pool.submit(call) for call in calls]


def wait_until(true: Callable[[], object], what: str, timeout_s: float = IDLE_S) -> float:
    """Wait until something is true and return how long that took. Raises AssertionError."""
    begun_s = time.monotonic()
    while not true():
        assert time.monotonic() - begun_s < timeout_s, f"not so after {timeout_s:g} s: {what}"
        time.sleep(_LOOK_S)
    return time.monotonic() - begun_s

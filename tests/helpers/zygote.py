"""Processes of kvbridge, forked from one that has imported everything: true children of whoever asks."""

import atexit
import ctypes
import fcntl
import os
import pickle
import resource
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from kvbridge.core.ids import FrozenModel
from kvbridge.core.process import UNUSED_BY_DAEMONS, importing

ROOT = str(Path(__file__).resolve().parents[2])
ROLES = ("bootstrap", "prefill", "decode", "router")
_DAEMONS = ("cli.main", "cli.daemons", "daemon.bootstrap", "daemon.decode", "daemon.prefill", "daemon.router")
PRELOADED = [f"kvbridge.{module}" for module in (*_DAEMONS, "worker.lifecycle", "tier.stores.files")]
"""Neither Mooncake nor NIXL: they start threads and read their settings once a process."""
MODULES = {"kvbridge", "kvbridge.worker.process", "kvbridge.tier.stores.process", "tests.helpers.transport_peer"}
FORKED = "# to be forked\n"
"""Code for `python -c` that begins so is run in a fork, too."""


def installed(module: str, *told: str) -> str:
    """Code that a rank worker's process runs first (`mutated`): `install` of a helper of tests, with these texts."""
    return f"import sys; sys.path.insert(0, {ROOT!r})\nfrom tests.helpers.{module} import install\ninstall(*{told!r})\n"


PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
NAME = "kvb-of-a-daemon"
"""Name of processes that are no child of ours, unless their daemon died in the moment in which we were a subreaper."""
TITLE_BYTES = 4096
MESSAGE_BYTES = 1 << 18
_prctl = ctypes.CDLL(None).prctl
_asking = threading.Lock()
_ENVIRONMENT = dict(os.environ)
"""The environment before any test has changed it."""


@dataclass
class Order:
    command: list[str]
    """Words behind the interpreter and `-P`."""
    environment: dict[str, str]
    directory: str
    parent: int
    descriptors: tuple[int, ...]
    """The numbers in the process of the descriptors that are sent along."""
    open_files: tuple[int, int]
    before: Callable[[], object] | None
    """A function of some module, called first."""


class Zygote:
    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def fork(self, order: Order, descriptors: list[int]) -> int:
        """Have a child of this process forked, and return its number. Raises OSError when the zygote is gone."""
        with _asking:
            socket.send_fds(self._channel, [pickle.dumps(order)], descriptors)
            found = self._channel.recv(16)
            _prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # briefly: orphans of dead daemons would be ours as well
            try:
                self._channel.send(b"end")
                done = self._channel.recv(16)
            finally:
                _prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not done:
            raise OSError("the zygote has ended")
        return int(found)


@dataclass
class Here:
    forks: bool = True
    zygote: Zygote | None = None
    """In a forked daemon, the zygote of its rank workers."""


_here = Here()


@cache
def _zygote() -> Zygote:
    """Start the zygote of this process. It ends with the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    code = f"import sys; sys.path.insert(0, {ROOT!r}); from tests.helpers import zygote; zygote.main()"
    command = [sys.executable, "-P", "-c", code, str(theirs.fileno())]
    command.append("-" * (TITLE_BYTES - sum(map(len, command))))  # where forked processes write their command line
    environment = _ENVIRONMENT | {"OPENBLAS_NUM_THREADS": "1"}
    started = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
    )
    started.returncode = 0  # nobody waits for its end
    theirs.close()
    atexit.register(ours.close)
    return Zygote(ours)


class ForkedPopen(subprocess.Popen[Any]):
    """A process of kvbridge, forked where that is possible; any other is started as ever."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _, *ids = rest
        another_user = any(each is not None for each in ids[:3])
        forks = not (shell or executable or another_user) and _can_fork(args, env, own_session=ids[4])
        ends = [own if end < 0 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))]
        if forks:
            order = Order(
                [word for word in args[1:] if word != "-P"],
                dict(os.environ if env is None else env),
                str(cwd or Path.cwd()),
                os.getpid(),
                (0, 1, 2, *pass_fds),
                resource.getrlimit(resource.RLIMIT_NOFILE),
                preexec_fn,
            )
            try:
                self.pid = (_here.zygote or _zygote()).fork(order, [*ends, *pass_fds])
            except OSError:
                if _here.zygote is None:
                    raise
                forks = False  # a test has killed the zygote together with its daemon's workers
        if not forks:
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)
            return
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _can_fork(command: Any, environment: Any, *, own_session: bool) -> bool:
    if not (_here.forks and own_session) or isinstance(command, (str, bytes)) or command[0] != sys.executable:
        return False
    paths = (os.environ if environment is None else environment).get("PYTHONPATH", "")
    if not set(_ENVIRONMENT.get("PYTHONPATH", "").split(os.pathsep)) <= set(paths.split(os.pathsep)):
        return False
    match [word for word in command[1:] if word != "-P"]:
        case ["-m", "kvbridge", role, *_]:
            return role in ROLES
        case ["-m", str(module), *_]:
            return module in MODULES
        case ["-c", str(code), *_]:
            return code.startswith(FORKED)
    return False


def install() -> None:
    from kvbridge import processes

    processes.Popen = ForkedPopen


@contextmanager
def executed() -> Iterator[None]:
    """Daemons that are started meanwhile are executed as users do it, from the interpreter's start on."""
    _here.forks = False
    try:
        yield
    finally:
        _here.forks = True


def _build(kind: type[FrozenModel]) -> None:
    """Build the models and the validators of messages once for all forks: a daemon builds them when it needs them."""
    for each in kind.__subclasses__():
        each.model_rebuild(raise_errors=False)
        _build(each)
    if kind is FrozenModel and "kvbridge.core.wire.codec" in sys.modules:
        for value in vars(sys.modules["kvbridge.core.wire.codec"]).values():
            getattr(value, "_validator", None)


def main() -> None:
    """Import, then fork whatever is asked for; in a forked process, run it."""
    _, channel, _ = sys.argv
    with importing(*UNUSED_BY_DAEMONS):
        for module in PRELOADED:
            import_module(module)
        _build(FrozenModel)
    sys.path.remove(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = _serve(socket.socket(fileno=int(channel)))
    while _has_workers(order):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemon = os.getpid()
        if os.fork():
            theirs.close()
            _here.zygote = Zygote(ours)
            subprocess.Popen = ForkedPopen
            break
        ours.close()
        _prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != daemon:
            os._exit(0)
        os.setsid()
        _say("zygote of rank workers")
        _prctl(PR_SET_NAME, NAME.encode(), 0, 0, 0)
        for number in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), number)
        order = _serve(theirs)
    _run(order.command)


def _has_workers(order: Order) -> bool:
    return "--config" in order.command and not {"prefill", "decode"}.isdisjoint(order.command[2:3])


def _serve(channel: socket.socket) -> Order:
    """Fork a process for each order until the one who asks has ended. Returns in the forked process."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 64)
        if not message:
            os._exit(0)
        between = os.fork()
        if not between:
            between = os.getpid()
            child = os.fork()
            if not child:
                order: Order = pickle.loads(message)
                _become(order, descriptors, between)
                return order
            channel.send(str(child).encode())
            channel.recv(16)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
        channel.send(b"done")


def _become(order: Order, descriptors: list[int], between: int) -> None:
    os.setsid()
    above = max(512, *order.descriptors) + 1
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in descriptors]
    os.closerange(3, above)
    for descriptor, number in zip(kept, order.descriptors, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, order.open_files)
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    tempfile.tempdir = None
    _say(" ".join([sys.executable, "-P", *order.command]))
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    sys.path[:0] = added
    if any((Path(path) / "sitecustomize.py").exists() for path in added):
        sys.modules.pop("sitecustomize", None)
        import_module("sitecustomize")
    while (parent := os.getppid()) == between:
        time.sleep(0.0002)
    if parent != order.parent:
        os._exit(0)
    if order.before is not None:
        order.before()


def _say(command: str) -> None:
    """Write this process's command line to where the system looks for it."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    room = end - begin - 1
    line = command.encode()[:room].ljust(room, b"\0") + b"\1"  # no zero byte at the end: it was changed
    ctypes.memmove(begin, line, len(line))


def _run(command: list[str]) -> None:
    how, what, *arguments = command
    if how == "-c":
        sys.argv = ["-c", *arguments]
        exec(what, {"__name__": "__main__", "__builtins__": __builtins__})
    else:
        sys.argv = [what, *arguments]
        runpy.run_module(what, run_name="__main__", alter_sys=True)

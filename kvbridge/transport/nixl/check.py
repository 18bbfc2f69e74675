"""A process that reads what a nixl peer says of itself before the rank worker does, and has nothing to lose.

Owns: that process, its verdict, what is remembered of it. Must not know: transfers, our registrations.

The library reads a peer's metadata in native code and does not survive bytes that were made to break it (1.5.1: one in 40
mutations of the peer's UCX address ended the process, by a failed assertion or a segmentation fault, all of them while the
metadata was loaded). So a process apart first does with the very same bytes what the worker is about to do: an agent of its own
loads them and reads a byte of the peer's memory. Whatever ends that process is a refusal, and what it has survived is remembered
by its digest. It also keeps peers that do not answer out of the worker, where each attempt would cost a descriptor until the
agent's end.

Every description is read by a process of its own, so that none suffers from another. They are forked from one that has loaded
the library and nothing else, which a worker starts when it first needs it (about a second) and which ends with it; then a check
takes about 0.2 s of a processor.

Run as `python -m kvbridge.transport.nixl.check SETTINGS`, with a socket for standard input over which the worker sends the
socket of each check.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NoReturn

from kvbridge.config.transports import NixlSettings
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.transport.background import Call, take_turn
from kvbridge.transport.base import Steps
from kvbridge.transport.nixl.agent import NixlAgent, load_library
from kvbridge.transport.nixl.peers import NixlEndpoint, ProbeTarget, introduce

MOST_PASSED = 4096
"""Descriptions that are remembered; the oldest are forgotten first."""
PROCESSES = max(2, min(8, os.cpu_count() or 1))
POLL_S = 0.0005
ERROR_CHARS = 2_000
PASSED = b"passed"
REFUSED = b"refused: "


class _Task(FrozenModel):
    """What a process is to read."""

    settings: NixlSettings
    content: NixlEndpoint
    device: NonNegative | None
    """The device whose context is to be current when the metadata is read."""


_passed: dict[bytes, None] = {}
"""Digests of what a process has survived, the oldest first."""
_turns = threading.BoundedSemaphore(PROCESSES)


def check(
    settings: NixlSettings, content: NixlEndpoint, device: int | None, *, clock: Clock = monotonic
) -> Steps[None]:
    """Go on only with a description that a process of its own has survived. Raises TransportError with what it died of."""
    digest = _digest(content)
    if digest in _passed:
        return
    limit_s = settings.check_timeout_s
    name = f"check nixl peer {content.agent}"
    late = f"peer {content.agent} could not be checked within twice transports.nixl.check_timeout_s ({limit_s:g} s)"
    until_s = clock() + 2 * limit_s
    yield from take_turn(name, until_s=until_s, clock=clock)
    call = Call(functools.partial(_check, _Task(settings=settings, content=content, device=device)), name=name)
    yield from call.result(until_s=until_s, clock=clock, late=late)
    _passed[digest] = None
    while len(_passed) > MOST_PASSED:
        del _passed[next(iter(_passed))]


def check_again(content: NixlEndpoint) -> None:
    """Have a description checked the next time although it was remembered as good: its peer has stopped answering."""
    _passed.pop(_digest(content), None)


def _digest(content: NixlEndpoint) -> bytes:
    return hashlib.sha256(content.model_dump_json().encode()).digest()


def _check(task: _Task) -> None:
    """Blocks until there is a verdict."""
    agent, limit_s = task.content.agent, task.settings.check_timeout_s
    late = f"peer {agent} could not be checked within transports.nixl.check_timeout_s ({limit_s:g} s)"
    if not _turns.acquire(timeout=limit_s):
        raise TransportError(f"{late}: {PROCESSES} other peers are being checked")
    try:
        said = _parent.ask(task, timeout_s=limit_s)
    except TimeoutError as error:
        raise TransportError(f"{late}: the peer hangs, or this host is overloaded") from error
    except OSError as error:
        raise TransportError(f"peer {agent} could not be checked: {error}") from error
    finally:
        _turns.release()
    *printed, verdict = said.splitlines() or [b""]
    if verdict.startswith(REFUSED):
        raise TransportError(verdict.removeprefix(REFUSED).decode(errors="replace"))
    if verdict != PASSED:
        last = (verdict or b"".join(printed[-1:])).decode(errors="replace")[:ERROR_CHARS]
        raise TransportError(
            f"peer {agent} was refused: the process that read its metadata first was ended by it ({last or 'no word'}); both sides "
            "must run the same NIXL release, and a peer that does is not to be trusted"
        )


class _Parent:
    """The process from which those are forked that read descriptions; started when it is needed and not there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def ask(self, task: _Task, *, timeout_s: float) -> bytes:
        """Return all that a new process says of a description. Raises TimeoutError, OSError."""
        ends_at_s = time.monotonic() + timeout_s
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs, task.settings)
            said = b""
            ours.settimeout(timeout_s)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, and said why
                ours.sendall(task.model_dump_json().encode())
                ours.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                while True:
                    ours.settimeout(max(0.001, ends_at_s - time.monotonic()))
                    chunk = ours.recv(65_536)
                    if not chunk:
                        break
                    said += chunk
        return said

    def _hand_over(self, connection: socket.socket, settings: NixlSettings) -> None:
        with self._lock:
            if self._control is None or self._process is None or self._process.poll() is not None:
                self._start(settings)
            assert self._control is not None
            socket.send_fds(self._control, [b"."], [connection.fileno()])

    def close(self) -> None:
        """End the process, if there is one. It would end by itself with this one."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()

    def _start(self, settings: NixlSettings) -> None:
        self.close()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, settings.model_dump_json()],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=os.environ | {"UCX_HANDLE_ERRORS": "none", "OPENBLAS_NUM_THREADS": "1"},
            )


_parent = _Parent()
atexit.register(_parent.close)


# ------------------------------------------------------------------------------------------- in the process apart


def main() -> None:
    """Fork a process for each connection that the worker hands over, until the worker has ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the worker decides when we end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    load_library(NixlSettings.model_validate_json(sys.argv[1]))
    control = socket.socket(fileno=os.dup(0))
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        if os.fork() == 0:
            control.close()
            _read(socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def _read(connection: socket.socket) -> NoReturn:
    """Do what the rank worker is about to do, and say that it went well, or what was wrong."""
    for standard in (0, 1, 2):
        os.dup2(connection.fileno(), standard)  # the last words of the library are an answer, too
    verdict = b""
    try:
        task = _Task.model_validate_json(b"".join(iter(functools.partial(connection.recv, 65_536), b"")))
        signal.alarm(math.ceil(task.settings.check_timeout_s))  # nobody else ends it
        agent = NixlAgent(task.settings)
        agent.device = task.device
        for _ in introduce(agent, task.content, ProbeTarget(agent), timeout_s=task.settings.connect_timeout_s):
            time.sleep(POLL_S)
        agent.forget_peer(task.content.agent)
        verdict = PASSED
    except BridgeError as error:
        verdict = REFUSED + str(error).replace("\n", " ").encode()[:ERROR_CHARS]
    except Exception as error:  # noqa: BLE001 - a defect of ours is told like a refusal, and named
        verdict = (
            REFUSED + f"the check failed with {type(error).__name__}: {error}; please report it".encode()[:ERROR_CHARS]
        )
    finally:
        connection.sendall(b"\n" + verdict)
        os._exit(0)  # the library's own end is not what is tested


if __name__ == "__main__":
    main()

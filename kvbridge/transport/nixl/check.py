"""A process that reads what a nixl peer says of itself before the rank worker does, and has nothing to lose.

Owns: that process, its verdict, what is remembered of it: opened by the first NIXL transport of this process, closed by the last.
Must not know: transfers, our registrations.

The library reads a peer's metadata in native code and does not survive bytes that were made to break it (1.5.1: some mutations of
the peer's UCX address end the process, by a failed assertion or a segmentation fault, all of them while the metadata is loaded;
`python -m tests.fuzz.nixl_metadata --unchecked`). So a process apart first does with the very same bytes what the worker is about
to do: an agent of its own loads them and reads a byte of the peer's memory. Whatever ends that process is a refusal, and what it
has survived is remembered by its digest. It also keeps peers that do not answer out of the worker, where each attempt would cost a
descriptor until the agent's end.

Every description is read by a process of its own, so that none suffers from another. They are forked from one that has loaded
the library and nothing else, which a worker starts when it first needs it (about a second) and which ends with it; then a check
takes about 0.2 s of a processor.

Run as `python -m kvbridge.transport.nixl.check SETTINGS`, with a socket for standard input over which the worker sends the
socket of each check.
"""

from __future__ import annotations

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
from kvbridge.core.children import child_environment, module_command
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.pool.memory.holding import HeldThings
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

    content: NixlEndpoint
    device: NonNegative | None
    """The device whose context is to be current when the metadata is read."""


class PeerCheck:
    """What all NIXL transports of a process share: the process apart, and which descriptions it has survived."""

    def __init__(self, settings: NixlSettings) -> None:
        self._settings = settings
        self._parent = _Parent(settings)
        self._passed: dict[bytes, None] = {}
        """Digests, the oldest first."""
        self._turns = threading.BoundedSemaphore(PROCESSES)

    def check(self, content: NixlEndpoint, device: int | None, *, clock: Clock = monotonic) -> Steps[None]:
        """Go on only with a description that a process of its own has survived. Raises TransportError with what it died of."""
        digest = _digest(content)
        if digest in self._passed:
            return
        limit_s = self._settings.check_timeout_s
        name = f"check nixl peer {content.agent}"
        late = f"peer {content.agent} could not be checked within twice transports.nixl.check_timeout_s ({limit_s:g} s)"
        until_s = clock() + 2 * limit_s
        yield from take_turn(name, until_s=until_s, clock=clock)
        call = Call(functools.partial(self._check, _Task(content=content, device=device)), name=name)
        yield from call.result(until_s=until_s, clock=clock, late=late)
        self._passed[digest] = None
        while len(self._passed) > MOST_PASSED:
            del self._passed[next(iter(self._passed))]

    def forget(self, content: NixlEndpoint) -> None:
        """Have a description checked the next time although it was remembered as good: its peer has stopped answering."""
        self._passed.pop(_digest(content), None)

    def close(self) -> None:
        """End the process. Checks that are under way fail, and so do later ones."""
        self._parent.close()

    def _check(self, task: _Task) -> None:
        """Blocks until there is a verdict."""
        agent, limit_s = task.content.agent, self._settings.check_timeout_s
        late = f"peer {agent} could not be checked within transports.nixl.check_timeout_s ({limit_s:g} s)"
        if not self._turns.acquire(timeout=limit_s):
            raise TransportError(f"{late}: {PROCESSES} other peers are being checked")
        try:
            said = self._parent.ask(task, timeout_s=limit_s)
        except TimeoutError as error:
            raise TransportError(f"{late}: the peer hangs, or this host is overloaded") from error
        except OSError as error:
            raise TransportError(f"peer {agent} could not be checked: {error}") from error
        finally:
            self._turns.release()
        *printed, verdict = said.splitlines() or [b""]
        if verdict.startswith(REFUSED):
            raise TransportError(verdict.removeprefix(REFUSED).decode(errors="replace"))
        if verdict != PASSED:
            last = (verdict or b"".join(printed[-1:])).decode(errors="replace")[:ERROR_CHARS]
            raise TransportError(
                f"peer {agent} was refused: the process that read its metadata first was ended by it ({last or 'no word'}); both "
                "sides must run the same NIXL release, and a peer that does is not to be trusted"
            )


_held: HeldThings[NixlSettings, PeerCheck] = HeldThings()


def hold_check(settings: NixlSettings) -> PeerCheck:
    """Return the check of this process, which the first NIXL transport opens; followed by `let_go_of_check`."""
    return _held.hold(settings, lambda: PeerCheck(settings))


def let_go_of_check(settings: NixlSettings) -> None:
    """The last NIXL transport closes it."""
    _held.let_go(settings, PeerCheck.close)


def _digest(content: NixlEndpoint) -> bytes:
    return hashlib.sha256(content.model_dump_json().encode()).digest()


class _Parent:
    """The process from which those are forked that read descriptions; started when it is needed and not there."""

    def __init__(self, settings: NixlSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def ask(self, task: _Task, *, timeout_s: float) -> bytes:
        """Return all that a new process says of a description. Raises TimeoutError, OSError."""
        ends_at_s = time.monotonic() + timeout_s
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                self._hand_over(theirs)
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

    def close(self) -> None:
        """End the process, if there is one, and start no other. It would end by itself with this one."""
        with self._lock:
            self._closed = True
            self._end()

    def _hand_over(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed:
                raise TransportError("the nixl transport has been closed")
            if self._control is None or self._process is None or self._process.poll() is not None:
                self._start()
            assert self._control is not None
            socket.send_fds(self._control, [b"."], [connection.fileno()])

    def _start(self) -> None:
        self._end()
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                module_command(__name__, self._settings.model_dump_json()),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=child_environment(os.environ) | {"UCX_HANDLE_ERRORS": "none", "OPENBLAS_NUM_THREADS": "1"},
            )

    def _end(self) -> None:
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.kill()
            self._process.wait()


# ------------------------------------------------------------------------------------------- in the process apart


def main() -> None:
    """Fork a process for each connection that the worker hands over, until the worker has ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the worker decides when we end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    settings = NixlSettings.model_validate_json(sys.argv[1])
    load_library(settings)
    control = socket.socket(fileno=os.dup(0))
    while True:
        word, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not word:
            return
        if os.fork() == 0:
            control.close()
            _read(socket.socket(fileno=descriptors[0]), settings)
        os.close(descriptors[0])


def _read(connection: socket.socket, settings: NixlSettings) -> NoReturn:
    """Do what the rank worker is about to do, and say that it went well, or what was wrong."""
    for standard in (0, 1, 2):
        os.dup2(connection.fileno(), standard)  # the last words of the library are an answer, too
    verdict = b""
    try:
        task = _Task.model_validate_json(b"".join(iter(functools.partial(connection.recv, 65_536), b"")))
        signal.alarm(math.ceil(settings.check_timeout_s))  # nobody else ends it
        agent = NixlAgent(settings)
        agent.device = task.device
        for _ in introduce(agent, task.content, ProbeTarget(agent), timeout_s=settings.connect_timeout_s):
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

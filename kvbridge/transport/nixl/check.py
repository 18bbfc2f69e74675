"""A process apart that reads the metadata of nixl peers before the rank worker does, and has nothing to lose.

The library does not survive metadata that was made to break it (1.5.1; `python -m tests.fuzz.nixl_metadata --unchecked`). Therefore
an agent in a process apart first loads the very same bytes and reads a byte of the peer's memory. Whatever ends that process is a
refusal. Each description is read by a process of its own (0.2 s), forked from one that has loaded the library and nothing else. The
loaded process starts with the first transport, not with the first peer: its imports take 1.3 s of a processor. On a full host (two
cores, six busy processes) they made the first connection take 14 s; later ones took 2 s.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

from kvbridge.config.transports import NixlSettings
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import FrozenModel, NonNegative
from kvbridge.pool.memory.gpu_memory import HeldThings
from kvbridge.processes import child_environment, module_command
from kvbridge.transport.nixl.agent import NixlAgent, NixlEndpoint, load_library

ERROR_CHARS = 2_000
PASSED, REFUSED = b"passed", b"refused: "


class _Task(FrozenModel):
    content: NixlEndpoint
    device: NonNegative | None  # whose context is to be current when the metadata is read


class PeerCheck:
    """The process apart, which all NIXL transports of a process share."""

    def __init__(self, settings: NixlSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._control, self._theirs = socket.socketpair()
        self._process = self._started()

    def check(self, content: NixlEndpoint, device: int | None) -> None:
        """Return when a process apart has survived a description; blocks. Raises TransportError with its last words."""
        limit_s, agent = self._settings.check_timeout_s, content.agent
        try:
            said = self._ask(_Task(content=content, device=device).model_dump_json().encode())
        except TimeoutError as error:
            late = f"peer {agent} could not be checked within transports.nixl.check_timeout_s ({limit_s:g} s)"
            raise TransportError(f"{late}: the peer hangs, or this host is overloaded") from error
        except OSError as error:
            raise TransportError(f"peer {agent} could not be checked: {error}") from error
        *printed, verdict = said.splitlines() or [b""]
        if verdict.startswith(REFUSED):
            raise TransportError(verdict.removeprefix(REFUSED).decode(errors="replace"))
        if verdict != PASSED:
            last = (verdict or b"".join(printed[-1:])).decode(errors="replace")[:ERROR_CHARS]
            raise TransportError(
                f"peer {agent} was refused: the process that read its metadata first was ended by it ({last or 'no word'})"
            )

    def close(self) -> None:
        """End the process. Checks that are under way fail, and so do later ones."""
        with self._lock:
            self._control.close()
            self._theirs.close()
            self._process.kill()
            self._process.wait()

    def _ask(self, task: bytes) -> bytes:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(self._settings.check_timeout_s)
            with theirs, self._lock:
                if self._process.poll() is not None:
                    self._process = self._started()
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            said = list[bytes]()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it has died, and said why
                ours.sendall(task)
                ours.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                said.extend(iter(functools.partial(ours.recv, 65_536), b""))
        return b"".join(said)

    def _started(self) -> subprocess.Popen[bytes]:
        environment = child_environment(os.environ) | {"UCX_HANDLE_ERRORS": "none", "OPENBLAS_NUM_THREADS": "1"}
        command = module_command(__name__, self._settings.model_dump_json())  # with a socket for standard input
        return subprocess.Popen(command, stdin=self._theirs.fileno(), stdout=subprocess.DEVNULL, env=environment)


CHECKS: HeldThings[NixlSettings, PeerCheck] = HeldThings()  # opened by the first NIXL transport, closed by the last


def main() -> None:
    """Fork a process for each connection that the rank worker hands over, until the rank worker has ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGINT, signal.SIGCHLD):  # Ctrl-C goes to the whole group; the worker decides when we end
        signal.signal(number, signal.SIG_IGN)
    settings = NixlSettings.model_validate_json(sys.argv[1])
    load_library(settings)
    control = socket.socket(fileno=os.dup(0))
    while (received := socket.recv_fds(control, 1, 1))[0]:
        if os.fork() == 0:
            control.close()
            _read(socket.socket(fileno=received[1][0]), settings)
        os.close(received[1][0])


def _read(connection: socket.socket, settings: NixlSettings) -> None:
    """Load the metadata as the rank worker is about to do, send the verdict, and end the process."""
    for standard in (0, 1, 2):
        os.dup2(connection.fileno(), standard)  # the library's last words are an answer, too
    verdict = b""
    try:
        task = _Task.model_validate_json(b"".join(iter(functools.partial(connection.recv, 65_536), b"")))
        signal.alarm(math.ceil(settings.check_timeout_s))  # nobody else ends it
        agent = NixlAgent(settings)
        agent.device = task.device
        agent.introduce(task.content, timeout_s=settings.connect_timeout_s)
        agent.forget_peer(task.content.agent)
        verdict = PASSED
    except BridgeError as error:
        verdict = REFUSED + str(error).replace("\n", " ").encode()[:ERROR_CHARS]
    except Exception as error:  # noqa: BLE001 - a defect of ours is a refusal that says so
        verdict = REFUSED + f"the check failed with {error!r}; please report it".encode()[:ERROR_CHARS]
    finally:
        connection.sendall(b"\n" + verdict)
        os._exit(0)  # the library's own end is not what is tested


if __name__ == "__main__":
    main()

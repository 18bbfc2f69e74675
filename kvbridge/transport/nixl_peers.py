"""How a nixl peer is met: what it says of itself, and the process apart that reads it first.

Owns: the endpoint's content, the first contact with a peer, and the check before it. Must not know: transfers, our registrations.

Why a process apart. The library reads a peer's metadata in native code and does not survive bytes that were made to break it
(1.5.1: one in 40 mutations of the peer's UCX address ended the process, by a failed assertion or a segmentation fault, all of
them while the metadata was loaded). So before a rank worker loads anything, a process that has nothing to lose does with the very
same bytes what the worker is about to do: an agent of its own loads them and reads a byte of the peer's memory. It takes half a
second, on another thread. Whatever ends that process is a refusal, and what it has survived is remembered by its digest. It also
keeps peers that do not answer out of the worker, where each would cost a descriptor until the agent's end.

Run as `python -m kvbridge.transport.nixl_peers`, with a `_Task` on standard input and an error in words on standard output.
"""

from __future__ import annotations

import functools
import hashlib
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field

from kvbridge.config.transports import NixlSettings
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.ids import FrozenModel, MemoryKind, NonNegative, Positive
from kvbridge.transport.background import Call, take_turn
from kvbridge.transport.base import Steps
from kvbridge.transport.nixl_agent import NixlAgent
from kvbridge.transport.windowed import Progress

MOST_PASSED = 4096
"""Descriptions that are remembered; the oldest are forgotten first."""
PROCESSES = max(2, min(8, os.cpu_count() or 1))
POLL_S = 0.0005
ERROR_CHARS = 2_000


class NixlExtent(FrozenModel):
    """One registration, as a peer needs to know it."""

    address: Positive
    length_bytes: Positive
    kind: MemoryKind = MemoryKind.DRAM
    device: NonNegative = 0


class NixlEndpoint(FrozenModel):
    """What a peer needs to know, as JSON in `Endpoint.data`."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    agent: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,200}$")]
    metadata: bytes
    """What the library itself wants to be told; read by the library only."""
    extents: tuple[NixlExtent, ...]


class ProbeTarget:
    """A registered byte, into which a byte of a peer's memory is read."""

    def __init__(self, agent: NixlAgent) -> None:
        self._byte = np.zeros(1, dtype=np.uint8)
        self.row = np.array([[self._byte.ctypes.data, 1, 0]], dtype=np.uint64)
        agent.register(MemoryKind.DRAM, self.row)


def introduce(
    agent: NixlAgent, content: NixlEndpoint, target: ProbeTarget, *, timeout_s: float, clock: Clock = monotonic
) -> Steps[None]:
    """Have an agent take a peer's metadata in and read a byte of its memory, which opens the connection (1 to 20 ms).

    A read that does not end stays behind; all it can ever touch is the byte of `target`. Raises TransportError.
    """
    name = agent.load_peer(content.metadata)
    if name != content.agent:
        raise TransportError(f"a peer calls itself {content.agent}, and its metadata names {name}; it was refused")
    ordered = sorted(content.extents, key=lambda extent: extent.kind is not MemoryKind.DRAM)  # host memory, if any
    for extent in ordered[:1]:
        remote = np.array([[extent.address, 1, extent.device]], dtype=np.uint64)
        request = agent.post_read(name, (MemoryKind.DRAM, target.row), (extent.kind, remote))
        ends_at_s = clock() + timeout_s
        while (answer := agent.check(request)).progress is Progress.PENDING:
            if clock() >= ends_at_s:
                agent.release(request)
                raise TransportError(
                    f"peer {name} did not answer within transports.nixl.connect_timeout_s ({timeout_s:g} s); it hangs, or its UCX "
                    "ports are closed from here"
                )
            yield
        if answer.progress is not Progress.DONE:
            raise TransportError(f"peer {name} cannot be reached: {answer.reason}")


# ------------------------------------------------------------------------------------------- the check


class _Task(FrozenModel):
    """What the process apart is given."""

    settings: NixlSettings
    content: NixlEndpoint
    device: NonNegative | None
    """The device whose context is to be current when the metadata is read."""


_passed: dict[bytes, None] = {}
"""Digests of what a process has survived, the oldest first."""
_processes = threading.BoundedSemaphore(PROCESSES)


def check(
    settings: NixlSettings, content: NixlEndpoint, device: int | None, *, clock: Clock = monotonic
) -> Steps[None]:
    """Go on only with a description that a process of its own has survived. Raises TransportError with what it died of."""
    digest = _digest(content)
    if digest in _passed:
        return
    task = _Task(settings=settings, content=content, device=device)
    limit_s = settings.check_timeout_s
    name = f"check nixl peer {content.agent}"
    late = f"peer {content.agent} could not be checked within twice transports.nixl.check_timeout_s ({limit_s:g} s)"
    until_s = clock() + 2 * limit_s
    yield from take_turn(name, until_s=until_s, clock=clock)
    call = Call(functools.partial(_run, task), name=name)
    yield from call.result(until_s=until_s, clock=clock, late=late)
    _passed[digest] = None
    while len(_passed) > MOST_PASSED:
        del _passed[next(iter(_passed))]


def check_again(content: NixlEndpoint) -> None:
    """Have a description checked the next time, although it was remembered as good: the peer has stopped answering."""
    _passed.pop(_digest(content), None)


def _digest(content: NixlEndpoint) -> bytes:
    return hashlib.sha256(content.model_dump_json().encode()).digest()


def _run(task: _Task) -> None:
    """Blocks until the process has ended, or has had its time."""
    agent, limit_s = task.content.agent, task.settings.check_timeout_s
    late = f"peer {agent} could not be checked within transports.nixl.check_timeout_s ({limit_s:g} s)"
    if not _processes.acquire(timeout=limit_s):
        raise TransportError(f"{late}: {PROCESSES} other peers are being checked")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "kvbridge.transport.nixl_peers"],
            input=task.model_dump_json().encode(),
            capture_output=True,
            timeout=limit_s,
            check=False,
            env=os.environ | {"UCX_HANDLE_ERRORS": "none"},
        )
    except subprocess.TimeoutExpired as error:
        raise TransportError(f"{late}: it was killed; the peer hangs, or this host is overloaded") from error
    except OSError as error:
        raise TransportError(
            f"peer {agent} could not be checked: {sys.executable} cannot be started: {error}"
        ) from error
    finally:
        _processes.release()
    if done.returncode < 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        how = " ".join([signal.Signals(-done.returncode).name, *said])[:ERROR_CHARS]
        raise TransportError(
            f"peer {agent} was refused: the process that read its metadata first was ended by it ({how}); both sides must run the "
            "same NIXL release, and a peer that does is not to be trusted"
        )
    if done.returncode or done.stdout:
        raise TransportError((done.stdout or done.stderr[-ERROR_CHARS:]).decode(errors="replace"))


def main() -> None:
    """Do what the rank worker is about to do, and say what was wrong with it. Does not return."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.dup(1)
    os.dup2(2, 1)  # whatever the library prints
    task = _Task.model_validate_json(sys.stdin.buffer.read())
    signal.alarm(math.ceil(task.settings.check_timeout_s))  # nobody may be left to kill us
    try:
        agent = NixlAgent(task.settings)
        agent.device = task.device
        for _ in introduce(agent, task.content, ProbeTarget(agent), timeout_s=task.settings.connect_timeout_s):
            time.sleep(POLL_S)
        agent.forget_peer(task.content.agent)
    except BridgeError as error:
        os.write(answers, str(error).encode()[:ERROR_CHARS])
    os._exit(0)  # the library's own end is not what is tested


if __name__ == "__main__":
    main()

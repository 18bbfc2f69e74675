"""Processes of an engine's server: found by parentage, killed, frozen, and ended whatever happens."""

import ctypes
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
GONE_S = 30.0


def die_with_parent() -> None:
    """Have the kernel end this process with the thread that started it: called in the child, before it becomes the engine."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it, parents first; empty when it has ended."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def is_node(process: psutil.Process) -> bool:
    try:
        line = process.cmdline()
    except psutil.Error:
        return False
    return any(line[at : at + 2] == ["-m", "kvbridge"] for at in range(len(line)))


def config_of(node: psutil.Process) -> Path:
    line = node.cmdline()
    return Path(line[line.index("--config") + 1])


def send(number: signal.Signals, processes: list[psutil.Process]) -> None:
    """Signal processes; those that have ended are left out."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


@contextmanager
def frozen(processes: list[psutil.Process]) -> Iterator[None]:
    send(signal.SIGSTOP, processes)
    try:
        yield
    finally:
        send(signal.SIGCONT, processes)


def end(processes: list[psutil.Process], *, grace_s: float = 0.0) -> None:
    """End processes that were told to, after a while with SIGKILL. Waits for that. Raises AssertionError when one is not."""
    if grace_s:  # a stopped process that is killed must not go on for a moment before
        send(signal.SIGCONT, processes)
        psutil.wait_procs(processes, timeout=grace_s)
    left = [process for process in processes if process.is_running()]
    send(signal.SIGKILL, left)
    until_s = time.monotonic() + GONE_S
    while left and time.monotonic() < until_s:
        left = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        time.sleep(0.05)
    assert not left, f"still there after SIGKILL: {left}"

"""Calls that block, on threads of their own, so that the thread that moves bytes does not wait for them.

Nothing stops a thread from outside, so a call that never returns keeps its thread for good. There are at most `MOST_CALLS` in a
process; further ones wait for their turn, and are refused when it does not come in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from kvbridge.core.clock import Clock
from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.transport.base import Steps

MOST_CALLS = 64

T = TypeVar("T")

log = structlog.get_logger(__name__)

_free = threading.BoundedSemaphore(MOST_CALLS)


def take_turn(name: str, *, until_s: float, clock: Clock) -> Steps[None]:
    """Wait until there may be one more call, which the caller makes at once. Raises TransportError when it is too late."""
    while not _free.acquire(blocking=False):
        if clock() >= until_s:
            raise TransportError(
                f"cannot {name}: {MOST_CALLS} calls of this process have not returned yet; find out which peers do not answer, "
                "or restart this rank worker"
            )
        yield


def give_turn_back() -> None:
    """End a turn whose call has not been made after all."""
    _free.release()


def start_thread(target: Callable[..., None], *arguments: object, name: str) -> threading.Thread:
    """Start a daemon thread. Raises TransportError when the process may have no more threads now."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise TransportError(
            f"no thread can be started for '{name}': {error}; raise this rank worker's limit of processes (ulimit -u, TasksMax, "
            "pids.max)"
        ) from error
    return thread


class Call(Generic[T]):
    """One call on a daemon thread, begun at once; its turn has been taken (`take_turn`), and ends with the call."""

    def __init__(self, function: Callable[[], T], *, name: str) -> None:
        """`name` says what it is, for the thread and for messages. Raises TransportError when it cannot be made."""
        self._name = name
        self._ended = threading.Event()
        self._result: list[T] = []
        self._error = ""
        try:
            start_thread(self._run, function, name=name)
        except TransportError:
            give_turn_back()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end, but not longer; whether it has ended."""
        return self._ended.wait(timeout_s)

    def result(self, *, until_s: float, clock: Clock, late: str) -> Steps[T]:
        """Return what the call returns; once only. Raises TransportError when it fails, or `late` when it has not ended by then."""
        while not self._ended.is_set():
            if clock() >= until_s:
                raise TransportError(late)
            yield
        if self._error:
            raise TransportError(self._error)
        return self._result.pop()

    def _run(self, function: Callable[[], T]) -> None:
        """An error is kept as text: its traceback would keep alive all that the call had in hand."""
        try:
            self._result.append(function())
        except BridgeError as error:
            self._error = str(error)
        except Exception as error:
            log.exception("background_call_failed", call=self._name)
            self._error = f"cannot {self._name}: {type(error).__name__}: {error}; please report it"
        finally:
            del function
            give_turn_back()
            self._ended.set()

"""Calls that block, on a few threads of their own, so that the thread that moves bytes does not wait for them.

Nothing stops a thread from outside, so a call that never returns keeps its thread. At most `MOST_CALLS` are under way in a
process; further ones wait for their turn, and are refused when it does not come in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.process import Clock

MOST_CALLS = 64

T = TypeVar("T")

log = structlog.get_logger(__name__)

_free = threading.BoundedSemaphore(MOST_CALLS)


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
    """One call, on a daemon thread as soon as there is a turn for it. Asked after by one thread."""

    def __init__(
        self,
        function: Callable[[], T],
        *,
        name: str,
        timeout_s: float,
        late: str,
        clock: Clock,
        given_up: Callable[[T | None], None] = lambda _: None,
    ) -> None:
        """`name` says what is done, for messages; `late` is the error when it has not ended after `timeout_s`.

        `given_up` hears that nobody waits for it any more, without a result, and of a result that nobody gets, to take that back.
        """
        self._function: Callable[[], T] | None = function
        self._name = name
        self._ends_at_s = clock() + timeout_s
        self._late = late
        self._clock = clock
        self._tell_given_up = given_up
        self._lock = threading.Lock()
        self._given_up = False
        self._ended = threading.Event()
        self._result: list[T] = []
        self._error = ""

    def done(self) -> bool:
        """Return whether it has a result or has failed. The first time that there is a turn for it, it begins."""
        if self._ended.is_set() or self._given_up:
            return True
        late = self._late
        if self._function is not None and not self._begin():
            late = (
                f"cannot {self._name}: {MOST_CALLS} calls of this process have not returned yet; find out which peers do not "
                "answer, or restart this rank worker"
            )
        if self._clock() >= self._ends_at_s and not self._ended.is_set():
            self.give_up()
            self._error = late
        return self._ended.is_set() or self._given_up

    def result(self) -> T:
        """Return what it has returned, once. Raises TransportError when it has failed or was too late."""
        if self._error:
            raise TransportError(self._error)
        return self._result.pop()

    def give_up(self) -> None:
        """Nobody waits for it any more; what it returns all the same is taken back."""
        with self._lock:
            self._given_up = True
            found, self._result = self._result, []
        self._tell_given_up(found[0] if found else None)

    def _begin(self) -> bool:
        if not _free.acquire(blocking=False):
            return False
        function, self._function = self._function, None
        try:
            start_thread(self._run, function, name=self._name)
        except TransportError as error:
            _free.release()
            self._error = str(error)
            self._ended.set()
        return True

    def _run(self, function: Callable[[], T]) -> None:
        """An error is kept as text: its traceback would keep alive all that the call had in hand."""
        error = ""
        try:
            found = function()
        except BridgeError as reason:
            error = str(reason)
        except Exception as reason:
            log.exception("background_call_failed", call=self._name)
            error = f"cannot {self._name}: {type(reason).__name__}: {reason}; please report it"
        else:
            with self._lock:
                wanted = not self._given_up
                if wanted:
                    self._result.append(found)
            if not wanted:
                self._tell_given_up(found)
            del found
        finally:
            del function
            _free.release()
            with self._lock:
                if not self._given_up:
                    self._error = error
            self._ended.set()

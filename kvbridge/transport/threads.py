"""Threads of transports: calls that block (`Call`), and a thread that pushes transfers (`Pump`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import structlog

from kvbridge.core.errors import BridgeError, TransportError
from kvbridge.core.process import Clock

if TYPE_CHECKING:
    from kvbridge.transport.windowed import WindowedTransfer

MOST_CALLS = 64
"""Most calls that run in a process at once: nothing stops a thread from outside, so a call that never returns keeps its thread."""
IDLE_WAIT_S = 1.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.0004
"""Between two rounds of the pump in which nothing was started and nothing ended. The pause is doubled each time, so that the end of
a page is seen at once and a long transfer is not asked after too often."""

T = TypeVar("T")

log = structlog.get_logger(__name__)

_free = threading.BoundedSemaphore(MOST_CALLS)


def start_thread(target: Callable[..., object], *arguments: object, name: str) -> threading.Thread:
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


def apart(work: Callable[[], object], *, name: str) -> None:
    """Do work that may take long on a thread of its own, or here and now when the process may have no more threads."""
    try:
        start_thread(work, name=name)
    except TransportError as error:
        log.warning("no_thread", work=name, reason=str(error))
        work()


class Call(Generic[T]):
    """One call that blocks, on a daemon thread as soon as a turn is free. Polled by one thread."""

    def __init__(  # noqa: PLR0913 - each is something that calls differ in
        self,
        function: Callable[[], Any],
        *,
        name: str,
        timeout_s: float,
        late: str,
        clock: Clock,
        then: Callable[[Any], T] = lambda found: found,
        given_up: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """`name` names the work in messages; `late` is the error of a call that has not ended after `timeout_s`.

        `poll` returns `then` of the function's result; `then` runs on the polling thread. `given_up` undoes a result that nobody
        gets; it is called with None when the call is cancelled before there is a result.
        """
        self._function: Callable[[], Any] | None = function
        self._name = name
        self._ends_at_s = clock() + timeout_s
        self._late = late
        self._clock = clock
        self._then = then
        self._tell_given_up = given_up
        self._lock = threading.Lock()
        self._given_up = False
        self._ended = threading.Event()
        self._result: list[Any] = []
        self._error = ""

    def poll(self) -> T | None:
        """Return the result, once, or None before there is one. Never blocks.

        The first poll that finds a free turn begins the call. Raises TransportError when the call has failed or was too late.
        """
        late = self._late
        if self._function is not None and not self._given_up and not self._begin():
            late = (
                f"cannot {self._name}: {MOST_CALLS} calls of this process have not returned yet; find out which peers do not "
                "answer, or restart this rank worker"
            )
        if not self._ended.is_set() and not self._given_up and self._clock() >= self._ends_at_s:
            self.cancel()
            self._error = late
        if not self._ended.is_set() and not self._given_up:
            return None
        if self._error:
            raise TransportError(self._error)
        return self._then(self._result.pop())

    def cancel(self) -> None:
        """Wait for the call no more. A result that it has all the same goes to `given_up`."""
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

    def _run(self, function: Callable[[], Any]) -> None:
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


class Pump:
    """A thread that pushes transfers until each is terminal; they take turns. The thread starts with the first transfer.

    A copy by the processor lets go of the interpreter lock, so the caller's loop goes on beside it, and the loop's pauses cost no
    bandwidth. Posting a MiB over TCP takes NIXL 0.3 ms on idle cores and several on busy ones, since the first bytes are sent right
    there. A loop that stops after a millisecond then posts one batch, pauses, finds it sent and never has a second one in flight:
    0.4 GB/s where 2 were possible. This thread refills until the window is full, and the caller may poll as seldom as it likes.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._active: list[WindowedTransfer[Any]] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pause_s = SHORTEST_PAUSE_S

    def require_open(self) -> None:
        """Raise TransportError when the pump has ended."""
        if self._closed:
            raise TransportError(f"the {self._name} transport has been closed or has failed; create another one")

    def add(self, transfer: WindowedTransfer[Any]) -> None:
        """Push a transfer until it is terminal. Raises TransportError when the pump has ended, or its thread cannot start."""
        with self._changed:
            self.require_open()
            if self._thread is None:
                self._thread = start_thread(self._run, name=self._name)
            transfer.pumped = True
            self._active.append(transfer)
            self._changed.notify_all()

    def close(self, *, timeout_s: float) -> list[WindowedTransfer[Any]]:
        """End the thread after the call that it is in, and return the transfers that are not terminal.

        Raises TransportError when that call has not returned after `timeout_s`.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TransportError(
                    f"the {self._name} transport's thread did not end within transports.{self._name}.close_timeout_s "
                    f"({timeout_s:g} s); it may still write, so the pages of its transfers must not be used again before this "
                    "process has ended"
                )
        left, self._active = self._active, []
        return left

    def _run(self) -> None:
        try:
            while not self._closed:
                self._round()
        finally:
            self._fail_unless_closed()

    def _round(self) -> None:
        with self._changed:
            if not self._active:
                self._changed.wait(IDLE_WAIT_S)
            active = list(self._active)
        moved = False
        for transfer in active:
            moved = transfer.push() or moved
            if self._closed:
                return
        if moved:
            self._pause_s = SHORTEST_PAUSE_S
        elif active:
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if any(transfer.state.terminal for transfer in active):
            with self._changed:
                self._active[:] = [transfer for transfer in self._active if not transfer.state.terminal]

    def _fail_unless_closed(self) -> None:
        """After a defect nobody pushes any more, so nothing is quiet. The interpreter prints the traceback."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            reason = f"the {self._name} transport's thread has failed; close the transport and create another one"
            for transfer in self._active:
                transfer.cut_off(reason, quiet=False)

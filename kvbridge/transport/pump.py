"""A thread that pushes transfers whose work blocks, so that the caller's loop does not.

Why a thread. A copy by the processor lets go of the interpreter lock, so the caller's loop goes on beside it, and its pauses cost
no bandwidth. Posting a MiB over TCP takes NIXL 0.3 ms on idle cores and several on busy ones, since the first bytes are sent right
there. A loop that stops after a millisecond then posts one batch, pauses, finds it sent and never has a second one in flight:
0.4 GB/s where 2 were possible. This thread refills until the window is full, and the caller may poll as seldom as it likes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from kvbridge.core.errors import TransportError
from kvbridge.transport.base import Transfer, TransferState, TransferStatus
from kvbridge.transport.calls import start_thread
from kvbridge.transport.windowed import WindowedTransfer

IDLE_WAIT_S = 1.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.00005, 0.0004
"""Between two rounds in which nothing was started and nothing ended; doubled each time, so that a page is answered for at once and
a long transfer is not asked after more often than is good for it."""


class PumpedTransfer(Transfer):
    """What the submitting thread holds of a transfer that the pump pushes.

    The reason to stop is written by the caller only, the rest by the pump only; each is one reference, so no lock is needed.
    """

    def __init__(self, make: Callable[[], WindowedTransfer[Any]]) -> None:
        self._make: Callable[[], WindowedTransfer[Any]] | None = make
        """Called by the pump, since the window is its own; dropped then, so that the transfer drops what it holds at its end."""
        self._inner: WindowedTransfer[Any] | None = None
        self._stop = ""
        self._status = TransferStatus(TransferState.ACTIVE)

    def __repr__(self) -> str:
        return f"<PumpedTransfer: {self._status.state.value}, {self._inner!r}>"

    def poll(self) -> TransferStatus:
        """Look only."""
        return self._status

    def abort(self, reason: str) -> None:
        """Takes effect with the pump's next round."""
        self._stop = self._stop or reason

    def push(self) -> bool:
        """Push it forward, and say whether anything was started or ended. Called by the pump."""
        if self._make is not None:
            self._inner, self._make = self._make(), None
        assert self._inner is not None
        if self._stop:
            self._inner.abort(self._stop)
        before = self._inner.progress
        self._status = self._inner.poll()
        return self._status.state.terminal or before != self._inner.progress

    def end(self, state: TransferState, error: str, *, in_transit: bool) -> None:
        """Become terminal, unless it is. Called when the pump has ended."""
        if not self._status.state.terminal:
            self._status = TransferStatus(state, error, in_transit)
        self._inner = self._make = None


class Pump:
    """Pushes transfers until each is terminal; they take turns. Its thread starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._active: list[PumpedTransfer] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self._pause_s = SHORTEST_PAUSE_S

    def __repr__(self) -> str:
        return f"<Pump {self._name}: {len(self._active)} transfers{', closed' if self._closed else ''}>"

    def require_open(self) -> None:
        """Raise TransportError when the pump has ended."""
        if self._closed:
            raise TransportError(f"the {self._name} transport has been closed or has failed; create another one")

    def add(self, transfer: PumpedTransfer) -> None:
        """Push this transfer until it is terminal. Raises TransportError when the pump has ended, or cannot begin."""
        with self._changed:
            self.require_open()
            if self._thread is None:
                self._thread = start_thread(self._run, name=self._name)
            self._active.append(transfer)
            self._changed.notify_all()

    def close(self, *, timeout_s: float) -> list[PumpedTransfer]:
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
                    f"({timeout_s:g} s); it may still write, so pages of its transfers must not be used again before this process "
                    "has ended"
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
        ended = set()
        for transfer in active:
            moved = transfer.push() or moved
            if transfer.poll().state.terminal:
                ended.add(transfer)
            if self._closed:
                return
        if moved:
            self._pause_s = SHORTEST_PAUSE_S
        elif active:
            time.sleep(self._pause_s)
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        if ended:
            with self._changed:
                self._active[:] = [transfer for transfer in self._active if transfer not in ended]

    def _fail_unless_closed(self) -> None:
        """A defect has ended the thread, and its traceback tells of it: nobody pushes any more, so nothing is quiet."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for transfer in self._active:
                transfer.end(
                    TransferState.FAILED_NOT_QUIET,
                    f"the {self._name} transport's thread has failed; close the transport and create another one",
                    in_transit=True,
                )

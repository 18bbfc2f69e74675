"""The thread that makes a local transport's copies, and the transfers that it works on.

Owns: the order of slices among transfers, aborts and deadlines between slices. Must not know: files, peers, endpoints.

Copies run on a thread of their own since the reference copy lets go of the interpreter lock: the caller's loop
keeps its millisecond, and its pauses between polls cost no bandwidth. Transfers take turns by slices, so a small
one never waits for a large one.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque

import numpy as np

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import TransportError
from kvbridge.core.plan.operations import Operations
from kvbridge.kernels.reference import copy_operations
from kvbridge.transport.base import Transfer, TransferState, TransferStatus

SLICE_OPERATIONS = 4096
"""Bounds a slice of very short operations to about a millisecond as well."""
IDLE_WAIT_S = 1.0
POPULATE_STEP_BYTES = 16 << 20
MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class CopyTransfer(Transfer):
    """Copies within this process; `keep_alive` is whatever keeps the destinations mapped, and is dropped at the end.

    `advance` belongs to the copier's thread, everything else to the thread that submitted. What they share is
    written by one of them only: the reason to stop by the caller, the status by the copier.
    """

    def __init__(
        self,
        operations: Operations,
        *,
        peer: str,
        deadline_s: float,
        keep_alive: object = None,
        clock: Clock = monotonic,
    ) -> None:
        self.keep_alive: object = keep_alive
        self._operations = operations
        self._ends_bytes = np.cumsum(operations.length, dtype=np.uint64)
        self._peer = peer
        self._clock = clock
        self._deadline_s = deadline_s
        self._ends_at_s = clock() + deadline_s
        self._next = 0
        self._stop = ""
        self._status = TransferStatus(TransferState.ACTIVE)

    def __repr__(self) -> str:
        done = f"{self._next} of {len(self._operations)} operations done"
        return f"<CopyTransfer to {self._peer}: {self._status.state.value}, {done}>"

    @property
    def active(self) -> bool:
        """Whether something of it is still to be copied."""
        return not self._status.state.terminal

    def poll(self) -> TransferStatus:
        """See `Transfer.poll`; looks only, since the copier pushes."""
        return self._status

    def abort(self, reason: str) -> None:
        """See `Transfer.abort`; takes effect after the slice that is being copied."""
        self._stop = self._stop or f"aborted: {reason}"

    def advance(self, slice_bytes: int) -> None:
        """Copy one slice, or end."""
        if self._next == len(self._operations):
            self._end(TransferState.DONE)
        elif self._stop:
            self.fail(self._stop)
        elif self._clock() >= self._ends_at_s:
            self.fail(f"deadline of {self._deadline_s:g} s passed")
        else:
            part = self._operations[self._next : self._slice_stop(slice_bytes)]
            copy_operations(part.source, part.destination, part.length)
            self._next += len(part)
            if self._next == len(self._operations):
                self._end(TransferState.DONE)

    def fail(self, reason: str) -> None:
        """End quietly; nothing is being copied when this is called."""
        done = f"{self._next} of {len(self._operations)} operations done"
        self._end(TransferState.FAILED_QUIET, f"transfer to {self._peer}: {reason} ({done})")

    def _slice_stop(self, slice_bytes: int) -> int:
        before = int(self._ends_bytes[self._next - 1]) if self._next else 0
        by_bytes = int(np.searchsorted(self._ends_bytes, np.uint64(before + slice_bytes), side="right"))
        return max(self._next + 1, min(by_bytes, self._next + SLICE_OPERATIONS))

    def _end(self, state: TransferState, error: str = "") -> None:
        self._status = TransferStatus(state, error)
        self.keep_alive = None


class Copier:
    """One thread, started by the first transfer or the first range to populate."""

    def __init__(self, *, slice_bytes: int) -> None:
        self._slice_bytes = slice_bytes
        self._changed = threading.Condition()
        self._queue: deque[CopyTransfer] = deque()
        self._untouched: deque[tuple[int, int, object]] = deque()
        self._closed = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<Copier: {len(self._queue)} transfers{', closed' if self._closed else ''}>"

    def require_open(self) -> None:
        """Raise TransportError after `close`."""
        if self._closed:
            raise TransportError("this local transport has been closed; create another one")

    def add(self, transfer: CopyTransfer) -> None:
        """Work on a transfer until it ends."""
        with self._changed:
            self.require_open()
            self._queue.append(transfer)
            self._wake()

    def populate(self, address: int, length_bytes: int, keep_alive: object) -> None:
        """Enter the pages of a fresh mapping into this process's page table when there is nothing else to do.

        The first write through a mapping is otherwise three times slower than later ones. For memory that exists
        already: pages that do not would be allocated.
        """
        with self._changed:
            self.require_open()
            self._untouched.append((address, length_bytes, keep_alive))
            self._wake()

    def abort_to(self, keep_alive: object, reason: str) -> None:
        """Abort every transfer that keeps this object alive, and forget its pages."""
        with self._changed:
            for transfer in self._queue:
                if transfer.keep_alive is keep_alive:
                    transfer.abort(reason)
            kept = [item for item in self._untouched if item[2] is not keep_alive]
            self._untouched = deque(kept)

    def close(self, *, timeout_s: float) -> None:
        """Stop after the slice in hand; what is left fails quietly. Raises TransportError after `timeout_s`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TransportError(
                    "the local transport's copier did not end within transports.local.close_timeout_s "
                    f"({timeout_s:g} s); it "
                    "may still write, so the pages of its transfers must not be used again before this process "
                    "has ended"
                )

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvbridge-local-copier", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._step()
        finally:
            self._end_all()

    def _step(self) -> None:
        with self._changed:
            if not self._queue and not self._untouched:
                self._changed.wait(IDLE_WAIT_S)
            transfer = self._queue[0] if self._queue else None
            pages = self._untouched[0] if transfer is None and self._untouched else None
        if transfer is not None:
            transfer.advance(self._slice_bytes)
            self._rotate(transfer)
        elif pages is not None:
            self._populate_some(pages)

    def _rotate(self, transfer: CopyTransfer) -> None:
        """Only this thread takes from the queue, so the transfer is still its first."""
        with self._changed:
            self._queue.popleft()
            if transfer.active:
                self._queue.append(transfer)

    def _populate_some(self, pages: tuple[int, int, object]) -> None:
        address, length_bytes, keep_alive = pages
        step = min(length_bytes, POPULATE_STEP_BYTES)
        answer = _libc.madvise(address, step, MADV_POPULATE_WRITE)
        with self._changed:
            if not self._untouched or self._untouched[0] is not pages:
                return  # forgotten meanwhile, by `abort_to`
            self._untouched.popleft()
            if answer == 0 and length_bytes > step:  # an older kernel knows no such advice; then first writes are slow
                self._untouched.append((address + step, length_bytes - step, keep_alive))

    def _end_all(self) -> None:
        """Nothing is copied any more: by `close`, or by a defect that the thread's own traceback tells of."""
        with self._changed:
            self._closed = True
            for transfer in self._queue:
                if transfer.active:
                    transfer.fail("the transport was closed")
            self._queue.clear()
            self._untouched.clear()

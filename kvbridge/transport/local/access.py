"""Host memory on its way to being usable by devices: registered with CUDA in the background.

Owns: one registration, the thread that makes it, how far it is. Must not know: what the memory is for, transfers.

Registering takes 0.05 to 0.4 s for each GiB, minutes for a large pool, and a rank worker must not stop for so long. So
connecting waits for a short time only, and transfers that need the memory wait for the rest. Other CUDA calls of the
process may be held up while the driver pins a chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import structlog

from kvbridge.core.errors import BridgeError
from kvbridge.pool.memory.extent import Progress

log = structlog.get_logger(__name__)

Undo = Callable[[], None]
Register = Callable[[Progress], Undo]
"""Registers, reports its progress, and returns how to undo it."""


def apart(function: Callable[[], None], *, name: str) -> None:
    """Do what may wait for a device on a thread of its own, or here where the process may have no more threads."""
    try:
        threading.Thread(target=function, name=name, daemon=True).start()
    except RuntimeError:
        function()


class _CancelledError(Exception):
    """Raised through a registration by its progress report."""


class DeviceAccess:
    """A host range that devices may use once `ready`; `error` says why it never will be. Begins at once."""

    def __init__(self, address: int, length_bytes: int, register: Register | None, *, label: str) -> None:
        """`register`: None for memory that its owner has registered, and keeps registered for longer than this."""
        self.address = address
        """Where the registration, and with it its first chunk, begins."""
        self.length_bytes = length_bytes
        self.error = ""
        self._is_ours = register is not None
        self._label = label
        self._done_bytes = 0
        self._ended = threading.Event()
        self._undo: Undo | None = None
        self._cancelled = False
        if register is None:
            self._done_bytes = length_bytes
            self._ended.set()
            return
        try:
            threading.Thread(target=self._run, args=(register,), name="kvbridge-register", daemon=True).start()
        except RuntimeError as error:
            self.error = (
                f"{label}: {error}; raise the limit of processes of this rank worker (ulimit -u, TasksMax, pids.max)"
            )
            self._ended.set()

    def __repr__(self) -> str:
        state = "failed" if self.error else "ready" if self.ready else "being registered"
        return f"<DeviceAccess to {self._label}: {self._done_bytes} of {self.length_bytes} bytes, {state}>"

    @property
    def ready(self) -> bool:
        """Whether devices may use the memory."""
        return self._ended.is_set() and not self.error

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is ready or has failed, but not longer; whether it is or has."""
        return self._ended.wait(timeout_s)

    def close(self, then: Undo = lambda: None) -> None:
        """End the registration, then do something more; in another thread. No device uses the memory any more.

        A registration that is still being made ends with its present chunk. The owner's is left alone, and waits for nobody.
        """
        if not self._is_ours:
            then()
            return
        self._cancelled = True
        apart(partial(self._end, then), name="kvbridge-unregister")

    def _run(self, register: Register) -> None:
        log.info("registering_memory", memory=self._label, bytes=self.length_bytes)
        try:
            self._undo = register(self._report)
        except _CancelledError:
            self.error = f"{self._label}: nobody needs it any more"
        except Exception as error:
            self.error = str(error) or repr(error)
            known = isinstance(error, BridgeError)
            log.error("memory_not_registered", memory=self._label, reason=self.error, exc_info=None if known else error)
        self._ended.set()

    def _report(self, done_bytes: int, _: int) -> None:
        self._done_bytes = done_bytes
        if self._cancelled:
            raise _CancelledError

    def _end(self, then: Undo) -> None:
        self._ended.wait()
        undo, self._undo = self._undo, None
        try:
            if undo is not None:
                undo()
        except BridgeError as error:
            log.error("memory_not_unregistered", memory=self._label, reason=str(error))
        then()

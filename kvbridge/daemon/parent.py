"""A daemon that another program has started for itself, and that ends when that program does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

EXIT_ORPHANED = 4
"""The parent had ended before this process could be bound to it."""
_PR_SET_PDEATHSIG = 1
_READ_BYTES = 4096


def end_with_parent(parent: int) -> None:
    """Have SIGTERM sent to this process when process `parent`, which started it, ends, or closes the pipe to its standard input.

    The kernel means the thread that started us. Exits when that process has ended already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(EXIT_ORPHANED)
    threading.Thread(target=_wait_for_the_end, name="kvbridge-parent", daemon=True).start()


def _wait_for_the_end() -> None:
    while os.read(0, _READ_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

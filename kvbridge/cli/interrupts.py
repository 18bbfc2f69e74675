"""What Ctrl-C does to a command that has not begun yet."""

from __future__ import annotations

import os
import signal
import sys

EXIT_INTERRUPTED = 128 + signal.SIGINT


def _end_at_once(_number: int, _frame: object) -> None:
    os.write(sys.stderr.fileno(), b"kvbridge: interrupted\n")
    os._exit(EXIT_INTERRUPTED)


def interrupts_end_at_once() -> None:
    """Have Ctrl-C end the process where it stands: while modules are imported, an exception would be a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in the background of a script
        signal.signal(signal.SIGINT, _end_at_once)


def interrupts_raise() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again: the command is about to begin."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)

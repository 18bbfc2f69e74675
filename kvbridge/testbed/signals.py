"""How commands that have started processes end when they are told to.

Owns: the signal handlers for that time. Must not know: what the command does.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any


def terminated_like_interrupted() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP take the way of Ctrl-C, with their own exit codes."""
    return _handled(lambda number, _: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)


def interrupts_ignored() -> AbstractContextManager[None]:
    """Have Ctrl-C wait while processes are being ended, which takes seconds. Elsewhere than in the main thread: nothing."""
    in_main = threading.current_thread() is threading.main_thread()
    return _handled(signal.SIG_IGN, signal.SIGINT) if in_main else nullcontext()


@contextmanager
def _handled(handler: Callable[[int, Any], object] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)

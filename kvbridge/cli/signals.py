"""Ctrl-C and its like: before a command has begun, and while a command ends the processes that it has started."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import FrameType
from typing import Any, Self

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


def terminated_like_interrupted() -> AbstractContextManager[None]:
    """Let SIGTERM and SIGHUP take the way of Ctrl-C, with their own exit codes."""
    return _handled(lambda number, _: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)


def interrupts_ignored() -> AbstractContextManager[None]:
    """Have Ctrl-C wait while processes are being ended, which takes seconds. Elsewhere than in the main thread: nothing."""
    in_main = threading.current_thread() is threading.main_thread()
    return _handled(signal.SIG_IGN, signal.SIGINT) if in_main else nullcontext()


class Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP while it is entered: the first raises KeyboardInterrupt, the others are only counted.

    So what follows the first is never cut off in its middle. Signals that are ignored, as under nohup, stay so.
    """

    def __init__(self) -> None:
        self.more = 0
        """How many came after the one that was raised, or since `only_counted`."""
        self._raises = True
        self._held = False
        self._waiting = False
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers.enter_context(_handled(self._heard, *heard))
        return self

    def __exit__(self, *_error: object) -> None:
        self._handlers.close()

    def only_counted(self) -> None:
        """Raise no more from now on."""
        self._raises = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, nothing is raised: what comes meanwhile is raised at the end. For steps of which no half may be done."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt

    def _heard(self, _number: int, _frame: FrameType | None) -> None:
        if not self._raises:
            self.more += 1
            return
        self._raises = False
        if not self._held:
            raise KeyboardInterrupt
        self._waiting = True


@contextmanager
def _handled(handler: Callable[[int, Any], object] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)

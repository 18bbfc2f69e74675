"""Ctrl-C, SIGTERM and SIGHUP: before a command begins, and while a command ends its processes."""

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
    """Have Ctrl-C end the process at once: during imports an exception would print a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # ignored in the background of a script
        signal.signal(signal.SIGINT, _end_at_once)


def interrupts_raise() -> None:
    """Have Ctrl-C raise KeyboardInterrupt again, before the command begins."""
    if signal.getsignal(signal.SIGINT) is _end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def terminated_like_interrupted() -> AbstractContextManager[None]:
    """Have SIGTERM and SIGHUP end the command as Ctrl-C does, with their own exit codes."""
    return _handled(lambda number, _: sys.exit(128 + number), signal.SIGTERM, signal.SIGHUP)


def interrupts_ignored() -> AbstractContextManager[None]:
    """Ignore Ctrl-C while processes are ended, which takes seconds. Does nothing outside the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    return _handled(signal.SIG_IGN, signal.SIGINT) if in_main else nullcontext()


class Interrupts:
    """Counts signals inside its context: the first raises KeyboardInterrupt, later ones are only counted.

    The work that follows the first signal is never interrupted. Signals that are ignored, as under nohup, stay ignored.
    """

    def __init__(self) -> None:
        self.more = 0
        """Number of signals after the raised one, or since `only_counted`."""
        self._raises, self._held, self._waiting = True, False, False
        self._handlers = ExitStack()

    def __enter__(self) -> Self:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        heard = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._handlers.enter_context(_handled(self._heard, *heard))
        return self

    def __exit__(self, *_error: object) -> None:
        self._handlers.close()

    def only_counted(self) -> None:
        """Raise nothing from now on."""
        self._raises = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delay the exception of a signal to the end of this context. For steps that must not be half done."""
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

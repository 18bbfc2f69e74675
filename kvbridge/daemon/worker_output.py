"""The output of a rank worker's process, as lines of this daemon's log.

A worker writes its log as JSON into a pipe of its own, and the daemon logs each record in its own form. The libraries below the
worker write to standard error, without level or owner, even while they end the process. A line there is never a record of the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Self

import structlog

from kvbridge.core.ids import Rank
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 14
LINES = 50
"""Lines of the libraries below one worker that are written within a second."""

_HARMLESS = re.compile(r"Local segment descriptor not found|Logging before InitGoogleLogging")
"""What Mooncake reports at every good start."""
_LEVELS = (
    # glog, which Mooncake uses: E1122 10:11:12.131415  4711 file.cpp:12] text
    re.compile(r"^([IWEF])\d{4,8} \d\d:\d\d:\d\d"),
    # UCX, below NIXL: [1763806272.131415] [host:4711 :0] file.c:12  UCX  ERROR text
    re.compile(r"\bUCX\s+([FEWID])(?:ATAL|RROR|ARN|NFO|EBUG)\b"),
)
_LETTERS = {
    "D": logging.DEBUG,
    "I": logging.INFO,
    "W": logging.WARNING,
    "E": logging.ERROR,
    "F": logging.CRITICAL,
}


def level_of(text: str) -> int:
    """Return how serious a library's line is, by its own word; a warning when it says nothing."""
    if _HARMLESS.search(text):
        return logging.DEBUG
    for pattern in _LEVELS:
        if found := pattern.search(text):
            return _LETTERS[found[1]]
    return logging.WARNING


class _Pipe:
    """A pipe that is read line by line, in the running loop, from `started` on."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""
        self._reading_end, self.writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)

    def started(self) -> None:
        os.close(self.writing_end)
        self.writing_end = -1
        asyncio.get_running_loop().add_reader(self._reading_end, self._read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reading_end)
        while self._read():
            pass
        self._line(self._rest)
        os.close(self._reading_end)
        if self.writing_end >= 0:
            os.close(self.writing_end)

    def _read(self) -> bool:
        """Read what is there; whether there was something."""
        try:
            data = os.read(self._reading_end, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._reading_end)
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE_BYTES:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._line(line)
        return True

    def _line(self, line: bytes) -> None:
        if text := line.decode(errors="replace").strip():
            self._take(text)


class WorkerOutput:
    """Logs the output of one process, from the moment at which it is entered until it is left, when the process has ended."""

    def __init__(self, rank: Rank, seldom: Seldom) -> None:
        self._rank = str(rank)
        self._seldom = seldom

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            self._log = _Pipe(self._own)
            opened.callback(self._log.close)
            self._errors = _Pipe(self._foreign)
            opened.callback(self._errors.close)
            self._closing = opened.pop_all()
        self.log_end, self.errors_end = self._log.writing_end, self._errors.writing_end
        """The descriptors for the worker's log, and for its standard error."""
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def started(self) -> None:
        """The process has its ends: read ours from now on."""
        self._log.started()
        self._errors.started()

    def _own(self, text: str) -> None:
        try:
            record = json.loads(text)
            level, event = logging.getLevelNamesMapping()[record.pop("level").upper()], record.pop("event")
        except (ValueError, KeyError, TypeError, AttributeError):
            self._foreign(text)  # it was cut off by the end of the process, or is longer than a line may be
            return
        record.pop("timestamp", None)
        log.log(level, event, **record)

    def _foreign(self, text: str) -> None:
        if self._seldom.admits("library_output", self._rank, lines=LINES):
            log.log(level_of(text), "library_output", rank=self._rank, text=text[:LONGEST_LINE_BYTES])

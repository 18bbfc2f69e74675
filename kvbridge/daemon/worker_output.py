"""What a rank worker's process writes, as lines of this daemon's log.

A worker writes its log into a pipe of its own, as JSON whatever form the daemon's has, and the daemon writes it again in its own.
The libraries below the worker write to standard error, without level or owner, also in the moment in which they end the process:
whatever such a line looks like, it is no record of the worker's log.
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
_LEVELS: tuple[tuple[re.Pattern[str], dict[str, int]], ...] = (
    # glog, which Mooncake uses: E1122 10:11:12.131415  4711 file.cpp:12] text
    (
        re.compile(r"^([IWEF])\d{4,8} \d\d:\d\d:\d\d"),
        {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL},
    ),
    # UCX, below NIXL: [1763806272.131415] [host:4711 :0] file.c:12  UCX  ERROR text
    (
        re.compile(r"\bUCX\s+(FATAL|ERROR|WARN|INFO|DEBUG)\b"),
        {
            "FATAL": logging.CRITICAL,
            "ERROR": logging.ERROR,
            "WARN": logging.WARNING,
            "INFO": logging.INFO,
            "DEBUG": logging.DEBUG,
        },
    ),
)


def level_of(text: str) -> int:
    """Return how serious a library's line is, by its own word; a warning when it says nothing."""
    if _HARMLESS.search(text):
        return logging.DEBUG
    for pattern, levels in _LEVELS:
        if found := pattern.search(text):
            return levels[found[1]]
    return logging.WARNING


class _Pipe:
    """A pipe that is read line by line, in the running loop, from `started` on."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""
        self._reading_end, self.writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)

    def started(self) -> None:
        """The process has its end: read ours from now on."""
        os.close(self.writing_end)
        self.writing_end = -1
        asyncio.get_running_loop().add_reader(self._reading_end, self._read)

    def close(self) -> None:
        """Take what is still there."""
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
        text = line.decode(errors="replace").strip()
        if text:
            self._take(text)


class WorkerOutput:
    """What one process writes. It gets `log_end` and `errors_end`, `started` says that it has them. Left when it has ended."""

    def __init__(self, rank: Rank, seldom: Seldom) -> None:
        self._rank = str(rank)
        self._seldom = seldom
        self._pipes: tuple[_Pipe, ...] = ()

    @property
    def log_end(self) -> int:
        """The descriptor that the worker's log is written to."""
        return self._pipes[0].writing_end

    @property
    def errors_end(self) -> int:
        """The descriptor of its standard error."""
        return self._pipes[1].writing_end

    def started(self) -> None:
        """The process has its ends: read ours from now on."""
        for pipe in self._pipes:
            pipe.started()

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            for take in (self._own, self._foreign):
                pipe = _Pipe(take)
                opened.callback(pipe.close)
                self._pipes += (pipe,)
            self._closing = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

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

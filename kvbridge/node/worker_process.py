"""The process of a rank worker, and its output as lines of the node's log.

A worker writes its log as JSON into a pipe of its own, and the node logs each record in its own form. The libraries below the
worker write to standard error, without level or owner, even while they end the process. A line there is never a record of the log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Mapping

import structlog

from kvbridge.core.ids import Rank
from kvbridge.core.process import Closing
from kvbridge.processes import ChildEnd, SupervisedChild
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 14
LINES = 50
"""Lines of the libraries below one worker that are written within a second."""

_HARMLESS = re.compile(r"Local segment descriptor not found|Logging before InitGoogleLogging")
"""Lines that Mooncake writes at every good start."""
_LEVELS = (
    # glog, which Mooncake uses: E1122 10:11:12.131415  4711 file.cpp:12] text
    re.compile(r"^([IWEF])\d{4,8} \d\d:\d\d:\d\d"),
    # UCX, below NIXL: [1763806272.131415] [host:4711 :0] file.c:12  UCX  ERROR text
    re.compile(r"\bUCX\s+([FEWID])(?:ATAL|RROR|ARN|NFO|EBUG)\b"),
)
_LETTERS = {"D": logging.DEBUG, "I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}


def level_of(text: str) -> int:
    """Return how serious a library's line is, by its own word; a warning when it says nothing."""
    if _HARMLESS.search(text):
        return logging.DEBUG
    for pattern in _LEVELS:
        if found := pattern.search(text):
            return _LETTERS[found[1]]
    return logging.WARNING


def worker_process(
    rank: Rank, options: Mapping[str, str], seldom: Seldom, on_end: Callable[[ChildEnd], None]
) -> SupervisedChild:
    """Return the process of a rank's worker, not started yet. `options` are options of its command line."""
    options = {"pp": str(rank.pp), "tp": str(rank.tp), "parent": str(os.getpid()), **options}
    arguments = [word for name, value in options.items() for word in (f"--{name}", value)]

    async def live() -> None:
        with Pipe(lines.record) as records, Pipe(lines.text) as errors:
            process = await child.launch(
                "kvbridge.worker.process",
                *(*arguments, "--log-descriptor", str(records.writing_end)),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=errors.writing_end,
                pass_fds=(records.writing_end,),
            )
            records.started()
            errors.started()
            await process.wait()

    lines = OutputLines(rank, seldom)
    child = SupervisedChild(f"rank {rank}", live, on_end)
    return child


class Pipe(Closing):
    """A pipe that is read line by line, in the running loop, from `started` until `close`, when the process has ended."""

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take = take
        self._rest = b""
        self._reading_end, self.writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)

    def started(self) -> None:
        """Read from now on: the process has its end of the pipe."""
        os.close(self.writing_end)
        self.writing_end = -1
        asyncio.get_running_loop().add_reader(self._reading_end, self._read)

    def close(self) -> None:
        """Read what is left, and close both ends."""
        asyncio.get_running_loop().remove_reader(self._reading_end)
        while self._read():
            pass
        self._line(self._rest)
        os.close(self._reading_end)
        if self.writing_end >= 0:
            os.close(self.writing_end)

    def _read(self) -> bool:
        """Read what is there. Return whether there was something."""
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


class OutputLines:
    """Logs the lines of one worker's process."""

    def __init__(self, rank: Rank, seldom: Seldom) -> None:
        self._rank = str(rank)
        self._seldom = seldom

    def record(self, text: str) -> None:
        """Log a line of the worker's own log."""
        try:
            record = json.loads(text)
            level, event = logging.getLevelNamesMapping()[record.pop("level").upper()], record.pop("event")
        except (ValueError, KeyError, TypeError, AttributeError):
            self.text(text)  # the end of the process, or the longest line, cut it off
            return
        record.pop("timestamp", None)
        log.log(level, event, **record)

    def text(self, text: str) -> None:
        """Log a line of a library."""
        if self._seldom.admits("library_output", self._rank, lines=LINES):
            log.log(level_of(text), "library_output", rank=self._rank, text=text[:LONGEST_LINE_BYTES])

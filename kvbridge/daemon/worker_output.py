"""What a rank worker's process writes to its standard error, as lines of this daemon's log.

Owns: the pipe, telling our own lines from those of libraries, the level of the latter. Must not know: what a worker does.

A worker writes its log as JSON, whatever form the daemon's has, and the daemon writes it again in its own. Everything else comes
from the libraries below, which write without level or owner, also in the moment in which they end the process.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from typing import Any, Self

import structlog

from kvbridge.core.ids import Rank
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 14
LINES, EVERY_S = 50, 1.0
"""Lines of libraries that are written within so long."""

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


class WorkerOutput:
    """The standard error of one process: `writing_end` is to be its, `started` says that it has it. Left when it has ended."""

    def __init__(self, rank: Rank) -> None:
        self._rank = str(rank)
        self._reading_end, self.writing_end = os.pipe()
        os.set_blocking(self._reading_end, False)
        self._rest = b""
        self._seldom = Seldom(lines=LINES, every_s=EVERY_S)

    def started(self) -> None:
        """The process has its end: read ours from now on."""
        os.close(self.writing_end)
        self.writing_end = -1
        asyncio.get_running_loop().add_reader(self._reading_end, self._read)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.get_running_loop().remove_reader(self._reading_end)
        while self._read():
            pass
        self._line(self._rest)
        self._tell_left_out(everything=True)
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
        if not text:
            return
        if own := _own_line(text):
            level = logging.getLevelNamesMapping().get(str(own.pop("level")).upper(), logging.WARNING)
            log.log(level, own.pop("event"), **own)
        elif self._seldom.admits("library_output"):
            log.log(level_of(text), "library_output", rank=self._rank, text=text[:LONGEST_LINE_BYTES])
        self._tell_left_out()

    def _tell_left_out(self, *, everything: bool = False) -> None:
        for event, _, lines, seconds in self._seldom.left_out(everything=everything):
            log.warning("lines_left_out", of=event, rank=self._rank, lines=lines, seconds=round(seconds, 1))


def _own_line(text: str) -> dict[str, Any]:
    """Return the keys of a line that a worker's own log has written; empty for any other."""
    if not text.startswith('{"'):
        return {}
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    if not isinstance(found, dict) or not {"event", "level"} <= found.keys():
        return {}
    return {key: value for key, value in found.items() if key != "timestamp"}

"""Logs: one event a line, to standard error, for people or machines. `room` is always a room, `peer` a peer's incarnation."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO, cast

import structlog
from structlog.typing import Processor

from kvbridge.core.process import Clock, monotonic
from kvbridge.telemetry.context import bound_ids

log = structlog.get_logger(__name__)

MASK = "***"
_SECRET = re.compile(r"secret|passw|credential|authori[sz]ation|bearer|private|api_?key|key_material", re.IGNORECASE)
_TOKEN = re.compile(r"token", re.IGNORECASE)
"""Key of a secret, or of a number of tokens: its value is masked unless it is a number."""
CHATTY_LIBRARIES = {
    "httpx": logging.WARNING,
    "httpcore": logging.WARNING,
    "uvicorn.error": logging.ERROR,
    "opentelemetry": logging.CRITICAL,
}
"""Lowest level of each library's lines. The first two log each request at info, as we do. uvicorn warns of each malformed request,
so anybody could fill the disk. OpenTelemetry warns of each batch that a collector does not take."""


class _StandardError:
    """The present standard error, which tests and embedding programs replace. A reader that has gone must not end this process."""

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            sys.stderr.flush()


def leave_standard_output() -> None:
    """Write lines to standard error if nobody has set up logging, as in many an engine's process."""
    if not structlog.is_configured():
        target = cast("TextIO", _StandardError())
        processors = [*structlog.get_config()["processors"][:-1], *_renderers("console", sys.stderr)]
        structlog.configure(processors=processors, logger_factory=structlog.PrintLoggerFactory(target))


def configure_logs(
    *, names: Mapping[str, str], level: str = "info", form: str = "auto", stream: TextIO | None = None
) -> None:
    """Set up logging for this process, also for the loggers of the standard library. Raises ValueError on an unknown level.

    `names` (`role`, `instance`, `node` and, of a rank worker, `rank`) are on every line; a line's own key of such a name becomes
    `line_...`. `stream` defaults to standard error. `form` is `console`, `json`, or `auto`: `console` on a terminal, else `json`.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level '{level}'; known are debug, info, warning, error, critical")
    target = stream if stream is not None else sys.stderr
    shared: list[Processor] = [
        _bind({key: value for key, value in names.items() if value}),
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        mask_secrets,
    ]
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers("console" if form == "auto" and target.isatty() else form, target),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for chatty, least in CHATTY_LIBRARIES.items():
        logging.getLogger(chatty).setLevel(max(number, least))
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


LINES, EVERY_S = 10, 1.0
"""Limit of lines of one kind, and the time for which it holds. Many rooms then cost little, and a stranger cannot fill the disk."""
MAX_KINDS = 256
"""Limit of kinds that are counted apart: peers choose some of the words."""


@dataclass(slots=True)
class _Seen:
    since_s: float
    """Begin of the present period."""
    lines: int = 0
    left_out: int = 0
    """Lines left out since the last report."""
    left_out_since_s: float = 0.0


class Seldom:
    """Limits the number of lines of each kind, and counts the others. Its owner calls `tell` now and then."""

    def __init__(
        self, count: Callable[[str], object], *, lines: int = LINES, every_s: float = EVERY_S, clock: Clock = monotonic
    ) -> None:
        """Call `count(event)` for each line that is left out."""
        self._count = count
        self._lines = lines
        self._every_s = every_s
        self._clock = clock
        self._seen: dict[tuple[str, str], _Seen] = {}

    def admits(self, event: str, kind: str = "", *, lines: int | None = None) -> bool:
        """Return whether a line of this kind may be written now. `lines`: a limit of its own for this kind."""
        now_s = self._clock()
        if len(self._seen) >= MAX_KINDS and (event, kind) not in self._seen:
            kind = "other"
        seen = self._seen.setdefault((event, kind), _Seen(now_s))
        if now_s - seen.since_s >= self._every_s:
            seen.since_s, seen.lines = now_s, 0
        if seen.lines < (self._lines if lines is None else lines):
            seen.lines += 1
            return True
        if not seen.left_out:
            seen.left_out_since_s = now_s
        seen.left_out += 1
        self._count(event)
        return False

    def tell(self, *, everything: bool = False) -> None:
        """Log how many lines of each kind were left out: `every_s` after the first one, or at once (`everything`)."""
        now_s = self._clock()
        for (event, kind), seen in self._seen.items():
            seconds = now_s - seen.left_out_since_s
            if seen.left_out and (everything or seconds >= self._every_s):
                which = {"kind": kind} if kind else {}
                log.warning("lines_left_out", of=event, **which, lines=seen.left_out, seconds=round(seconds, 1))
                seen.left_out = 0


def mask_secrets(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask every value whose key sounds like a secret, also in nested mappings and sequences."""
    return {key: _masked(key, value) for key, value in event.items()}


def _masked(key: object, value: object) -> object:
    name = str(key)
    if _SECRET.search(name) or (_TOKEN.search(name) and not isinstance(value, int | float | None)):
        return MASK
    if isinstance(value, dict):
        return {inner: _masked(inner, item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked("", item) for item in value]
    return value


def _bind(names: dict[str, str]) -> Processor:
    """Return a processor that adds names and ids, except the ids that a line about an earlier request has already."""

    def add(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        own = {f"line_{key}" if event[key] != names.get(key, event[key]) else key: event[key] for key in event}
        return {**names, **bound_ids(), **own}

    return add


def _renderers(form: str, target: TextIO) -> list[Processor]:
    if form != "console":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    # structlog's usual tracebacks show local variables, and so every secret in a failing call.
    return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)]

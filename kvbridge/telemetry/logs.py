"""Logs: one event a line, to standard error, for people or for machines.

Owns: structlog's set-up, the bound names, the masking of secrets. Must not know: what happened.

Events are short words; facts are keys. A room is always `room`, a peer's incarnation `peer`.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import MutableMapping
from typing import Any, TextIO, cast

import structlog
from structlog.typing import Processor

from kvbridge.core.clock import Clock, monotonic

MASK = "***"
_SECRET = re.compile(r"secret|passw|credential|authori[sz]ation|bearer|private|api_?key|key_material", re.IGNORECASE)
_TOKEN = re.compile(r"token", re.IGNORECASE)
_COUNTS_TOKENS = re.compile(
    r"^(prompt_|prefix_|new_|max_new_|input_|output_)?tokens(_per_\w+)?$|^(start|stop|upto)_token$", re.IGNORECASE
)


CHATTY_LIBRARIES = {"httpx": logging.WARNING, "httpcore": logging.WARNING, "uvicorn.error": logging.ERROR}
"""They report each request or start at level info, which our own lines already tell; and uvicorn warns of each request
that is none, so that whoever reaches the port could fill the disk.
"""


class _StandardError:
    """Standard error as it is when a line is written: tests and embedding programs replace it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def leave_standard_output() -> None:
    """Where nobody has set logging up, as in many an engine's process: write lines to standard error. Else do nothing."""
    if not structlog.is_configured():
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _StandardError())))


def configure_logs(
    *,
    role: str,
    instance: str = "",
    node: str = "",
    level: str = "info",
    form: str = "auto",
    stream: TextIO | None = None,
) -> None:
    """Set logging up for this process, the standard library's loggers included.

    `role`, `instance` and `node` are on every line. `stream` defaults to standard error. `form` is `console`, `json`, or `auto`:
    `console` on a terminal, `json` otherwise. Raises ValueError on an unknown level.
    """
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ValueError(f"unknown log level '{level}'; known are debug, info, warning, error, critical")
    target = stream if stream is not None else sys.stderr
    names = {"role": role, "instance": instance, "node": node}
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
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


class Seldom:
    """Lets a few lines of each kind through at a time: what strangers can cause must not fill the disk.

    Kinds are few words of our own. What is kept back is to be counted elsewhere.
    """

    def __init__(self, *, lines: int = 10, every_s: float = 10.0, clock: Clock = monotonic) -> None:
        self._lines = lines
        self._every_s = every_s
        self._clock = clock
        self._begun_s: dict[str, float] = {}
        self._seen: dict[str, int] = {}

    def admits(self, kind: str) -> bool:
        """Whether a line of this kind may be written now."""
        now_s = self._clock()
        if now_s - self._begun_s.get(kind, -math.inf) >= self._every_s:
            self._begun_s[kind], self._seen[kind] = now_s, 0
        self._seen[kind] += 1
        return self._seen[kind] <= self._lines


def mask_secrets(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Blank every value whose key sounds like a secret, in nested mappings and sequences too."""
    return {key: _masked(key, value) for key, value in event.items()}


def _masked(key: object, value: object) -> object:
    name = str(key)
    if _SECRET.search(name) or (_TOKEN.search(name) and not _COUNTS_TOKENS.match(name)):
        return MASK
    if isinstance(value, dict):
        return {inner: _masked(inner, item) for inner, item in value.items()}
    if isinstance(value, list | tuple):
        return [_masked("", item) for item in value]
    return value


def _bind(names: dict[str, str]) -> Processor:
    def add(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        return {**names, **event}

    return add


def _renderers(form: str, target: TextIO) -> list[Processor]:
    if form != "console":
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    # Its usual tracebacks show local variables, and so every secret that a failing call holds.
    return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)]

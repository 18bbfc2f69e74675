"""Parts of a connector for an engine that brings its memory: node, attachment, tensors, reports, and the guard of its hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import structlog

from kvbridge.core.errors import InvalidInputError, code_of
from kvbridge.core.process import Clock, monotonic
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.telemetry.logs import Seldom

log = structlog.get_logger(__name__)

LINES, EVERY_S = 5, 1.0
"""Limit of log lines of each kind, and its period: clients decide how many errors there are."""
REFUSED, FAILED = "hook_refused", "hook_failed"
"""Log events: a request is wrong, or a hook has a defect."""


class Product(NamedTuple):
    """The engine, as its users call it: for messages, and for the names of directories."""

    name: str
    slug: str
    settings: str
    """The option with the user's settings for kvbridge."""
    id_option: str
    """The option for an engine's id."""
    block_option: str
    """The option for the tokens of a block."""
    layout_option: str
    """The setting that puts the heads outermost in a block."""
    timeouts: Mapping[str, float] = MappingProxyType({})
    """A node's `timeouts` that are others beside this engine."""


class Guard:
    """Stops errors in an engine's hooks, since the engine ends with every error that leaves one. For the thread of one process.

    Each error is counted by its code, and logged with its reason, a few of each kind a second.
    """

    def __init__(self, count: Callable[[str], None], *, clock: Clock = monotonic) -> None:
        """`count` takes the code of each error."""
        self._count = count
        self.lose: Callable[[str, str], None] = lambda _request, _reason: None
        """Called with a request and a reason when a hook has failed in the middle of it: ends what was begun for the request."""
        self._seldom = Seldom(lambda _: None, lines=LINES, every_s=EVERY_S, clock=clock)

    @contextmanager
    def over(self, what: str, request: str = "", *, lost: Callable[[str], None] | None = None) -> Iterator[None]:
        """Stop every error of the block, log it under the name `what`, and count it.

        InvalidInputError means that a request is wrong, any other error that kvbridge has a defect. `lost` is called with the
        reason, to end what was begun.
        """
        try:
            yield
        except Exception as error:
            code, reason = code_of(error), str(error)[:REASON_CHARS]
            self._count(code)
            foreseen = isinstance(error, InvalidInputError)
            admitted = self._seldom.admits(REFUSED if foreseen else FAILED, code)
            if admitted and foreseen:
                log.warning(REFUSED, where=what, request=request, code=code, reason=reason)
            elif admitted:
                reason = f"{type(error).__name__}: {reason}; please report it"
                log.error(FAILED, where=what, request=request, code=code, reason=reason, exc_info=error)
            if lost is not None:
                with self.over("not_given_up", request):
                    lost(f"{type(error).__name__}: {error}"[:REASON_CHARS])

    def look(self) -> None:
        """Log how many lines were left out."""
        self._seldom.tell()

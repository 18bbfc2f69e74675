"""The ids that connect log lines, samples and spans of several processes.

A trace begins with the first span of the daemon that a request reaches. The id of a part of a span follows from the part's name, so
every process that knows a span can name the parts before they have ended.
"""

from __future__ import annotations

import random
import re
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from hashlib import blake2b

REQUEST_ID_HEADER = "X-Request-Id"
TRACEPARENT_HEADER = "traceparent"
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
MAX_TRACEPARENT = 200
"""Longest parsed `traceparent` in characters; the present version has 55."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """One span of a trace, made here or by the caller."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits."""
    sampled: bool
    """Whether the trace is recorded. Its first process decides."""
    parent_id: str = ""
    """The span above; empty for the first span of a trace, and for a caller's span."""
    recorded: bool = False
    """Whether this process sends the span to a collector, and so may send parts of the span."""

    @property
    def traceparent(self) -> str:
        """The span as W3C's header and our messages carry it."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    def part(self, name: str) -> TraceContext:
        """Return a part of this span; the span itself when this process does not send it."""
        return self.child(name) if self.recorded else self

    def child(self, name: str) -> TraceContext:
        """Return a span of this process below this one. The id follows from the name, which no sibling may have."""
        span_id = blake2b(f"{self.span_id}/{name}".encode(), digest_size=8).hexdigest()
        return replace(self, span_id=span_id, parent_id=self.span_id, recorded=True)


REQUEST_ID: ContextVar[str] = ContextVar("kvbridge_request_id", default="")
"""Id of the present HTTP request, from the caller or made here; empty outside of a request."""
TRACE: ContextVar[TraceContext | None] = ContextVar("kvbridge_trace", default=None)
"""Span of the present work, from this process or the caller; None without a trace."""

BeginTrace = Callable[[TraceContext | None], TraceContext | None]
"""Maps the caller's span, if there is one, to the span of the request here."""


def pass_on(given: TraceContext | None) -> TraceContext | None:
    """Use the caller's span, where this process records none."""
    return given


def begin_with(sampled_ratio: float) -> BeginTrace:
    """Return a function that makes a request's first span here. The caller decides about recording, else this share of requests."""

    def begin(given: TraceContext | None) -> TraceContext | None:
        if given is not None and not given.sampled:
            return given
        span_id = secrets.token_hex(8)
        if given is not None:
            return TraceContext(given.trace_id, span_id, sampled=True, parent_id=given.span_id, recorded=True)
        sampled = random.random() < sampled_ratio  # noqa: S311 - a choice of requests, nothing secret
        return TraceContext(secrets.token_hex(16), span_id, sampled=sampled, recorded=sampled)

    return begin


def parse_traceparent(text: str) -> TraceContext | None:
    """Return the span of a `traceparent`; None for a header that W3C's recommendation ignores."""
    found = _TRACEPARENT.fullmatch(text.strip()) if len(text) <= MAX_TRACEPARENT else None
    if found is None:
        return None
    version, trace_id, span_id, flags, more = found.groups()
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, sampled=bool(int(flags, 16) & 1))


def is_request_id(text: str) -> bool:
    """Return whether an id from outside is short and has only characters that are safe in logs and headers."""
    return _REQUEST_ID.fullmatch(text) is not None


def exemplar(trace: TraceContext | None) -> str:
    """Return the trace id to show with a sample; empty when the trace is not recorded."""
    return trace.trace_id if trace is not None and trace.sampled else ""


def bound_ids() -> dict[str, str]:
    """Return the present ids by the keys of log lines."""
    trace = TRACE.get()
    ids = {"request_id": REQUEST_ID.get(), "trace_id": trace.trace_id if trace is not None else ""}
    return {key: value for key, value in ids.items() if value}

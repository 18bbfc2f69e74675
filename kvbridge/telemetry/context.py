"""On whose behalf something is being done: the ids that tie lines, samples and processes together.

Owns: the two context variables, the form of ids from outside. Must not know: who sets them (HTTP, tracing), what is done with them.
"""

from __future__ import annotations

import re
from contextvars import ContextVar

REQUEST_ID: ContextVar[str] = ContextVar("kvbridge_request_id", default="")
"""What the caller, or this daemon, calls the HTTP request that is being served; empty outside of one."""
TRACE_ID: ContextVar[str] = ContextVar("kvbridge_trace_id", default="")
"""The trace that is being recorded, as 32 hexadecimal digits; empty while there is none."""

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


def is_request_id(text: str) -> bool:
    """Whether an id from outside can be taken over as it is: short, and of characters that no log or header can mistake."""
    return _REQUEST_ID.fullmatch(text) is not None


def bound_ids() -> dict[str, str]:
    """The ids that are set now, by the keys of log lines."""
    ids = {"request_id": REQUEST_ID.get(), "trace_id": TRACE_ID.get()}
    return {key: value for key, value in ids.items() if value}

"""How much work something is, by the lines of Python that it executes: the same on any machine, under any load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def executed_lines(work: Callable[[], Any], *, of: str) -> int:
    """Do the work on this thread, and count the lines that it executes in modules whose name begins with `of`."""
    count = 0

    def trace_line(_: FrameType, event: str, __: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace_line

    def trace_call(frame: FrameType, _: str, __: Any) -> Any:
        return trace_line if frame.f_globals.get("__name__", "").startswith(of) else None

    before = sys.gettrace()
    sys.settrace(trace_call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count

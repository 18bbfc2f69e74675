"""Time as an argument. Pure code takes `now_s` or a `Clock`; tests turn a `ManualClock` by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds on a scale that never goes back."""

    def __call__(self) -> float:
        """Return the present time in seconds."""


monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that stands still until `advance` is called."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the present time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move the time forward by `seconds`."""
        if seconds < 0:
            raise ValueError(f"time does not go back: {seconds}")
        self.now_s += seconds

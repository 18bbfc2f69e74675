"""A clock that tests turn by hand."""


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

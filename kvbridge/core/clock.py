"""Time as an argument: pure code takes `now_s` or a `Clock`, so that tests can turn it by hand."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns the present time in seconds, on a scale that never goes back."""

monotonic: Clock = time.monotonic


def moment(ago_s: float = 0.0) -> float:
    """Return the wall-clock time `ago_s` ago in Unix seconds, to the millisecond, as documents for operators tell moments."""
    return round(time.time() - ago_s, 3)

"""Time as an argument: pure code takes `now_s` or a `Clock`, so that tests can turn it by hand."""

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns the present time in seconds, on a scale that never goes back."""

monotonic: Clock = time.monotonic

"""How long a rank worker rests when nothing has moved: as briefly as what it waits for is worth.

A GPU ends its work without a word, so the end of a transfer, and the point that an engine's stream has to reach, are seen with the
next look. Where a GPU copies, a pause is a fiftieth of the time since something moved last: a transfer of 2 ms is answered for
within 40 us, and an engine that computes for a second is asked no more often than a copy by the processor.
"""

from __future__ import annotations

import ctypes

from kvbridge.core.clock import Clock

BUSY_PAUSE_S = 0.0001
"""The longest; sleeping beats spinning on few cores."""
SHORTEST_PAUSE_S = 0.00002
PART_OF_WAITING = 0.02
_PR_SET_TIMERSLACK = 29
_SLACK_NS = 1_000


class Pauses:
    """Of one worker; used by its thread only."""

    def __init__(self, clock: Clock, *, with_gpu: bool) -> None:
        """`with_gpu`: a GPU copies for this worker."""
        self._clock = clock
        self._with_gpu = with_gpu
        self._moved_s = clock()

    def sleep_precisely(self) -> None:
        """Have the calling thread wake when it wants to: by default Linux lets it sleep for up to 50 us longer."""
        if self._with_gpu:
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, _SLACK_NS, 0, 0, 0)

    def moved(self) -> None:
        """Something began or ended."""
        self._moved_s = self._clock()

    def next_s(self) -> float:
        """How long to rest now."""
        if not self._with_gpu:
            return BUSY_PAUSE_S
        waited_s = self._clock() - self._moved_s
        return min(BUSY_PAUSE_S, max(SHORTEST_PAUSE_S, waited_s * PART_OF_WAITING))

"""The prompts of a load of which nine tenths begin like others: what router and engines know of a room by its id alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SHARED_TOKENS = 2 * 256 + 64
"""Of every prompt: two whole pages, and one that nobody shares."""
SHARED_OF_TEN = 9
PREFIXES = 16
"""Different ones, which these rooms have in equal parts."""


def prompt(room: int, tokens: int) -> npt.NDArray[np.uint32]:
    """Return the token ids of a room's prompt: all of it is a prefix of others', or nothing is."""
    number, tenth = divmod(room, 10)
    first = number % PREFIXES if tenth < SHARED_OF_TEN else PREFIXES + room % (1 << 31)
    return np.full(tokens, first, dtype=np.uint32)

"""What is said where an optional dependency is missing."""

from __future__ import annotations

from typing import Final

NEEDS_TORCH: Final = "kvbridge's library for engines needs torch; in a checkout of kvbridge: pip install '.[engine]'"

"""How often Hypothesis tries a test: as its profile says (`tests/conftest.py`), ten times as often in `make test-all`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def fewer(part: int, **more: Any) -> settings:
    """A fraction of the profile's examples, for tests whose examples are dear."""
    return settings(max_examples=settings.default.max_examples // part, **more)

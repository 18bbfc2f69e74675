"""How often Hypothesis tries a test: as its profile says (`tests/conftest.py`), most often in `make test-all`."""

from typing import Any

from hypothesis import settings


def fewer(part: int, **more: Any) -> settings:
    """A fraction of the profile's examples: a half for state machines, less for tests whose examples are dear."""
    return settings(max_examples=max(1, settings.default.max_examples // part), **more)


def more(times: int) -> settings:
    """A multiple of the profile's examples, where what goes wrong is seldom drawn."""
    return settings(max_examples=times * settings.default.max_examples)

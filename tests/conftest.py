"""What all suites share: how much Hypothesis tries, and that no test leaves anything behind for the next one."""

from __future__ import annotations

import contextlib
import os

import pytest

from tests.helpers import isolation

with contextlib.suppress(ImportError):  # GPU tests also run where only pytest is installed
    from hypothesis import settings

    # How often a test is tried; tests whose examples are dear take a fraction of it (tests/helpers/examples.py).
    settings.register_profile("default", max_examples=100, deadline=None)
    settings.register_profile("thorough", max_examples=1000, deadline=None)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Have every test looked at; called by pytest."""
    config.pluginmanager.register(isolation)

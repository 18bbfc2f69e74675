"""One Chromium for all tests of the page; each begins with an empty tab."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.browser import Browser, browser


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def tab(chromium: Browser) -> Iterator[Browser]:
    chromium.size(1280, 900)
    chromium.errors()
    yield chromium
    chromium.open("about:blank")

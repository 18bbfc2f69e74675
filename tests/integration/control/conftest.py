"""The stage of the tests of control sockets."""

import contextlib

import pytest_asyncio

from tests.integration.control.stage import Stage


@pytest_asyncio.fixture
async def stage():
    with contextlib.ExitStack() as stack:
        yield Stage(stack)

"""vLLM's suite. `make test-vllm`; not a part of `make test`."""

from collections.abc import Iterator

import pytest

from tests.engines.servers import Setup
from tests.engines.suite import *  # noqa: F403 - fixtures and hooks
from tests.engines.suite import add_options, running, setup_of
from tests.vllm.fleet import PLANS, Fleet


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser, "vllm")


@pytest.fixture(scope="session")
def setup(request: pytest.FixtureRequest) -> Setup:
    return setup_of(request.config, "vllm")


@pytest.fixture(scope="session")
def fleet(setup: Setup) -> Iterator[Fleet]:
    yield from running(lambda: Fleet(setup, [plan() for plan in PLANS]), "vllm")

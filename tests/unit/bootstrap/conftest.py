"""Every test of the directory and of pairing runs over both stores; Redis is a real one."""

import itertools

import pytest

from tests.helpers.redis_server import redis_server
from tests.unit.bootstrap.fleet import FakeDaemons, MemoryFleet, RedisFleet

_NUMBERS = itertools.count()


@pytest.fixture(scope="session")
def redis():
    with redis_server() as server:
        yield server


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.outside)])
async def world(request):
    if request.param == "memory":
        yield MemoryFleet()
        return
    async with RedisFleet(request.getfixturevalue("redis"), f"test-{next(_NUMBERS)}") as world:
        yield world


@pytest.fixture
async def redis_fleet(redis):
    async with RedisFleet(redis, f"test-{next(_NUMBERS)}") as world:
        yield world


@pytest.fixture
def port():
    return FakeDaemons()

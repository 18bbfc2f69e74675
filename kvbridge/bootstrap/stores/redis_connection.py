"""The connection to the Redis that several bootstraps share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgpack
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvbridge.core.errors import ConfigError, NotReadyError

CONNECTIONS: Final = 32
"""Open connections at most; further calls wait for one, within `timeouts.store_s`."""


class RedisConnection:
    """Runs scripts, each within its limit. Close `client`."""

    def __init__(
        self, url: str, password: Callable[[], str] = str, *, timeout_s: float, on_failure: Callable[[str], None]
    ) -> None:
        """Connect to nothing yet: every call does when it has to. Raises ConfigError for a URL that cannot be read.

        `url` may hold a password, so it is never shown; where it holds none, each new connection shows `password`, if there is one.
        `timeout_s` is `timeouts.store_s`. `on_failure` hears the kind of every failure: `timeout`, `connection` or `refused`.
        """
        self._timeout_s, self._on_failure = timeout_s, on_failure
        self.client = _client(url, password, timeout_s)
        self.script = self.client.register_script
        options = self.client.connection_pool.connection_kwargs
        self.where = str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
        """The address, without any secret."""

    async def run(self, script: AsyncScript, key: str, arguments: Mapping[str, object]) -> Any:  # noqa: ANN401 - as it answers
        """Run a script that takes and returns msgpack within `timeouts.store_s`, and return its answer, strings as bytes.

        Raises NotReadyError, with what an operator has to look at.
        """
        packed = msgpack.packb(arguments, use_bin_type=False)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await script(keys=[key], args=[packed])
        except (TimeoutError, RedisTimeoutError) as error:
            raise self._away("timeout", f"did not answer within {self._timeout_s:g} s (timeouts.store_s)") from error
        except (RedisConnectionError, OSError) as error:
            raise self._away("connection", f"cannot be reached: {error}") from error
        except RedisError as error:
            raise self._away("refused", f"refused a call: {error}") from error
        return msgpack.unpackb(answer, raw=True)

    def _away(self, reason: str, what: str) -> NotReadyError:
        self._on_failure(reason)
        return NotReadyError(f"the directory's Redis at {self.where} {what} (directory.redis_url)")


class _Credentials(CredentialProvider):
    """Asked by the library for each new connection."""

    def __init__(self, user: str | None, password: Callable[[], str]) -> None:
        self._user = (user,) if user else ()
        self._password = password

    def get_credentials(self) -> Any:  # noqa: ANN401 - one or two strings
        return (*self._user, self._password())

    async def get_credentials_async(self) -> Any:  # noqa: ANN401
        return self.get_credentials()


def _client(url: str, password: Callable[[], str], timeout_s: float) -> Redis:
    """Make a client whose calls are bounded by `RedisConnection.run` alone, and not tried again behind our back.

    A script that was run must not be run twice. The library's own limit on sockets is `asyncio.wait_for`, which in
    Python 3.11 loses a cancellation that meets the end of the wait: a caller's deadline would never come.
    """
    none = {"socket_timeout": None, "socket_connect_timeout": None, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    try:
        pool = BlockingConnectionPool.from_url(url, max_connections=CONNECTIONS, timeout=timeout_s, **none)
    except (ValueError, TypeError) as error:
        raise ConfigError("directory.redis_url: cannot be read; expected redis://, rediss:// or unix://") from error
    if password():
        options = pool.connection_kwargs
        options["credential_provider"] = _Credentials(options.pop("username", None), password)
    return Redis.from_pool(pool)

"""The connection to the Redis that several bootstraps share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvbridge.core.errors import ConfigError, NotReadyError

CONNECTIONS: Final = 32
"""Open connections at most; further calls wait for one, within `timeouts.store_s`."""


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """How Redis is reached. `url` may hold a password, so it is never shown; `password` is used when it holds none."""

    url: str
    password: Callable[[], str]
    """What each new connection shows; one that stands goes on, as Redis has it too."""
    namespace: str
    timeout_s: float
    """`timeouts.store_s`."""

    def __repr__(self) -> str:
        return f"RedisSettings(namespace={self.namespace!r})"


class RedisConnection:
    """Runs scripts and calls, each within its limit. Close `client`."""

    def __init__(
        self, settings: RedisSettings, scripts: Mapping[str, str], *, on_failure: Callable[[str], None]
    ) -> None:
        """Connect to nothing yet: every call does when it has to. Raises ConfigError for a URL that cannot be read.

        `scripts`: Lua, by name. `on_failure` hears the kind of every failure: `timeout`, `connection` or `refused`.
        """
        self._timeout_s = settings.timeout_s
        self._on_failure = on_failure
        self.client = _client(settings)
        options = self.client.connection_pool.connection_kwargs
        self.where = str(options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}")
        """The address, without any secret."""
        self._scripts = {name: self.client.register_script(text) for name, text in scripts.items()}

    async def run(self, name: str, keys: Sequence[bytes], *arguments: bytes | str | int) -> Any:  # noqa: ANN401 - as Redis answers
        """Run a script and return its answer. Raises as `ask`."""
        return await self.ask(self._scripts[name](keys=list(keys), args=arguments))

    async def ask(self, call: Any) -> Any:  # noqa: ANN401 - awaitables of the library, and as Redis answers
        """Await one call within `timeouts.store_s`. Raises NotReadyError, with what an operator has to look at."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await call
        except (TimeoutError, RedisTimeoutError) as error:
            raise self._away("timeout", f"did not answer within {self._timeout_s:g} s (timeouts.store_s)") from error
        except (RedisConnectionError, OSError) as error:
            raise self._away("connection", f"cannot be reached: {error}") from error
        except RedisError as error:
            raise self._away("refused", f"refused a call: {error}") from error

    def _away(self, reason: str, what: str) -> NotReadyError:
        self._on_failure(reason)
        return NotReadyError(f"the directory's Redis at {self.where} {what} (directory.redis_url)")


class _Credentials(CredentialProvider):
    """Asked by the library for each new connection."""

    def __init__(self, user: str | None, password: Callable[[], str]) -> None:
        self._user = user
        self._password = password

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        return (self._user, self._password()) if self._user else (self._password(),)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        return self.get_credentials()


def _client(settings: RedisSettings) -> Redis:
    """Make a client whose calls are bounded by `RedisConnection.ask` alone, and not tried again behind our back.

    A script that was run must not be run twice. The library's own limit on sockets is `asyncio.wait_for`, which in
    Python 3.11 loses a cancellation that meets the end of the wait: a caller's deadline would never come.
    """
    try:
        pool = BlockingConnectionPool.from_url(
            settings.url,
            max_connections=CONNECTIONS,
            timeout=settings.timeout_s,
            socket_timeout=None,
            socket_connect_timeout=None,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError("directory.redis_url: cannot be read; expected redis://, rediss:// or unix://") from error
    if settings.password():
        options = pool.connection_kwargs
        options["credential_provider"] = _Credentials(options.pop("username", None), settings.password)
    return Redis.from_pool(pool)

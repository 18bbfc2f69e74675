"""Where bootstrap keeps who is there and which rooms are paired."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, SecretStr, model_validator

from kvbridge.config.endpoints import Seconds
from kvbridge.core.addresses import is_loopback
from kvbridge.core.ids import FrozenModel

_SCHEMES = ("redis", "rediss", "unix")


class StoreKind(StrEnum):
    """Where the directory and the rooms are kept."""

    MEMORY = "memory"
    """In this process: one bootstrap, which comes back empty and is filled again by heartbeats."""
    REDIS = "redis"
    """In Redis: any number of bootstraps serve one directory."""


class DirectoryConfig(FrozenModel):
    """Who is there, and where that is kept."""

    expire_after_s: Seconds = 8.0
    """A daemon whose last heartbeat is older is taken off; give it four heartbeat intervals. Equal on all replicas."""
    store: StoreKind = StoreKind.MEMORY
    """`memory`: this process alone; `redis`: shared by all bootstraps that name the same Redis and namespace."""
    redis_url: SecretStr | None = None
    """redis://HOST:PORT/DB, rediss:// for TLS (?ssl_ca_certs=FILE), or unix:///PATH. Never shown: it may hold a password."""
    redis_password_file: Path | None = None
    """File whose first line is Redis's password; new connections show what is there then."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=100)] = "kvbridge"
    """What all keys in Redis begin with; one for each cluster of kvbridge."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.store is StoreKind.MEMORY:
            if self.redis_url is not None or self.redis_password_file is not None:
                raise ValueError("redis_url and redis_password_file are of no use with store: memory")
            return self
        if self.redis_url is None:
            raise ValueError("store is redis, so redis_url must be set")
        url = _split(self.redis_url)
        if url is None or url.scheme not in _SCHEMES:
            # The value is not shown: it may hold a password.
            raise ValueError("redis_url is no URL that begins with redis://, rediss:// or unix://")
        if url.password and self.redis_password_file is not None:
            raise ValueError("redis_url holds a password and redis_password_file is set: keep one")
        return self

    @property
    def open_redis(self) -> str:
        """The host of a Redis that others could reach and that asks for no password; empty when there is none."""
        url = None if self.redis_url is None else _split(self.redis_url)
        if url is None or url.scheme == "unix" or url.password or self.redis_password_file is not None:
            return ""
        host = url.hostname or "localhost"
        return "" if is_loopback(host) else host


def _split(secret: SecretStr) -> SplitResult | None:
    try:
        url = urlsplit(secret.get_secret_value().strip())
        _ = url.port  # raises when it is no number
    except ValueError:
        return None
    return url

"""The whole configuration of bootstrap, with the registry of nodes that it keeps, and of the router."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from kvbridge.config.endpoints import (
    DirectoryLinkConfig,
    HttpConfig,
    Port,
    Seconds,
    TelemetryConfig,
    TokenConfig,
    open_http_problem,
    refuse,
)
from kvbridge.config.limits import BootstrapTimeouts
from kvbridge.core.addresses import SERVER_URL, is_loopback
from kvbridge.core.ids import FrozenModel, Positive

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


class PairingConfig(FrozenModel):
    """How a pair is found."""

    attempts: Annotated[int, Field(ge=1, le=32)] = 3
    """Pairs tried for one request before it is refused."""
    max_under_way: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Requests that are paired at once; more are told to come back (503), so that those under way are not late."""
    max_wait_s: Seconds = 30.0
    """Longest `wait_s` of a request that is served; no longer than the nodes' `admission.max_wait_s`, and shorter than their
    `timeouts.offer_s`: the prefill side is reserved first and waits for decode."""
    max_waiting: Annotated[int, Field(ge=0, le=1_000)] = 256
    """Requests that wait for pages at once, each at one pair; beyond it they are refused at once. 0: nobody waits."""
    max_rooms: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """Rooms remembered at most; the oldest are forgotten first."""


class BootstrapConfig(FrozenModel):
    """The bootstrap service."""

    http: HttpConfig = HttpConfig()
    directory: DirectoryConfig = DirectoryConfig()
    pairing: PairingConfig = PairingConfig()
    daemons: TokenConfig = TokenConfig()
    """How bootstrap calls the daemons: every one of them accepts the token."""
    timeouts: BootstrapTimeouts = BootstrapTimeouts()
    telemetry: TelemetryConfig = TelemetryConfig()
    insecure: bool = False
    """Allow an endpoint that the network can reach without a token."""

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        if not self.insecure:
            refuse(open_http_problem(self.http), _open_redis(self.directory))
        ticket_s, keep_s = self.pairing.max_wait_s + self.timeouts.ticket_s, self.timeouts.room_keep_s
        if ticket_s > keep_s:
            raise ValueError(
                f"pairing.max_wait_s and timeouts.ticket_s ({ticket_s:g} s together) must not exceed timeouts.room_keep_s "
                f"({keep_s:g} s): a ticket would outlive the memory of its room"
            )
        return self


def _open_redis(directory: DirectoryConfig) -> str:
    if not directory.open_redis:
        return ""
    remedy = "set directory.redis_password_file, use a Redis on this machine, or set insecure"
    return f"directory.redis_url names {directory.open_redis}, which others can reach, without a password: {remedy}"


_SERVER = re.compile(f"{SERVER_URL}/?")


class DispatchOrder(StrEnum):
    """When the decode server gets a request."""

    PAIRED = "paired"
    """With the prefill server, under one room; with a connector that cannot do that, as `plain`."""
    PLAIN = "plain"
    """With what the prefill server has answered."""


class RouterHttpConfig(HttpConfig):
    """The HTTP API. Callers must show the token, which is passed on to the servers; further lines of its file are taken as well."""

    port: Port = 7903
    max_body_bytes: Positive = 64 << 20
    max_request_s: Seconds = 60.0


class RouterTimeouts(FrozenModel):
    """Waits of the router."""

    first_byte_s: Seconds = 600.0
    """From a request to the first byte of its answer, all servers that are tried together. An answer that is not streamed has its
    first byte when all of it is there."""
    idle_s: Seconds = 120.0
    """Between two pieces of an answer; also how long a client may take over one."""
    health_interval_s: Seconds = 2.0
    """Each server is asked for its health so often, and the directory for its servers."""
    health_s: Seconds = 5.0
    """A server answers how it is, and the directory who is there."""
    shutdown_s: Seconds = 30.0
    """From the signal to the end of the process: answers under way end within it, or are cut off."""


class RouterConfig(FrozenModel):
    """The router in front of prefill and decode servers."""

    prefill: tuple[str, ...] = ()
    """Servers that compute prompts."""
    decode: tuple[str, ...] = ()
    """Servers that generate answers."""
    bootstrap: DirectoryLinkConfig = DirectoryLinkConfig()
    """The directory to take the servers from, where nodes have told it their `engine_url`; instead of the two lists."""
    order: DispatchOrder = DispatchOrder.PAIRED
    """`paired`: a request goes to both servers at once; `plain`: to decode with what prefill has answered."""
    limit: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Requests under way at once, from the first byte of their bodies; one more is answered 503 with Retry-After."""
    limit_bytes: Positive = 512 << 20
    """Bytes of bodies under way at once, of each body those behind its first 256 KiB; a body that exceeds it is answered 503."""
    http: RouterHttpConfig = RouterHttpConfig()
    timeouts: RouterTimeouts = RouterTimeouts()
    telemetry: TelemetryConfig = TelemetryConfig()
    insecure: bool = False
    """Allow an endpoint that the network can reach without a token."""

    @field_validator("prefill", "decode")
    @classmethod
    def _are_servers(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not _SERVER.fullmatch(url):
                raise ValueError(
                    f"'{url}' is no server: expected http://HOST:PORT or https://HOST:PORT, without a path"
                )
        return tuple(dict.fromkeys(url.rstrip("/") for url in urls))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.limit_bytes < self.http.max_body_bytes:
            raise ValueError(
                f"limit_bytes {self.limit_bytes} is less than http.max_body_bytes {self.http.max_body_bytes}: the longest body "
                "could never be read"
            )
        lists = bool(self.prefill), bool(self.decode)
        if self.bootstrap.url and any(lists):
            raise ValueError(
                "servers are named and so is a directory to take them from: leave out --bootstrap or the lists"
            )
        if not self.bootstrap.url and not all(lists):
            missing = " and ".join(name for name, given in zip(("prefill", "decode"), lists, strict=True) if not given)
            raise ValueError(f"no {missing} server is named: give --prefill URL and --decode URL, or --bootstrap URL")
        if not self.insecure and (problem := open_http_problem(self.http)):
            raise ValueError(problem)
        return self

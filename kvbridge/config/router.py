"""The whole configuration of the router."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from kvbridge.config.endpoints import (
    DirectoryLinkConfig,
    HttpConfig,
    Port,
    Seconds,
    TelemetryConfig,
)
from kvbridge.config.schema import open_http_problem
from kvbridge.core.addresses import SERVER_URL
from kvbridge.core.ids import FrozenModel, Positive

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

"""The whole configuration of each daemon: prefill, decode, bootstrap, router; and the relations between their sections."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from kvbridge.config.endpoints import (
    BootstrapLinkConfig,
    ConnectingControlConfig,
    ControlConfig,
    DecodeHttpConfig,
    DirectoryLinkConfig,
    HttpConfig,
    HttpUrl,
    ListeningControlConfig,
    Port,
    PrefillHttpConfig,
    Seconds,
    TelemetryConfig,
    TokenConfig,
    exposed_http,
    is_wildcard,
    refuse,
)
from kvbridge.config.limits import AdmissionConfig, BootstrapTimeouts, DaemonTimeouts
from kvbridge.config.pools import DecodePools, DeviceKind, MemoryOwner, ModelConfig, ParallelismConfig, PrefillPools
from kvbridge.config.tier import TierConfig
from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.core.addresses import MAX_SOCKET_PATH_BYTES, SERVER_URL, is_loopback, redis_hosts
from kvbridge.core.geometry.costs import SparseSettings
from kvbridge.core.ids import FrozenModel, Positive, Role
from kvbridge.core.plan.digests import DigestKind

SOCKET_NAME_BYTES = 40
"""Bytes that the names of sockets below `runtime_dir` take."""
LONGEST_RUNTIME_DIR = MAX_SOCKET_PATH_BYTES - SOCKET_NAME_BYTES
_SERVER = re.compile(f"{SERVER_URL}/?")
_REDIS_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


def fits_sockets(runtime_dir: Path) -> bool:
    """Whether the addresses of sockets below a runtime directory are short enough for the system."""
    return len(os.fsencode(runtime_dir)) <= LONGEST_RUNTIME_DIR


def default_runtime_dir(role: Role, given: dict[str, Any]) -> Path:
    """Return a directory of this user's in `$XDG_RUNTIME_DIR`, or where temporary files are, that no other node has."""
    home = os.environ.get("XDG_RUNTIME_DIR")
    names = f"{role}-{given.get('instance')}-{given.get('node')}"
    if home:
        return Path(home) / f"kvbridge-{names}"
    return Path(tempfile.gettempdir()) / f"kvbridge-{os.getuid()}-{names}"


class DaemonConfig(FrozenModel):
    """Settings that the prefill and the decode daemon have in common."""

    instance: Name
    """Name of this copy of the model: the same on all nodes of the instance, and no other instance's."""
    node: Name = "node-0"
    """Name of this node inside its instance."""
    model: ModelConfig
    parallelism: ParallelismConfig = ParallelismConfig()
    transports: TransportSettings = TransportSettings()
    control: ControlConfig
    http: HttpConfig = HttpConfig()
    engine_url: HttpUrl = ""
    """URL of this node's engine for requests of the OpenAI API, told to bootstrap for routers; empty: not told."""
    bootstrap: BootstrapLinkConfig = BootstrapLinkConfig()
    admission: AdmissionConfig = AdmissionConfig()
    tier: TierConfig = TierConfig()
    timeouts: DaemonTimeouts = DaemonTimeouts()
    telemetry: TelemetryConfig = TelemetryConfig()
    runtime_dir: Path
    """Directory of the sockets between this daemon, its workers and its engines; made with mode 0700. Default:
    kvbridge-ROLE-INSTANCE-NODE in $XDG_RUNTIME_DIR, or kvbridge-UID-ROLE-INSTANCE-NODE in the directory for temporary files."""
    runtime_group: Annotated[int, Field(ge=0)] | str | None = None
    """Group, by number or name, whose members may attach engines as well: the directory and the pools are opened to it. This
    daemon's user must be a member. Null: only engines of this daemon's user."""
    insecure: bool = False
    """Allow endpoints that the network can reach without keys and without a token."""
    if TYPE_CHECKING:
        pools: PrefillPools | DecodePools

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        refuse(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        http = self.http
        if not self.insecure:
            yield from exposed_http(http)
            for endpoint in self.tier.events.exposed if self.tier.events else ():
                remedy = "bind a loopback address, or set insecure"
                yield f"tier.events has {endpoint}, which others can reach, and its subscribers show no token: {remedy}"
        if self.bootstrap.url and not http.advertise_url and is_wildcard(http.host):
            yield f"http.host is {http.host}, which bootstrap cannot pass on as an address: set http.advertise_url"
        on_cpu = any(one.device == "cpu" for one in self.parallelism.ranks) or (
            not self.parallelism.ranks and self.parallelism.device is DeviceKind.CPU
        )
        if on_cpu and self.pools.memory is MemoryOwner.ADOPTED and self.transports.order == (TransportName.LOCAL,):
            yield "transports.order has local alone, which does not reach host memory that an engine brings: add mooncake or nixl"
        if not fits_sockets(self.runtime_dir):
            size = len(os.fsencode(self.runtime_dir))
            yield f"runtime_dir has {size} bytes; sockets inside it need it to have at most {LONGEST_RUNTIME_DIR}"


class PrefillConfig(DaemonConfig):
    """A prefill daemon."""

    control: ListeningControlConfig = ListeningControlConfig()
    http: PrefillHttpConfig = PrefillHttpConfig()
    runtime_dir: Path = Field(default_factory=partial(default_runtime_dir, Role.PREFILL))
    pools: PrefillPools

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        control = self.control
        if not self.insecure and control.curve.secret_key_file is None and not is_loopback(control.host):
            remedy = "set control.curve.secret_key_file, bind a loopback address, or set insecure"
            yield f"control.bind is {control.bind}, which others can reach, and there are no keys: {remedy}"


class IntegrityConfig(FrozenModel):
    """Whether the bytes of a request that arrived are compared with those that were sent, before it can be claimed."""

    digest: DigestKind = DigestKind.NONE
    """`crc32c`: both sides compute a checksum of every page, and a room with a page that differs fails. `none`: rows are counted,
    and their bytes are trusted."""


class DecodeConfig(DaemonConfig):
    """A decode daemon."""

    control: ConnectingControlConfig = ConnectingControlConfig()
    http: DecodeHttpConfig = DecodeHttpConfig()
    runtime_dir: Path = Field(default_factory=partial(default_runtime_dir, Role.DECODE))
    pools: DecodePools
    sparse: SparseSettings | None = None
    """Sparse decode: engines keep a hot buffer on the device for the component in the host pool. Null: they do not. A room's
    request slot is its slot of the hot buffer, so at most `max_requests` rooms are admitted at once, and pools.device.request
    must not be larger. `kvbridge fit` prints the memory that this takes, and how many requests fit."""
    integrity: IntegrityConfig = IntegrityConfig()

    @model_validator(mode="after")
    def _check_sparse(self) -> Self:
        if self.sparse is None:
            return self
        if self.pools.memory is MemoryOwner.ADOPTED:
            raise ValueError(
                "sparse is set but pools.memory is adopted: the engine names its own request slots, so it limits them itself; "
                "set sparse to null"
            )
        if len(self.pools.host.components) != 1:
            raise ValueError("sparse is set, so pools.host.components must name one component, that of sparse decode")
        slots = self.pools.device.request
        if slots > self.sparse.max_requests:
            raise ValueError(
                f"pools.device.request gives out {slots} request slots, but the hot buffer has {self.sparse.max_requests} "
                "(sparse.max_requests): a request beyond them could not decode; make them equal"
            )
        return self


class StoreKind(StrEnum):
    """Place where the directory and the rooms are kept."""

    MEMORY = "memory"
    REDIS = "redis"


class DirectoryConfig(FrozenModel):
    """The registry of nodes, and where it is kept."""

    expire_after_s: Seconds = 8.0
    """A daemon whose last heartbeat is older is taken off. Four heartbeat intervals or more; the same on all replicas."""
    store: StoreKind = StoreKind.MEMORY
    """`memory`: one bootstrap, which comes back empty and is filled again by heartbeats. `redis`: shared by all bootstraps that
    name the same Redis and namespace."""
    redis_url: SecretStr | None = None
    """redis://HOST:PORT/DB, rediss:// for TLS (?ssl_ca_certs=FILE), or unix:///PATH. redis+sentinel://HOST:PORT,HOST:PORT/NAME
    asks the sentinels there, one after the other, which server of NAME takes writes. Never shown: it may hold a password."""
    redis_password_file: Path | None = None
    """File whose first line is Redis's password; new connections use the present one."""
    namespace: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]*$", max_length=100)] = "kvbridge"
    """Prefix of all keys in Redis; one for each cluster of kvbridge."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.store is StoreKind.MEMORY:
            if self.redis_url is not None or self.redis_password_file is not None:
                raise ValueError("redis_url and redis_password_file are of no use with store: memory")
            return self
        if self.redis_url is None:
            raise ValueError("store is redis, so redis_url must be set")
        url = _split(self.redis_url)
        if url is None or url.scheme not in _REDIS_SCHEMES:
            # The value is not shown: it may hold a password.
            raise ValueError("redis_url is no URL that begins with redis://, rediss:// or unix://")
        if url.password and self.redis_password_file is not None:
            raise ValueError("redis_url holds a password and redis_password_file is set: keep one")
        return self

    def exposed_redis(self) -> Iterator[str]:
        """Yield the problem of a Redis that others can reach and that asks for no password."""
        url = None if self.redis_url is None else _split(self.redis_url)
        if url is None or url.scheme == "unix" or url.password or self.redis_password_file is not None:
            return
        for host in [host for host, _ in redis_hosts(url) if not is_loopback(host)][:1]:
            remedy = "set directory.redis_password_file, use a Redis on this machine, or set insecure"
            yield f"directory.redis_url names {host}, which others can reach, without a password: {remedy}"


def _split(secret: SecretStr) -> SplitResult | None:
    try:
        url = urlsplit(secret.get_secret_value().strip())
        redis_hosts(url)  # raises when a port is no number
    except ValueError:
        return None
    return url


class PairingConfig(FrozenModel):
    """How bootstrap finds a pair."""

    attempts: Annotated[int, Field(ge=1, le=32)] = 3
    """Pairs tried for one request before it is refused."""
    max_under_way: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Requests that are paired at once; more are answered 503, so that those under way are not late."""
    max_wait_s: Seconds = 30.0
    """Longest `wait_s` of a request that is served. No longer than the nodes' `admission.max_wait_s`, and shorter than their
    `timeouts.offer_s`: the prefill side is reserved first and waits for decode."""
    max_waiting: Annotated[int, Field(ge=0, le=1_000)] = 256
    """Requests that may wait for pages at once, each at one pair; more are refused at once. 0: nobody waits."""
    max_rooms: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """Most rooms that are remembered; the oldest are forgotten first."""


class BootstrapConfig(FrozenModel):
    """The bootstrap service."""

    http: HttpConfig = HttpConfig()
    directory: DirectoryConfig = DirectoryConfig()
    pairing: PairingConfig = PairingConfig()
    daemons: TokenConfig = TokenConfig()
    """The token that bootstrap shows to daemons; every daemon accepts it."""
    timeouts: BootstrapTimeouts = BootstrapTimeouts()
    telemetry: TelemetryConfig = TelemetryConfig()
    insecure: bool = False
    """Allow an endpoint that the network can reach without a token."""

    @model_validator(mode="after")
    def _check_endpoints(self) -> Self:
        if not self.insecure:
            refuse((*exposed_http(self.http), *self.directory.exposed_redis()))
        ticket_s, keep_s = self.pairing.max_wait_s + self.timeouts.ticket_s, self.timeouts.room_keep_s
        if ticket_s > keep_s:
            raise ValueError(
                f"pairing.max_wait_s and timeouts.ticket_s ({ticket_s:g} s together) must not exceed timeouts.room_keep_s "
                f"({keep_s:g} s): a ticket would outlive the memory of its room"
            )
        return self


class DispatchOrder(StrEnum):
    """Moment at which the decode server gets a request."""

    PAIRED = "paired"
    PLAIN = "plain"


class RouterHttpConfig(HttpConfig):
    """The HTTP API. Callers must show the token, which is passed on to the servers; further lines of its file are valid, too."""

    port: Port = 7903
    max_body_bytes: Positive = 64 << 20
    max_request_s: Seconds = 60.0


class RouterTimeouts(FrozenModel):
    """Waits of the router."""

    first_byte_s: Seconds = 600.0
    """From a request to the first byte of its answer, all tried servers together; without a stream, to the whole answer."""
    idle_s: Seconds = 120.0
    """Between two pieces of an answer; also how long a client may take over one."""
    health_interval_s: Seconds = 2.0
    """Interval at which each server is asked for its health, and the directory for its servers."""
    health_s: Seconds = 5.0
    """Longest wait for a server's health, and for the directory's servers."""
    shutdown_s: Seconds = 30.0
    """From the signal to the end of the process: answers under way end within it, or are cut off."""


class RouterConfig(FrozenModel):
    """The router in front of prefill and decode servers."""

    prefill: tuple[str, ...] = ()
    """Servers that compute prompts."""
    decode: tuple[str, ...] = ()
    """Servers that generate answers."""
    bootstrap: DirectoryLinkConfig = DirectoryLinkConfig()
    """The directory that names the servers, from the `engine_url` of its nodes; in place of the two lists."""
    order: DispatchOrder = DispatchOrder.PAIRED
    """`paired`: a request goes to both servers at once, under one room; with a connector that cannot do that, as `plain`.
    `plain`: it goes to decode with the answer of prefill."""
    limit: Annotated[int, Field(ge=1, le=100_000)] = 1024
    """Requests under way at once, from the first byte of their bodies; one more is answered 503 with Retry-After."""
    limit_bytes: Positive = 512 << 20
    """Bytes of bodies under way at once, without the first 256 KiB of each; a body that exceeds it is answered 503."""
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
                raise ValueError(f"'{url}' is no server: expected http://HOST:PORT or https://HOST:PORT and no path")
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
            raise ValueError("both servers and a directory are named: leave out --bootstrap or the lists")
        if not self.bootstrap.url and not all(lists):
            missing = " and ".join(name for name, given in zip(("prefill", "decode"), lists, strict=True) if not given)
            raise ValueError(f"no {missing} server is named: give --prefill URL and --decode URL, or --bootstrap URL")
        if not self.insecure:
            refuse(exposed_http(self.http))
        return self

"""Settings of endpoints and of links to them: control socket, HTTP, bootstrap; logs and traces."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from kvbridge.core.addresses import SERVER_URL, is_loopback
from kvbridge.core.ids import FrozenModel, Positive

Port = Annotated[int, Field(ge=0, le=65_535)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
HttpUrl = Annotated[str, Field(pattern=f"^({SERVER_URL}/?)?$", max_length=500)]
_IPV4 = r"((25[0-5]|2[0-4]\d|1?\d?\d)(\.(?!$)|$)){4}"
_CURVE_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
CurveKey = Annotated[str, Field(pattern=f"^{_CURVE_KEY.pattern}$")]
"""A CURVE key in Z85: 40 characters."""
_PLAIN_PATH = re.compile(r"(/[\w.-]+){2,}", re.ASCII)
"""A path as long as a key looks like a key. Only one key in millions consists of these characters alone."""
AllowedKey = Annotated[str, Field(pattern=f"^{_CURVE_KEY.pattern}( +[A-Za-z0-9][A-Za-z0-9._-]{{0,99}})?$")]
"""A CURVE public key, and the name of the instance where the key is good for one only."""

_WILDCARDS = {"0.0.0.0", "::", "*", ""}  # noqa: S104 - recognised here, not bound


def is_wildcard(host: str) -> bool:
    """Whether a bound host means every interface, which is no address for a peer."""
    return host.strip("[]") in _WILDCARDS


class CurveConfig(FrozenModel):
    """Keys of the control sockets. All empty: no encryption and no authentication."""

    secret_key_file: Path | None = None
    """File with this node's CURVE secret key, 40 characters of Z85, mode 0600; `kvbridge keys generate` makes one."""
    public_key: CurveKey | None = None
    """The public key of that secret key; null: derived."""
    allowed_public_keys: tuple[AllowedKey, ...] = ()
    """Public keys of peers, each alone or as "KEY INSTANCE"; this node's own key needs no entry. On a prefill node: peers that
    may connect. On a decode node: peers that may write its memory; empty: any node that a request names."""
    allowed_keys_file: Path | None = None
    """File with public keys of peers, one a line, as in `allowed_public_keys`; read again when it changes."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.secret_key_file is None and (self.public_key or self.allowed_public_keys or self.allowed_keys_file):
            raise ValueError("public keys are of no use without secret_key_file")
        return self

    @field_validator("secret_key_file", mode="before")
    @classmethod
    def _is_no_key(cls, given: object) -> object:
        named = str(given)  # as it was written: a Path leaves out parts of a key such as "//"
        if _CURVE_KEY.fullmatch(named) and not _PLAIN_PATH.fullmatch(named):
            raise ValueError("secret_key_file is a key itself, expected the path of the file with the key")
        return given


class ControlConfig(FrozenModel):
    """How nodes of the two roles speak to each other."""

    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Prefill: most connections at once; one more is closed. Decode: most prefill nodes that are connected at once, each by
    four file descriptors. All together take at most a quarter of the files that the process may open."""
    curve: CurveConfig = CurveConfig()


class ConnectingControlConfig(ControlConfig):
    """How nodes speak to each other: decode nodes connect to the control sockets of prefill nodes, and listen nowhere."""

    @model_validator(mode="before")
    @classmethod
    def _listens_nowhere(cls, given: object) -> object:
        idle = sorted({"bind", "advertise"} & given.keys()) if isinstance(given, dict) else ()
        if idle:
            raise ValueError(f"{' and '.join(idle)}: of no use on a decode node, which listens nowhere; take it out")
        return given


class ListeningControlConfig(ControlConfig):
    """How nodes speak to each other: prefill nodes listen on a control socket, decode nodes connect to it."""

    bind: Annotated[str, Field(pattern=r"^(tcp://[^/\s]+:\d{1,5}|ipc:///\S+)$", max_length=200)] = "tcp://127.0.0.1:0"
    """Where to listen; port 0 takes a free one."""
    advertise: Annotated[str, Field(pattern=r"^(|tcp://[^/\s]+:\d{1,5}|ipc:///\S+)$", max_length=200)] = ""
    """Address that peers are told to connect to; port 0 stands for the bound port; empty: the bound address."""

    @property
    def host(self) -> str:
        """The host part of `bind`; `localhost` for an ipc address."""
        return endpoint_host(self.bind)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if is_wildcard(self.host) and not self.advertise:
            raise ValueError(f"bind is {self.bind}, which is no address that a peer can use: set advertise")
        if self.advertise and is_wildcard(endpoint_host(self.advertise)):
            raise ValueError(f"advertise is {self.advertise}, which is no address that a peer can use")
        return self

    def advertised(self, bound: str) -> str:
        """Return the endpoint to tell peers, given the endpoint that was bound (with its real port)."""
        if not self.advertise:
            return bound
        if self.advertise.startswith("tcp://") and self.advertise.endswith(":0"):
            return self.advertise.removesuffix("0") + bound.rpartition(":")[2]
        return self.advertise


def endpoint_host(endpoint: str) -> str:
    """Return the host part of tcp://host:port; `localhost` for an ipc address."""
    if not endpoint.startswith("tcp://"):
        return "localhost"
    return endpoint.removeprefix("tcp://").rpartition(":")[0]


class TokenConfig(FrozenModel):
    """A section with a bearer token."""

    token: SecretStr | None = None
    """Bearer token. Better kept in `token_file`."""
    token_file: Path | None = None
    """File whose first line is the bearer token; `kvbridge keys token` makes one."""

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both set: keep one")
        return self


class HttpConfig(TokenConfig):
    """The HTTP API. Callers must show the token; further lines of its file are valid, too."""

    token_file: Path | None = None
    """File with bearer tokens, one a line; `kvbridge keys token` makes one. A token lets its bearer name the default namespace; a
    line `TOKEN namespaces=A,B` lets it name those instead (`*`: any; `-`: the default one)."""
    host: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s/]+$")] = "127.0.0.1"
    """Address to listen on; any but a loopback address needs a token."""
    port: Port = 7900
    """0 takes a free port."""
    advertise_url: HttpUrl = ""
    """URL by which others reach this endpoint, told to bootstrap; port 0 stands for the bound port; empty: the bound address."""
    tls_certificate_file: Path | None = None
    """PEM chain; set together with `tls_key_file`."""
    tls_key_file: Path | None = None
    """PEM private key of the certificate."""
    open_metrics: bool = False
    """Whether /metrics may be read without the token."""
    max_body_bytes: Positive = 1 << 20
    """Longest request body."""
    max_request_s: Seconds = 10.0
    """Longest time for a request to arrive whole, and for a TLS handshake; a later one loses its connection."""
    max_connections: Annotated[int, Field(ge=1, le=1_000_000)] = 2048
    """Most connections at once. One more is closed after a 503; with TLS, without an answer. Each takes a file descriptor, and
    all together at most a quarter of the files that the process may open."""
    max_wait_s: Seconds = 60.0
    """Longest `?wait=` of a request that is served."""

    @property
    def has_token(self) -> bool:
        """Whether callers must show a token."""
        return self.token is not None or self.token_file is not None

    @field_validator("host")
    @classmethod
    def _is_host(cls, host: str) -> str:
        if re.fullmatch(r"[\d.]+", host) and not re.fullmatch(_IPV4, host):
            raise ValueError("neither an IP address nor a host name")
        return host

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.token is not None and not self.token.get_secret_value().strip():
            raise ValueError("token is empty: leave it out or give one")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file belong together: set both or neither")
        return self

    def advertised(self, bound: str) -> str:
        """Return the URL to tell others, given the URL that was bound (with its real port)."""
        if not self.advertise_url:
            return bound
        return re.sub(r":0/?$", f":{urlsplit(bound).port}", self.advertise_url.rstrip("/"))


def exposed_http(http: HttpConfig) -> Iterator[str]:
    """Yield the problem of an endpoint that others can reach without a token."""
    if not http.has_token and not is_loopback(http.host):
        remedy = "set http.token_file, bind a loopback address, or set insecure"
        yield f"http.host is {http.host}, which others can reach, and there is no token: {remedy}"


def refuse(problems: Iterable[str]) -> None:
    """Raise ValueError with all problems, if there are any."""
    if text := "\n".join(problems):
        raise ValueError(text)


class PrefillHttpConfig(HttpConfig):
    """The HTTP API. Callers must show the token; further lines of its file are valid, too."""

    port: Port = 7901


class DecodeHttpConfig(HttpConfig):
    """The HTTP API. Callers must show the token; further lines of its file are valid, too."""

    port: Port = 7902


class DirectoryLinkConfig(TokenConfig):
    """A directory, and the token that it is shown."""

    url: HttpUrl = ""
    """URL of bootstrap; empty: no directory."""
    other_urls: tuple[HttpUrl, ...] = ()
    """Further replicas of the directory; the next one is asked when one does not answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.other_urls and not all((self.url, *self.other_urls)):
            raise ValueError("other_urls are further replicas: set url too, and leave none empty")
        return self


class BootstrapLinkConfig(DirectoryLinkConfig):
    """The directory that a daemon announces itself to, and the token that it is shown."""

    url: HttpUrl = ""
    """URL of bootstrap. Empty: no directory; whoever picks the two ends of a request then admits it on both."""
    heartbeat_interval_s: Seconds = 2.0
    """Interval of the heartbeats to the directory; a quarter of its `directory.expire_after_s` or less."""


class LogLevel(StrEnum):
    """Importance of a log record."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """Form of a log record."""

    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


class TracesConfig(FrozenModel):
    """OpenTelemetry traces; they need the extra `traces`."""

    endpoint: Annotated[str, Field(pattern=r"^(|https?://[^/\s@?#]+(/[^\s?#]*)?)$", max_length=500)] = ""
    """URL of a collector that spans are sent to, by OTLP over HTTP: http://HOST:4318, where they go to /v1/traces, or a URL with
    another path. Empty: nothing is traced here, and requests that callers trace keep their ids."""
    sampled_ratio: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of the requests without a `traceparent` that are traced; for others the `traceparent` decides."""
    headers_file: Path | None = None
    """File of headers that the collector needs, one `Name: value` a line; read again when it changes."""

    @property
    def url(self) -> str:
        """The endpoint with its path."""
        return self.endpoint if urlsplit(self.endpoint).path.strip("/") else f"{self.endpoint.rstrip('/')}/v1/traces"


class TelemetryConfig(FrozenModel):
    """Logs and traces."""

    log_level: LogLevel = LogLevel.INFO
    """The least important record that is written: `debug`, `info`, `warning` or `error`."""
    log_format: LogFormat = LogFormat.AUTO
    """`console`, `json`, or `auto`: `console` on a terminal, `json` otherwise."""
    traces: TracesConfig = TracesConfig()

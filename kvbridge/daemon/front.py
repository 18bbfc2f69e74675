"""The HTTP API of any daemon, from its configuration to a running server."""

from __future__ import annotations

from collections.abc import Callable

from kvbridge.config.endpoints import HttpConfig
from kvbridge.config.loading import read_grants
from kvbridge.daemon.descriptors import affordable
from kvbridge.daemon.secret_files import SecretFiles
from kvbridge.http.connections import ConnectionLimits
from kvbridge.http.operations import AppSettings
from kvbridge.http.server import Application, HttpServer, TlsFiles
from kvbridge.telemetry.logs import Seldom


async def open_http(
    http: HttpConfig,
    build: Callable[[AppSettings], Application],
    secrets: SecretFiles,
    seldom: Seldom,
    *,
    shutdown_s: float,
) -> HttpServer:
    """Build the application and serve it. Raises UnavailableError for a taken address or an unreadable secret."""
    tokens = secrets.add(
        "http.token_file",
        (http.token_file,),
        lambda: read_grants(http, key="http.token_file"),
    )
    settings = AppSettings(
        grants=lambda: tokens.current,
        open_metrics=http.open_metrics,
        max_body_bytes=http.max_body_bytes,
        max_wait_s=http.max_wait_s,
    )
    certificate, key = http.tls_certificate_file, http.tls_key_file
    tls = TlsFiles(certificate, key) if certificate is not None and key is not None else None
    connections = affordable(http.max_connections, "http.max_connections")
    limits = ConnectionLimits(request_s=http.max_request_s, connections=connections, seldom=seldom)
    server = await HttpServer.start(
        build(settings), host=http.host, port=http.port, shutdown_s=shutdown_s, limits=limits, tls=tls
    )
    if tls is not None:
        pair = secrets.add("http.tls_certificate_file", (tls.certificate, tls.key), tls.read)
        pair.on_change = lambda _: server.use_certificate(tls)
    return server

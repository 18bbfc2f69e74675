"""The HTTP APIs: applications, the server that runs them, and clients for both.

Owns: routes, problem bodies, bearer tokens, FastAPI. Must not know: how services do their work.
"""

from __future__ import annotations

from kvbridge.http.bootstrap_app import create_bootstrap_app
from kvbridge.http.client import DaemonClient, DirectoryClient
from kvbridge.http.daemon_app import create_daemon_app
from kvbridge.http.operations import AppSettings
from kvbridge.http.server import HttpServer, TlsFiles

__all__ = [
    "AppSettings",
    "DaemonClient",
    "DirectoryClient",
    "HttpServer",
    "TlsFiles",
    "create_bootstrap_app",
    "create_daemon_app",
]

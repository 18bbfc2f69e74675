"""Transports move bytes into the memory of peers, each by a library of its own (`base`)."""

from __future__ import annotations

import importlib.util

from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.core.errors import UnsupportedError
from kvbridge.transport.base import Transport

PACKAGES = {TransportName.MOONCAKE: ("mooncake",), TransportName.NIXL: ("nixl_cu12", "nixl_cu13")}
"""Packages with a transport's library; one of them has to be installed. `local` needs none."""


def is_installed(name: TransportName) -> bool:
    """Whether a transport's library is in this environment, without loading it."""
    return name not in PACKAGES or any(importlib.util.find_spec(package) for package in PACKAGES[name])


def create_transport(name: str, settings: TransportSettings, *, epoch: int = 0) -> Transport:
    """Build a transport whose endpoints are of `epoch` (`Transport.revoked`).

    Raises UnsupportedError for an unknown name, TransportError with cause and fix when the backend cannot run here.
    """
    match name:
        case TransportName.MOONCAKE:
            from kvbridge.transport.mooncake.transport import MooncakeTransport  # noqa: PLC0415

            return MooncakeTransport(settings.mooncake)
        case TransportName.NIXL:
            from kvbridge.transport.nixl.transport import NixlTransport  # noqa: PLC0415

            return NixlTransport(settings.nixl)
        case TransportName.LOCAL:
            from kvbridge.transport.local.transport import LocalTransport  # noqa: PLC0415

            return LocalTransport(settings.local, epoch=epoch)
        case _:
            known = ", ".join(TransportName)
            raise UnsupportedError(f"there is no transport '{name}'; `transports.order` may name {known}")

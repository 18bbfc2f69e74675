"""Transports move bytes into the memory of peers, each by a library of its own (`base`)."""

from __future__ import annotations

from kvbridge.config.transports import TransportName, TransportSettings
from kvbridge.core.errors import UnsupportedError
from kvbridge.transport.base import Transport


def create_transport(name: str, settings: TransportSettings, *, epoch: int = 0) -> Transport:
    """Build the transport `name` from its section of `settings`; its endpoints are of `epoch` (`Transport.revoked`).

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

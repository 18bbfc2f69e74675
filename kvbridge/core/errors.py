"""The errors that kvbridge raises on purpose, sorted by the remedy of the caller.

A message says what happened, to whom (room, peer, component), why, and what to do. Programs may match on `code`, which is stable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

CHECKOUT = "in a checkout of kvbridge: pip install '.[{}]'"
"""The way to install an extra. kvbridge is on no package index: a name alone would install any package of that name."""
WITH_LIBRARIES = f"{CHECKOUT.format('cpu')}, or '.[cuda]' on a host with CUDA"


class BridgeError(Exception):
    """Base of all deliberate errors. An HTTP API answers with `http_status`. A class inherits what its head does not name."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500

    def __init_subclass__(cls, *, code: str = "", http_status: int = 0) -> None:
        super().__init_subclass__()
        if code:
            cls.code = code
        if http_status:
            cls.http_status = http_status


def errors_by_code() -> dict[str, type[BridgeError]]:
    """Return every stable code with its class."""
    found: dict[str, type[BridgeError]] = {}
    kinds = [BridgeError]
    for kind in kinds:
        if "code" in vars(kind):
            found[kind.code] = kind
        kinds += kind.__subclasses__()
    return found


def code_of(error: BaseException) -> str:
    """Return the code of an error, or BridgeError's for an error that was not raised on purpose."""
    return error.code if isinstance(error, BridgeError) else BridgeError.code


class InvalidInputError(BridgeError, ValueError, code="invalid_input", http_status=400):
    """The caller sent something that can never work."""


class PageOutOfBoundsError(InvalidInputError, code="page_out_of_bounds"):
    """A page id does not exist in the region that it would index."""


class FingerprintMismatchError(InvalidInputError, code="fingerprint_mismatch", http_status=409):
    """Two instances do not hold the same model in the same form; the message names the first difference."""


class UnsupportedError(InvalidInputError, code="unsupported", http_status=422):
    """The request is well formed, but this build or this configuration cannot do it."""


class ConfigError(InvalidInputError, code="config_invalid"):
    """A configuration file, variable or flag is wrong; the message names the key."""


class UnavailableError(ConfigError):
    """A file, address or directory of the configuration is missing, held or unfit on this host now; a later start can succeed."""


class NotFoundError(BridgeError, code="not_found", http_status=404):
    """The named thing does not exist here (any more)."""


class UnknownRoomError(NotFoundError, code="unknown_room"):
    """No such room on this daemon."""


class ConflictError(BridgeError, code="conflict", http_status=409):
    """The call is valid, but not in the state that the thing is in now."""


class StaleError(ConflictError, code="stale"):
    """The message belongs to an earlier generation of the room or an earlier incarnation of its sender."""


class FeatureError(ConflictError, code="feature_missing"):
    """One side requires a feature that the other does not have; the message says which side to upgrade."""


class DetachedError(ConflictError, code="detached"):
    """The caller's attached memory is gone with the process that made it: let go, and attach again."""


class CapacityError(BridgeError, code="capacity", http_status=503):
    """There is no space now; a retry after about `retry_after_s` seconds can succeed. `lacking`: missing pages by `IndexSpace`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0, lacking: Mapping[Any, int] | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.lacking = dict(lacking or {})


class ClientLimitError(CapacityError, code="client_limit", http_status=429):
    """A client has as many rooms or waiting requests here as it may have, and has to end one of them first."""


class NotReadyError(CapacityError, code="not_ready"):
    """The daemon or a peer cannot serve yet, or no longer."""


class UnauthorizedError(BridgeError, code="unauthorized", http_status=401):
    """The caller did not prove its identity."""


class NamespaceError(BridgeError, code="namespace_forbidden", http_status=403):
    """The caller's token does not let it name this namespace; the message says which ones it may name."""


class DeadlineError(BridgeError, code="deadline", http_status=504):
    """A wait reached its limit; the message names the limit's key in the configuration."""


class PeerError(BridgeError, code="peer_failed", http_status=502):
    """Another process failed or vanished; the room fails, this process does not."""


class ProtocolError(PeerError, code="protocol", http_status=400):
    """A peer sent something that no correct peer sends. The message is dropped and counted."""


class TransportError(PeerError, code="transport_failed"):
    """Bytes could not be moved."""


class DigestMismatchError(TransportError, code="digest_mismatch"):
    """Other bytes arrived than were sent; the message names the first page that differs."""


class KeyMismatchError(InvalidInputError, code="key_mismatch", http_status=409):
    """An engine's tokens are not those that the room's page keys name; the message says from which page on."""


class RegistrationError(TransportError, code="registration_failed"):
    """Memory could not be created or registered; the message gives the cause and the fix."""


class IntegrityError(BridgeError, code="integrity"):
    """kvbridge's accounts contradict themselves: always a defect, please report it."""


class RoomFailedError(BridgeError, code="room_failed", http_status=502):
    """The room ended without its cache; the message carries the first cause."""

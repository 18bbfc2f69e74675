"""Every error that kvbridge raises on purpose, sorted by what the caller can do about it.

Owns: the tree, the stable codes and their HTTP status. Knows nothing of HTTP itself: a status is data here.

A message says what happened, to whom (room, peer, component), why, and what to do. `code` is stable across
releases and is what a program may match on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class BridgeError(Exception):
    """Base of all deliberate errors. `code` is stable; `http_status` is what an HTTP API answers with."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500


class InvalidInputError(BridgeError, ValueError):
    """The caller sent something that can never work; sending it again will not help."""

    code = "invalid_input"
    http_status = 400


class PageOutOfBoundsError(InvalidInputError):
    """A page id does not exist in the region that it would index."""

    code = "page_out_of_bounds"


class FingerprintMismatchError(InvalidInputError):
    """Two instances do not hold the same model in the same form; the message names the first difference."""

    code = "fingerprint_mismatch"
    http_status = 409


class UnsupportedError(InvalidInputError):
    """The request is well formed, but this build or this configuration cannot do it."""

    code = "unsupported"
    http_status = 422


class ConfigError(InvalidInputError):
    """A configuration file, variable or flag is wrong; the message names the key."""

    code = "config_invalid"


class NotFoundError(BridgeError):
    """The named thing does not exist here (any more)."""

    code = "not_found"
    http_status = 404


class UnknownRoomError(NotFoundError):
    """No such room on this daemon."""

    code = "unknown_room"


class ConflictError(BridgeError):
    """The call is valid, but not in the state that the thing is in now."""

    code = "conflict"
    http_status = 409


class StaleError(ConflictError):
    """The message belongs to an earlier generation of the room or an earlier incarnation of its sender."""

    code = "stale"


class FeatureError(ConflictError):
    """One side requires a feature that the other does not have; the message says which side to upgrade."""

    code = "feature_missing"


class DetachedError(ConflictError):
    """The memory that the caller is attached to is gone with the process that made it: let go, and attach again."""

    code = "detached"


class CapacityError(BridgeError):
    """There is no room now; trying again later can succeed. `retry_after_s` is a hint in seconds.

    `lacking`: how many pages of which `IndexSpace` are not there, when that is the reason.
    """

    code = "capacity"
    http_status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0, lacking: Mapping[Any, int] | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.lacking = dict(lacking or {})


class ClientLimitError(CapacityError):
    """A client has as many rooms or waiting requests here as it may have; it has to end one of its own first."""

    code = "client_limit"
    http_status = 429


class NotReadyError(CapacityError):
    """The daemon or a peer is not able to serve yet, or no longer."""

    code = "not_ready"


class UnauthorizedError(BridgeError):
    """The caller did not prove who it is."""

    code = "unauthorized"
    http_status = 401


class DeadlineError(BridgeError):
    """A wait reached its limit; the message names the limit's key in the configuration."""

    code = "deadline"
    http_status = 504


class PeerError(BridgeError):
    """Another process failed or vanished; the room fails, this process does not."""

    code = "peer_failed"
    http_status = 502


class ProtocolError(PeerError):
    """A peer sent something that no correct peer sends. The message is dropped and counted."""

    code = "protocol"
    http_status = 400


class TransportError(PeerError):
    """Bytes could not be moved."""

    code = "transport_failed"


class DigestMismatchError(TransportError):
    """Bytes arrived that are not those which were sent; the message names the first page that differs."""

    code = "digest_mismatch"


class RegistrationError(TransportError):
    """Memory could not be created or registered; the message gives the cause and the fix."""

    code = "registration_failed"


class IntegrityError(BridgeError):
    """Our own accounting contradicts itself. Always a defect of kvbridge; please report it."""

    code = "integrity"


class RoomFailedError(BridgeError):
    """The room ended without its cache; the message carries the first cause."""

    code = "room_failed"
    http_status = 502


def error_codes() -> dict[str, type[BridgeError]]:
    """Return every stable code with its class."""
    found: dict[str, type[BridgeError]] = {}
    queue: list[type[BridgeError]] = [BridgeError]
    while queue:
        kind = queue.pop()
        found.setdefault(kind.code, kind)
        queue.extend(kind.__subclasses__())
    return found

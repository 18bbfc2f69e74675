"""What a node's configuration says of its peers: keys, how patiently messages are sent, when one counts as lost."""

from __future__ import annotations

import structlog

from kvbridge.api.directory import ControlMode
from kvbridge.config.endpoints import CurveConfig
from kvbridge.config.limits import DaemonTimeouts
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.keys import AllowedKeys, AllowList, CurveKeys, load_keys, read_allowed
from kvbridge.control.link import Link, PeerSettings
from kvbridge.core.addresses import PeerAddress, is_loopback, parse_tcp
from kvbridge.core.errors import BridgeError, UnauthorizedError
from kvbridge.core.wire.delivery import DeliverySettings
from kvbridge.daemon.descriptors import affordable

log = structlog.get_logger(__name__)

HANDSHAKE_S = 10.0
"""A connection between nodes on which nobody has proved who he is after so long is closed."""
LINK_DESCRIPTORS = 4
"""What a client of ours takes: its connection, and what ZeroMQ keeps for its socket and its monitor."""


def curve_keys(curve: CurveConfig) -> CurveKeys | None:
    """Read the keys of a node, if it has any. Raises ConfigError when a file cannot be read or holds no key."""
    if curve.secret_key_file is None:
        return None
    allowed = read_allowed(curve.allowed_public_keys, curve.allowed_keys_file)
    return load_keys(curve.secret_key_file, public=curve.public_key or "", allowed=allowed)


class AllowedPeers:
    """Whose keys a node accepts. Without keys of its own it accepts everybody, on loopback."""

    def __init__(self, curve: CurveConfig, keys: CurveKeys | None) -> None:
        """Raises ConfigError for a list that cannot be read."""
        self._own = keys.public if keys else ""
        self._list = AllowedKeys(curve.allowed_public_keys, curve.allowed_keys_file) if keys else None

    @property
    def current(self) -> AllowList:
        """The list in force."""
        return self._list.current if self._list else {}

    def follow(self) -> bool:
        """Look at the file; whether another list is in force now. One that cannot be read leaves the former in force."""
        try:
            if self._list is None or not self._list.refresh():
                return False
        except BridgeError as error:
            log.error("allowed_keys_unreadable", effect="the former list stays in force", reason=str(error))
            return False
        log.info("allowed_keys_changed", keys=len(self.current))
        return True

    def names_of(self, key: str) -> frozenset[str]:
        """The instances that a key may speak for; empty: any."""
        return self.current.get(key, frozenset())

    def check_server(self, address: PeerAddress) -> None:
        """Raise UnauthorizedError for a prefill node that this decode node is not to write its memory.

        An empty list leaves the choice to whoever may admit requests here: they name the node and its key.
        """
        if self.current and address.public_key != self._own and address.public_key not in self.current:
            raise UnauthorizedError(
                f"the prefill node at {address.endpoint} has key {address.public_key or '(none)'}, which this decode node "
                "does not accept: list it in control.curve.allowed_keys_file, or leave the list empty to accept every "
                "node that a request names"
            )


def control_modes(config: PrefillConfig | DecodeConfig, listening: PeerAddress | None) -> tuple[ControlMode, ...]:
    """How a node may be met: by where it listens and with which key, or by what it accepts of a node that does."""
    if listening is not None:
        address = parse_tcp(listening.endpoint)
        local = ControlMode.LOCAL if address is None or is_loopback(address.host) else ControlMode.PLAIN
        return (ControlMode.CURVE if listening.public_key else local,)
    keys = config.control.curve.secret_key_file is not None
    found = (ControlMode.CURVE,) if keys else (ControlMode.LOCAL,)
    return tuple(dict.fromkeys((*found, ControlMode.LOCAL, ControlMode.PLAIN))) if config.insecure else found


def peer_settings(config: PrefillConfig | DecodeConfig) -> PeerSettings:
    """How messages to peers are sent, and how many connections there may be."""
    timeouts = config.timeouts
    each = LINK_DESCRIPTORS if isinstance(config, DecodeConfig) else 1
    return PeerSettings(
        max_connections=affordable(config.control.max_connections, "control.max_connections", each=each),
        handshake_s=HANDSHAKE_S,
        delivery=DeliverySettings(
            resend_first_s=timeouts.control_resend_s,
            resend_most_s=max(1.0, timeouts.control_resend_s),
            give_up_s=timeouts.control_delivery_s,
        ),
    )


def why_lost(timeouts: DaemonTimeouts, link: Link, *, connects: bool) -> str:
    """Why a peer counts as lost; an empty text while it does not. One that was not met yet does where nobody listens.

    A process that ends takes its connections with it, so one that is gone and does not come back says more than silence, which
    a slow network or a stopped process keeps as well. The side that `connects` sees at once that one is gone, and gives it a
    heartbeat to come back; a server notices by its next heartbeat, and looks again by the one after: hence the half.
    """
    if link.cut_s >= timeouts.control_heartbeat_s * (1 if connects else 0.5):
        what = "its connection is gone" if link.peer else "nobody listens there"
        return f"{what} since {link.cut_s:.1f} s (limit: timeouts.control_heartbeat_s)"
    if link.peer and link.silent_s > timeouts.peer_silence_s:
        return f"silent for {link.silent_s:.1f} s (limit: timeouts.peer_silence_s)"
    return ""

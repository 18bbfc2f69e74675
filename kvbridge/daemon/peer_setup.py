"""What a node's configuration says of its peers: keys, how patiently messages are sent, when one counts as lost."""

from __future__ import annotations

from kvbridge.api.directory import ControlMode
from kvbridge.config.endpoints import CurveConfig
from kvbridge.config.limits import DaemonTimeouts
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.gate import Gate
from kvbridge.control.keys import CurveKeys, load_keys, read_allowed
from kvbridge.control.link import Link, PeerSettings
from kvbridge.core.addresses import PeerAddress, is_loopback, parse_tcp
from kvbridge.core.wire.delivery import DeliverySettings
from kvbridge.processes import affordable

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


def gate_of(curve: CurveConfig, keys: CurveKeys | None) -> Gate:
    """Return the list of allowed keys of a running node. Raises ConfigError for a list that cannot be read."""
    return Gate(keys, curve.allowed_public_keys, curve.allowed_keys_file)


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

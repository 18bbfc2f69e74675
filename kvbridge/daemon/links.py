"""The links of a node to the nodes of the other role: the base of both kinds, and what the configuration says of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import structlog

from kvbridge.api.directory import ControlMode
from kvbridge.api.status import FenceStatus, PeerStatuses
from kvbridge.config.endpoints import CurveConfig
from kvbridge.config.schema import DecodeConfig, PrefillConfig
from kvbridge.control.keys import CurveKeys, Gate, load_keys, read_allowed
from kvbridge.control.link import Link, PeerSettings
from kvbridge.control.peers import PeerIdentity
from kvbridge.core.addresses import PeerAddress, is_loopback, parse_tcp
from kvbridge.core.errors import BridgeError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.delivery import DeliverySettings
from kvbridge.core.wire.messages import PeerMessage
from kvbridge.processes import affordable
from kvbridge.telemetry.facts import MessageUndelivered

if TYPE_CHECKING:
    from kvbridge.daemon.node import NodeDaemon

log = structlog.get_logger(__name__)

HANDSHAKE_S = 10.0
"""A connection between nodes on which nobody has proved an identity after this time is closed."""
LINK_DESCRIPTORS = 4
"""Descriptors that a client of ours takes: its connection, and what ZeroMQ keeps for its socket and its monitor."""


class Links(ABC):
    """The links of a node. Built anywhere, opened and used in one running loop."""

    def __init__(self, node: NodeDaemon) -> None:
        self._node = node
        self._events = node.events
        self._timeouts = node.config.timeouts
        self._gate = Gate(None, (), None)
        self.settings = PeerSettings()

    @property
    def epoch(self) -> int:
        """The epoch of the endpoints that rank workers give out."""
        return 0

    def open(self, identity: PeerIdentity) -> PeerAddress | None:
        """Open the links. Return the address for peers, None for a role that does not listen.

        Raises ConfigError for an unreadable list of keys or an unfit address, ConflictError for a taken address.
        """
        config, curve = self._node.config, self._node.config.control.curve
        self._gate = Gate(identity.keys, curve.allowed_public_keys, curve.allowed_keys_file)
        self.settings = PeerSettings(
            max_connections=affordable(
                config.control.max_connections,
                "control.max_connections",
                each=LINK_DESCRIPTORS if isinstance(config, DecodeConfig) else 1,
            ),
            handshake_s=HANDSHAKE_S,
            delivery=DeliverySettings(
                resend_first_s=self._timeouts.control_resend_s,
                resend_most_s=max(1.0, self._timeouts.control_resend_s),
                give_up_s=self._timeouts.control_delivery_s,
            ),
        )
        return None

    @abstractmethod
    async def close(self, timeout_s: float) -> None:
        """Let the last messages out and close the links. Harmless when closed."""

    @abstractmethod
    def watch(self) -> None:
        """Send heartbeats, and give up lost peers and those whose key is no longer allowed.

        Called every `timeouts.control_heartbeat_s`.
        """

    def tick(self) -> None:  # noqa: B027 - a prefill node has none
        """Check deadlines other than those of rooms."""

    @abstractmethod
    def status(self) -> PeerStatuses:
        """Return the known peers."""

    def fence(self) -> FenceStatus | None:
        """Return the fence against writers that gave no proof; None for a role that nobody writes to."""
        return None

    @abstractmethod
    def worker_ready(self, rank: Rank) -> None:
        """Tell those whom it concerns that a rank worker is ready."""

    @abstractmethod
    def worker_gone(self, rank: Rank, reason: str) -> None:
        """Fail what a rank worker that is gone had under way."""

    def names_of(self, key: str) -> frozenset[str]:
        """Return the instances that the holder of a key may speak for; empty: any."""
        return self._gate.names_of(key)

    def _undelivered(self, peer: str, message: PeerMessage, age_s: float) -> str:
        """Report a message that was never acknowledged, and return why its peer counts as lost."""
        self._events.emit(MessageUndelivered(peer=peer, message=message.type, age_s=age_s))
        return f"a {message.type} was not acknowledged for {age_s:.1f} s (limit: timeouts.control_delivery_s)"

    def _unreachable(self, peer: str, message: PeerMessage, error: BridgeError) -> None:
        log.warning("peer_unreachable", peer=peer, message=message.type, code=error.code, reason=str(error))

    def _why_lost(self, link: Link, *, connects: bool) -> str:
        """Return why a peer counts as lost; empty while it does not. A peer that was not met yet is lost when nobody listens.

        A process that ends takes its connections with it. A connection that does not come back therefore says more than silence,
        which a slow network or a stopped process causes as well. The side that `connects` sees a cut at once, and gives the peer
        one heartbeat to come back. A server notices a cut by its next heartbeat and checks by the one after: hence the half.
        """
        if link.cut_s >= self._timeouts.control_heartbeat_s * (1 if connects else 0.5):
            what = "its connection is gone" if link.peer else "nobody listens there"
            return f"{what} since {link.cut_s:.1f} s (limit: timeouts.control_heartbeat_s)"
        if link.peer and link.silent_s > self._timeouts.peer_silence_s:
            return f"silent for {link.silent_s:.1f} s (limit: timeouts.peer_silence_s)"
        return ""


def curve_keys(curve: CurveConfig) -> CurveKeys | None:
    """Read the keys of a node, if it has any. Raises ConfigError when a file cannot be read or holds no key."""
    if curve.secret_key_file is None:
        return None
    allowed = read_allowed(curve.allowed_public_keys, curve.allowed_keys_file)
    return load_keys(curve.secret_key_file, public=curve.public_key or "", allowed=allowed)


def control_modes(config: PrefillConfig | DecodeConfig, listening: PeerAddress | None) -> tuple[ControlMode, ...]:
    """Return how peers may meet a node: by its address and key if it listens, else by what it accepts of a node that listens."""
    if listening is not None:
        address = parse_tcp(listening.endpoint)
        local = ControlMode.LOCAL if address is None or is_loopback(address.host) else ControlMode.PLAIN
        return (ControlMode.CURVE if listening.public_key else local,)
    keys = config.control.curve.secret_key_file is not None
    found = (ControlMode.CURVE,) if keys else (ControlMode.LOCAL,)
    return tuple(dict.fromkeys((*found, ControlMode.LOCAL, ControlMode.PLAIN))) if config.insecure else found

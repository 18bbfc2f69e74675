"""A prefill node's control socket: decode nodes connect to it, and are heard, watched and given up here.

Owns: the socket, the list of allowed keys, heartbeats. Must not know: what a message means.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from kvbridge.config.schema import PrefillConfig
from kvbridge.control.keys import CurveKeys
from kvbridge.control.link import PeerCallbacks
from kvbridge.control.peers import PeerIdentity, PeerServer
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError
from kvbridge.core.wire.messages import Heartbeat, PeerMessage
from kvbridge.daemon.allowed import AllowedPeers
from kvbridge.daemon.peer_setup import peer_settings, why_lost
from kvbridge.telemetry.events import MessageUndelivered
from kvbridge.telemetry.stream import EventStream

log = structlog.get_logger(__name__)

TELL_HEARTBEATS = 2
"""After how many heartbeats decode nodes know of another key."""


@dataclass
class _Changing:
    """Keys that are to be taken, and how far that has come."""

    keys: CurveKeys
    told: Callable[[PeerAddress], None]
    heartbeats: int = 0


class DecodeListener(Protocol):
    """Who hears what decode nodes say, and what becomes of them."""

    def received(self, peer: str, message: PeerMessage) -> None:
        """A decode node says something."""

    def known(self, peer: str) -> bool:
        """Whether a decode node has been accepted."""

    def gone(self, peer: str, reason: str) -> None:
        """A decode node is lost, or begins anew: what was agreed with it is void. Harmless for one that is not known."""


class DecodeLinks:
    """The ways to the decode nodes of a prefill node. Built anywhere, opened and used in one running loop."""

    def __init__(self, config: PrefillConfig, events: EventStream) -> None:
        self._config = config
        self._events = events
        self._server: PeerServer | None = None
        self._allowed: AllowedPeers
        self._address = PeerAddress(endpoint="ipc:///")
        self._changing: _Changing | None = None
        self._listener: DecodeListener

    def serve(self, listener: DecodeListener) -> None:
        """Say who hears; before `open`."""
        self._listener = listener

    def open(self, identity: PeerIdentity) -> PeerAddress:
        """Listen, and return the address to tell others. Raises ConfigError, ConflictError for a taken address."""
        callbacks = PeerCallbacks(
            self._listener.received,
            on_undelivered=self._on_undelivered,
            on_refused=self._events.frame_refused,
            on_resent=self._events.messages_resent,
            # It may have given the pages of our rooms to others meanwhile.
            on_reset=lambda peer: self._listener.gone(peer, "it had given this node up, and begins anew"),
        )
        self._allowed = AllowedPeers(self._config.control.curve, identity.keys)
        control, keys = self._config.control, identity.keys
        self._server = PeerServer(identity, callbacks, control.bind, settings=peer_settings(self._config))
        endpoint = control.advertised(self._server.endpoint)
        self._address = PeerAddress(endpoint=endpoint, public_key=keys.public if keys else "")
        return self._address

    def change_keys(self, keys: CurveKeys, told: Callable[[PeerAddress], None]) -> None:
        """Listen with other keys in a few heartbeats, which tell decode nodes before, so that they come back at once.

        `told(address)` is called one heartbeat before, when all of them know: those that come new wait until we listen.
        """
        if self._server is None or keys.public == self._goes_on_with:
            return
        self._changing = _Changing(keys, told)
        self._server.gate.own |= {keys.public}
        self._heartbeat(self._server)

    @property
    def _goes_on_with(self) -> str:
        return self._changing.keys.public if self._changing else self._address.public_key

    def _heartbeat(self, server: PeerServer) -> None:
        for peer in server.peers:
            self.send(peer, Heartbeat(public_key=self._goes_on_with))

    def _change(self, server: PeerServer) -> None:
        """Do what a change of keys has come to by this heartbeat."""
        change = self._changing
        if change is None:
            return
        change.heartbeats += 1
        if change.heartbeats == TELL_HEARTBEATS:
            self._address = self._address.model_copy(update={"public_key": change.keys.public})
            change.told(self._address)
        elif change.heartbeats > TELL_HEARTBEATS:
            self._changing = None
            server.change_keys(change.keys)
            log.info("curve_key_changed", public_key=change.keys.public)

    def announces(self, peer: str, key: str) -> None:
        """A connected peer says that a key is its own too. Raises UnauthorizedError for one that is not allowed."""
        if self._server is not None:
            self._server.announces(peer, key)

    def names_of(self, key: str) -> frozenset[str]:
        """The instances that the holder of a key may speak for; empty: any."""
        return self._server.gate.names_of(key) if self._server is not None else frozenset()

    def key_of(self, peer: str) -> str:
        """The public key that a connected peer proved to own; empty without keys."""
        return self._server.link(peer).user if self._server is not None else ""

    def send(self, peer: str, message: PeerMessage) -> None:
        """Queue a message; what cannot be delivered in time is reported as the loss of the node. Never raises."""
        if self._server is None:
            return
        try:
            self._server.send(peer, message)
        except BridgeError as error:
            log.warning("peer_unreachable", peer=peer, message=message.type, code=error.code, reason=str(error))

    def watch(self) -> None:
        """Send heartbeats, look for silent decode nodes, and for those whose key is not accepted any more."""
        server = self._server
        if server is None:
            return
        if self._allowed.follow():
            server.gate.replace(self._allowed.current)
            for peer in server.barred():
                self._lose(peer, "its key was taken off the list of allowed keys (control.curve)")
        for peer in server.peers:
            lost = why_lost(self._config.timeouts, server.link(peer), connects=False)
            if lost:
                self._lose(peer, lost)
        self._heartbeat(server)
        self._change(server)

    async def close(self, timeout_s: float) -> None:
        """Let the last messages out and stop listening. Harmless when closed."""
        server, self._server = self._server, None
        if server is not None:
            await server.flush(timeout_s)
            server.close()

    def _on_undelivered(self, peer: str, message: PeerMessage, age_s: float) -> None:
        self._events.emit(MessageUndelivered(peer=peer, message=message.type, age_s=age_s))
        if self._listener.known(peer):
            # Its link is forgotten too: a node that is there after all is told so, and introduces itself again.
            why = f"a {message.type} was not acknowledged for {age_s:.1f} s (limit: timeouts.control_delivery_s)"
            self._lose(peer, why)

    def _lose(self, peer: str, reason: str) -> None:
        self._listener.gone(peer, reason)
        if self._server is not None:
            self._server.forget(peer)

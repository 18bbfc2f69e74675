"""The list of allowed keys of a running node: read at the start, and again whenever its file has changed."""

from __future__ import annotations

import structlog

from kvbridge.config.endpoints import CurveConfig
from kvbridge.control.keys import AllowedKeys, AllowList, CurveKeys
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, UnauthorizedError

log = structlog.get_logger(__name__)


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

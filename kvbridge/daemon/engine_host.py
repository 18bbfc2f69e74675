"""The socket that a node's engines come to.

Owns: it, and that an engine which does not read is reported and lost. Must not know: what engines ask for; the door does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import structlog

from kvbridge.control.addresses import ENGINE_SOCKET
from kvbridge.control.local import LocalCallbacks, LocalServer
from kvbridge.core.errors import BridgeError
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE
from kvbridge.core.wire.engine_messages import EngineToNode, NodeToEngine
from kvbridge.service.engine_door import EngineDoor

log = structlog.get_logger(__name__)


class EngineHost:
    """Between the engines of a node and its door."""

    def __init__(self, door: Callable[[], EngineDoor], *, on_refused: Callable[[str, str], None]) -> None:
        """`door()` is asked for with each message."""
        self._door = door
        self._on_refused = on_refused
        self._server: LocalServer[EngineToNode, NodeToEngine] | None = None

    def open(self, incarnation: str, runtime_dir: Path) -> None:
        """Listen for engines. Raises ConflictError when another daemon uses the runtime directory."""
        callbacks = LocalCallbacks(self._on_message, on_gone=self._on_gone, on_refused=self._on_refused)
        self._server = LocalServer(incarnation, ENGINE_TO_NODE, NODE_TO_ENGINE, callbacks)
        self._server.bind(runtime_dir / ENGINE_SOCKET)

    def send(self, engine: str, message: NodeToEngine) -> None:
        """Send to an attached engine; one that does not read is reported and lost."""
        if self._server is None:
            return
        try:
            self._server.send(engine, message)
        except BridgeError as error:
            log.warning("engine_unreachable", engine=engine, code=error.code, reason=str(error))

    def close(self) -> None:
        """Stop listening; harmless when closed."""
        if self._server is not None:
            self._server.close()

    def _on_message(self, engine: str, message: EngineToNode) -> None:
        self._door().handle(engine, message)

    def _on_gone(self, engine: str) -> None:
        self._door().gone(engine, "its process ended or closed the connection")

"""The socket that a node's engines come to.

Owns: it, that an engine which does not read is reported, and when the process of one that is gone has ended. Must not know:
what engines ask for; the door does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from kvbridge.control.addresses import ENGINE_SOCKET
from kvbridge.control.local import LocalCallbacks, LocalServer
from kvbridge.control.processes import PeerProcess
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE
from kvbridge.core.wire.engine_messages import Answer, EngineToNode, NodeToEngine, Refused
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.node.engine_api import EngineApi

log = structlog.get_logger(__name__)


class EngineHost:
    """Between the engines of a node and its door."""

    def __init__(
        self, door: Callable[[], EngineApi[Any]], *, settle_s: float, on_refused: Callable[[str, str], None]
    ) -> None:
        """`door()` is asked for with each message; `settle_s` is `timeouts.engine_settle_s`."""
        self._door = door
        self._settle_s = settle_s
        self._on_refused = on_refused
        self._server: LocalServer[EngineToNode, NodeToEngine] | None = None

    def open(self, incarnation: str, runtime_dir: Path) -> None:
        """Listen for engines. Raises ConflictError when another daemon uses the runtime directory."""
        callbacks = LocalCallbacks(self._on_message, on_gone=self._on_gone, on_refused=self._on_refused)
        self._server = LocalServer(incarnation, ENGINE_TO_NODE, NODE_TO_ENGINE, callbacks)
        self._server.bind(runtime_dir / ENGINE_SOCKET)

    def send(self, engine: str, message: NodeToEngine) -> None:
        """Send to an attached engine; one that does not read is reported."""
        if self._server is None:
            return
        try:
            self._server.send(engine, message)
        except BridgeError as error:
            log.warning("engine_unreachable", engine=engine, code=error.code, reason=str(error))
            if isinstance(error, InvalidInputError) and isinstance(message, Answer):  # it does not fit into a frame
                self.send(engine, Refused(call=message.call, code=error.code, message=str(error)[:REASON_CHARS]))

    def close(self) -> None:
        """Stop listening; harmless when closed."""
        if self._server is not None:
            self._server.close()

    def _on_message(self, engine: str, message: EngineToNode) -> None:
        self._door().handle(engine, message)

    def pid(self, engine: str) -> int:
        """Return the process id of an engine as the kernel tells it, 0 for one of another pid namespace."""
        return self._server.process(engine).pid if self._server is not None else 0

    def _on_gone(self, engine: str, process: PeerProcess) -> None:
        if self._door().gone(engine, "its connection has ended", followed=process.followed):
            process.when_ended(lambda: self._on_ended(engine))

    def _on_ended(self, engine: str) -> None:
        asyncio.get_running_loop().call_later(self._settle_s, lambda: self._door().ended(engine))

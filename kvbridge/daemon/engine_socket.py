"""The socket that a node's engines come to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from kvbridge.control.local import LocalCallbacks, LocalServer
from kvbridge.control.processes import PeerProcess
from kvbridge.control.runtime_directory import ENGINE_SOCKET
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE
from kvbridge.core.wire.engine_messages import Answer, EngineToNode, NodeToEngine, Refused
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.node.engines import Engines
from kvbridge.telemetry.stream import EventStream

log = structlog.get_logger(__name__)


class EngineSocket:
    """Between the engine processes of a node and `Engines`. Built anywhere, opened and used in one running loop."""

    def __init__(self, settle_s: float, events: EventStream) -> None:
        """`settle_s` is `timeouts.engine_settle_s`."""
        self._settle_s = settle_s
        self._events = events
        self._server: LocalServer[EngineToNode, NodeToEngine] | None = None
        self._engines: Engines

    def open(self, incarnation: str, runtime_dir: Path, engines: Engines) -> None:
        """Listen for engines, whose calls `engines` answers. Raises ConflictError when another daemon uses the directory."""
        self._engines = engines
        callbacks = LocalCallbacks(engines.handle, on_gone=self._on_gone, on_refused=self._events.frame_refused)
        path = runtime_dir / ENGINE_SOCKET
        self._server = LocalServer(incarnation, path, ENGINE_TO_NODE, NODE_TO_ENGINE, callbacks, to_group=True)

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

    def pid(self, engine: str) -> int:
        """Return the process id of an engine as the kernel tells it, 0 for one of another pid namespace."""
        return self._server.process(engine).pid if self._server is not None else 0

    def close(self) -> None:
        """Stop listening; harmless when closed."""
        if self._server is not None:
            self._server.close()

    def _on_gone(self, engine: str, process: PeerProcess) -> None:
        if self._engines.gone(engine, "its connection has ended", followed=process.followed):
            process.when_ended(lambda: self._on_ended(engine))

    def _on_ended(self, engine: str) -> None:
        asyncio.get_running_loop().call_later(self._settle_s, self._engines.ended, engine)

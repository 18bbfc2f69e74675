"""Places for the engines of a random load, which are killed and lose their daemons at any time."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from kvbridge.cli.local_cluster import DaemonProcess
from kvbridge.core.errors import DetachedError, PeerError
from kvbridge.core.ids import Role
from tests.helpers.obedient_engines import ObedientEngine

ENGINE_CALL_S = 60.0
"""Longest call of an engine, which may be stopped, as may its daemon."""


class Seat:
    """The place of one node's engine: filled when a room needs it, and anew once the engine or its daemon is gone."""

    def __init__(self, role: Role, node: DaemonProcess, violation: Callable[[str], None]) -> None:
        self._role, self._node, self._violation = role, node, violation
        self._lock = threading.Lock()
        self._engine: ObedientEngine | None = None
        self._struck: ObedientEngine | None = None

    def taken(self) -> Callable[..., Any]:
        """Return what carries out verbs for one room; it raises DetachedError once the engine that is there now is gone."""
        with self._lock:
            if self._engine is None:
                self._engine = ObedientEngine(self._role, self._node.runtime_dir)
            return partial(self._call, self._engine)

    def _call(self, engine: ObedientEngine, verb: str, *arguments: Any) -> Any:
        with self._lock:
            if self._engine is not engine:
                raise DetachedError(f"the engine of {self._node.name} is another by now")
            try:
                return engine.call(verb, *arguments, timeout_s=ENGINE_CALL_S)
            except (EOFError, OSError, DetachedError, PeerError) as error:
                if isinstance(error, EOFError | OSError) and engine is not self._struck:
                    self._violation(f"the engine of {self._node.name} has ended by itself")
                self._engine = None
                engine.close()
                raise DetachedError(f"the engine of {self._node.name} is gone") from error

    @property
    def pid(self) -> int | None:
        with self._lock:
            return self._engine.pid if self._engine is not None else None

    def kill(self) -> None:
        """kill -9, in the middle of a call as it may be."""
        self._struck = self._engine
        if self._struck is not None:
            with suppress(ValueError, ProcessLookupError):  # it has just been closed
                self._struck.signal(signal.SIGKILL)

    def close(self) -> None:
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None

"""An attachment to the node beside vLLM that is made again whenever the node has ended and come back.

Owns: the thread that attaches, so that whoever uses the attachment never waits. Must not know: rooms, vLLM.

A process of vLLM that holds blocks must know each end of the node: another incarnation knows nothing of the rooms of this one. So
an attachment that has ended is given up by whoever uses it, at its next look, and only then is the next one made.
"""

from __future__ import annotations

import threading
from pathlib import Path

import structlog

from kvbridge.core.errors import (
    BridgeError,
    ConfigError,
    DeadlineError,
    DetachedError,
    InvalidInputError,
    NotReadyError,
    PeerError,
    code_of,
)
from kvbridge.core.ids import Role, Tables
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.prefill import PrefillEngine

log = structlog.get_logger(__name__)

PAUSE_S, LONG_PAUSE_S = 0.05, 2.0
"""Between two attempts to attach: while a node starts up, which the attempt itself asks again and again, and while somebody has to
change something."""
ATTEMPT_S = 5.0
CLOSE_S = 2 * ATTEMPT_S


class NodeAttachment:
    """One process of vLLM at its node of one role, serving no rank. Implements `requests.RoomCalls`; for one thread."""

    def __init__(self, role: Role, runtime_dir: Path) -> None:
        """Begin to attach."""
        self._role = role
        self._runtime_dir = runtime_dir
        self._engine: PrefillEngine | DecodeEngine | None = None
        self._closing = False
        self._changed = threading.Condition()
        """Notified when there is an engine, when there is none any more, and by `close`."""
        self._why_not = "it was not asked yet"
        self._thread = threading.Thread(target=self._keep, name=f"kvbridge-{role}-attach", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ the thread

    def _keep(self) -> None:
        while not self._closing:
            engine = self._attach()
            if engine is None:
                continue
            with self._changed:
                self._engine = engine
                self._changed.notify_all()
                while not self._closing and self._engine is engine:
                    self._changed.wait()
                self._engine = None
            try:
                engine.close()
            except Exception as error:  # noqa: BLE001 - the next attachment does not depend on it
                reason = str(error) or type(error).__name__
                log.warning("not_detached", node_role=self._role.value, code=code_of(error), reason=reason)

    def _attach(self) -> PrefillEngine | DecodeEngine | None:
        kind = PrefillEngine if self._role is Role.PREFILL else DecodeEngine
        try:
            return kind.adopt(self._runtime_dir, {}, call_timeout_s=ATTEMPT_S, on_progress=None)
        except Exception as error:  # noqa: BLE001 - without this thread the node would never be attached to again
            why_not = str(error) or type(error).__name__
            by_itself = isinstance(error, BridgeError) and not isinstance(error, ConfigError)
            if not by_itself and why_not != self._why_not:
                log.error("not_attached", node_role=self._role.value, code=code_of(error), reason=why_not)
            self._why_not = why_not
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=PAUSE_S if by_itself else LONG_PAUSE_S)
        return None

    # ------------------------------------------------------------------ its user

    def wait(self, timeout_s: float) -> None:
        """Wait until it is attached. Raises DeadlineError with the reason."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._engine is not None, timeout_s):
                raise DeadlineError(
                    f"the {self._role} node in {self._runtime_dir} serves no rooms after {timeout_s:g} s: {self._why_not}"
                )

    @property
    def node(self) -> str:
        """The incarnation of the node that it is attached to; empty while there is none."""
        engine = self._engine
        return engine.incarnation if engine is not None else ""

    def events(self) -> list[RoomEvent]:
        """Return what the node has said since the last call. Once it is gone, `node` says so."""
        engine = self._engine
        if engine is None:
            return []
        try:
            return engine.events(0.0)
        except Exception as error:  # noqa: BLE001 - another attachment begins from what the node says then
            self._lose(error)
            return []

    def hold(self, room: int, **said: object) -> None:
        """See PrefillEngine."""
        self._say("hold", room, **said)

    def publish(self, room: int, upto_token: int, *, tables: Tables) -> None:
        """See PrefillEngine."""
        self._say("publish", room, upto_token, tables=tables)

    def finish(self, room: int) -> None:
        """See PrefillEngine."""
        self._say("finish", room)

    def fetch(self, room: int, **said: object) -> None:
        """See DecodeEngine."""
        self._say("fetch", room, **said)

    def provide(self, room: int, tables: Tables, *, prefix_tokens: int) -> None:
        """See DecodeEngine."""
        self._say("provide", room, tables, prefix_tokens=prefix_tokens)

    def abort(self, room: int, reason: str, *, again: bool = False) -> None:
        """See Engine."""
        self._say("abort", room, reason, again=again)

    def _say(self, verb: str, *args: object, **said: object) -> None:
        """Post a call.

        Raises NotReadyError while there is no node, or it does not read; PeerError when it has just gone; InvalidInputError when no
        message can say it, of whatever kind the library's own error is.
        """
        engine = self._engine
        if engine is None:
            raise NotReadyError(f"the {self._role} node of this vLLM is not there: {self._why_not}")
        try:
            getattr(engine, verb)(*args, **said)
        except (PeerError, DetachedError) as error:
            self._lose(error)
            raise
        except BridgeError:
            raise
        except Exception as error:  # a value that the message does not take
            log.error("not_said", node_role=self._role.value, call=verb, room=args[0], exc_info=error)
            raise InvalidInputError(f"'{verb}' of room {args[0]} cannot be said: {error}") from error

    def _lose(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        log.warning("node_lost", node_role=self._role.value, code=code_of(error), reason=reason)
        with self._changed:
            self._engine = None
            self._changed.notify_all()

    def close(self) -> None:
        """Leave the node."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)

"""A process's attachment to the node beside its engine. A thread renews it whenever the node has ended and come back."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from kvbridge.core.errors import (
    BridgeError,
    ConfigError,
    DeadlineError,
    InvalidInputError,
    NotReadyError,
    PeerError,
    code_of,
)
from kvbridge.core.ids import Rank, Role, Tables
from kvbridge.core.wire.engine_messages import AbortRoom, RoomEvent
from kvbridge.core.wire.messages import REASON_CHARS, to_wire
from kvbridge.engine.base import Engine
from kvbridge.engine.decode import DecodeEngine
from kvbridge.engine.link import RoomCall
from kvbridge.engine.prefill import PrefillEngine

log = structlog.get_logger(__name__)

PAUSE_S, LONG_PAUSE_S = 0.05, 2.0
"""Pauses between two attempts to attach: while a node starts up, and while a person has to change something."""
ATTEMPT_S = 5.0
ENGINES: dict[Role, type[Engine]] = {Role.PREFILL: PrefillEngine, Role.DECODE: DecodeEngine}


class _Unsent(NamedTuple):
    """A call that the node has not read."""

    kind: type[RoomCall]
    room: int
    tables: Tables | None
    fields: dict[str, Any]


class NodeAttachment:
    """One process of an engine at its node of one role, without any memory. For one thread, which never waits.

    Another incarnation of the node knows nothing of the rooms of this one. Therefore the thread attaches again only when the user
    has given up the attachment before, and the user takes up the next one only in `events`. Calls that the node does not read are
    kept in their order, sent when it reads again, and lost with the node.
    """

    def __init__(self, role: Role, runtime_dir: Path, ranks: Sequence[Rank] = ()) -> None:
        """`ranks`: those for which the calls are; empty for all ranks of the node."""
        self._role, self._ranks = role, ranks
        self._runtime_dir = runtime_dir
        self._made: Engine | None = None
        """The thread's latest attachment; None once the user has given it up."""
        self._used: Engine | None = None
        """The attachment that the user has taken up."""
        self._lost_unseen = False
        """Lost in `say`: the next `events` shows that there was no node, even if the thread has attached again."""
        self._unsent: deque[_Unsent] = deque()
        self._unsayable: list[RoomEvent] = []
        """Refusals of calls that no message can express."""
        self._closing = False
        self._changed = threading.Condition()
        self._why_not = "it was not asked yet"
        self._thread = threading.Thread(target=self._keep, name=f"kvbridge-{role}-attach", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def _keep(self) -> None:
        while not self._closing:
            made = self._attach()
            if made is None:
                continue
            with self._changed:
                self._made = made
                self._changed.notify_all()
                while not self._closing and self._made is made:
                    self._changed.wait()
                self._made = None
            try:
                made.close()
            except Exception as error:  # noqa: BLE001 - the next attachment does not depend on it
                reason = str(error) or type(error).__name__
                log.warning("not_detached", node_role=self._role.value, code=code_of(error), reason=reason)

    def _attach(self) -> Engine | None:
        try:
            return ENGINES[self._role].adopt(
                self._runtime_dir, {}, ranks=self._ranks, call_timeout_s=ATTEMPT_S, on_progress=None
            )
        except Exception as error:  # noqa: BLE001 - without this thread the node would never be attached to again
            why_not = str(error) or type(error).__name__
            by_itself = isinstance(error, BridgeError) and not isinstance(error, ConfigError)
            if not by_itself and why_not != self._why_not:
                log.error("not_attached", node_role=self._role.value, code=code_of(error), reason=why_not)
            self._why_not = why_not
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=PAUSE_S if by_itself else LONG_PAUSE_S)
        return None

    def wait(self, timeout_s: float) -> None:
        """Wait until the thread has attached. Raises DeadlineError with the reason."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._made is not None, timeout_s):
                raise DeadlineError(
                    f"the {self._role} node in {self._runtime_dir} serves no rooms after {timeout_s:g} s: {self._why_not}"
                )

    @property
    def node(self) -> str:
        """Incarnation of the node that gets the calls; empty while there is none."""
        return self._used.incarnation if self._used is not None else ""

    def events(self) -> list[RoomEvent]:
        """Return the node's events since the last call, and send calls that it did not read. Afterwards `node` is up to date."""
        lost, self._lost_unseen = self._lost_unseen, False
        used = self._used = None if lost else self._made
        if used is None:
            return []
        try:
            events = used.events()
        except Exception as error:  # noqa: BLE001 - another attachment begins from what the node says then
            self._lose(error)
            self._lost_unseen = False
            return []
        self._send()
        unsayable, self._unsayable = self._unsayable, []
        return events + unsayable

    def say(self, kind: type[RoomCall], room: int, *, tables: Tables | None = None, **fields: Any) -> bool:
        """Send a call, now or when the node reads. Return False when there is no node. Any refusal is an event."""
        if self._used is None:
            return False
        self._unsent.append(_Unsent(kind, room, tables, fields))
        if len(self._unsent) == 1:
            self._send()
        return self._used is not None

    def _send(self) -> None:
        while self._unsent and self._used is not None:
            call = self._unsent[0]
            try:
                tables = {} if call.tables is None else {"tables": to_wire(call.tables)}
                self._used.say(call.kind, call.room, **tables, **call.fields)
            except NotReadyError:
                return
            except PeerError as error:
                self._lose(error)
                return
            except Exception as error:  # noqa: BLE001 - a value that the message does not take, and never will
                self._refuse(call, error)
            self._unsent.popleft()

    def _refuse(self, call: _Unsent, error: Exception) -> None:
        log.error("not_said", node_role=self._role.value, call=call.kind.__name__, room=call.room, exc_info=error)
        if call.kind is not AbortRoom:
            why = {"code": InvalidInputError.code, "reason": f"it cannot be said: {error}"[:REASON_CHARS]}
            generation = call.fields.get("generation", 0)
            self._unsayable.append(RoomEvent(room=call.room, generation=generation, kind="refused", **why))

    def _lose(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        log.warning("node_lost", node_role=self._role.value, code=code_of(error), reason=reason)
        self.leave()

    def leave(self) -> None:
        """Give up the attachment, and with it the rooms. The thread attaches again when all ranks of the node are served."""
        self._unsent.clear()
        self._unsayable.clear()
        self._lost_unseen = True
        with self._changed:
            self._used = self._made = None
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(2 * ATTEMPT_S)

"""The API of engines: calls are carried out on the node's rooms and answered.

The rooms of an engine fail when its connection ends. Its pages come back when it has said that it is through with them (Detach), or
when its process has ended: while a process is being killed its connection ends first, and its GPU writes on for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from kvbridge.core.errors import BridgeError, CapacityError, DetachedError, InvalidInputError, NotReadyError
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import (
    AbortRoom,
    Accepted,
    Admit,
    Attach,
    Attached,
    Call,
    Detach,
    EngineToNode,
    Fetch,
    Finish,
    Hold,
    NodeToEngine,
    Refused,
    Release,
)
from kvbridge.core.wire.features import agree
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engine_admission import EngineAdmission
from kvbridge.node.engines import AttachedEngine, AttachedEngines
from kvbridge.node.rooms import EngineCalls, Rooms

log = structlog.get_logger(__name__)

_LETTING_GO = Finish | Release | AbortRoom


class EngineApi:
    """What engines of a node may call. Called from the event loop's thread only."""

    def __init__(
        self,
        rooms: Rooms[Any],
        admission: AdmissionController,
        engines: AttachedEngines,
        *,
        pid: Callable[[str], int],
        attached: Callable[[int, tuple[Rank, ...]], Attached],
    ) -> None:
        """`pid(engine)` is the kernel's word, 0 for a process of another pid namespace.

        `attached(call, ranks)` answers an attach; it raises NotReadyError while there is no memory to attach to.
        """
        self._rooms = rooms
        self._role = rooms.book.role
        itself = EngineAdmission(rooms, admission)
        own: EngineCalls = {Fetch: itself.fetch}
        if self._role is Role.PREFILL:
            own = {Admit: itself.admit, Hold: itself.hold}
        self._calls = {**rooms.calls, **own}
        self._admission = admission
        self._engines = engines
        self._pid = pid
        self._answer_attach = attached

    def handle(self, engine: str, message: EngineToNode) -> None:
        """Carry out one call and answer it. Every error becomes a Refused answer: no engine waits in vain."""
        if not isinstance(message, Call):
            return
        try:
            answer = self._answer(engine, message)
        except CapacityError as error:
            answer = _refused(message, error, retry_after_s=self._admission.retry_after_s(error))
        except BridgeError as error:
            answer = _refused(message, error)
        except Exception as error:
            kind = type(message).__name__
            log.exception("engine_call_failed", engine=engine, call=kind, room=getattr(message, "room", None))
            reason = f"'{kind}' failed, please report it (the node's log has more): {type(error).__name__}: {error}"
            answer = _refused(message, BridgeError(reason))
        self._engines.send(engine, answer)
        if isinstance(answer, Attached):
            for event in self._rooms.engines.open_events():
                self._engines.send(engine, event)

    def _answer(self, engine: str, message: Call) -> NodeToEngine:
        match message:
            case Attach():
                return self._attach(engine, message)
            case Detach():
                return self._detach(engine, message)
        known = self._attached(engine, message)
        carry_out = self._calls.get(type(message))
        if carry_out is None:
            raise InvalidInputError(f"a {self._role} daemon does not know the call '{type(message).__name__}'")
        return carry_out(known, message) or Accepted(call=message.call)

    def gone(self, engine: str, reason: str, *, followed: bool) -> bool:
        """An engine's connection has ended. Returns whether pages wait for `ended`; `followed`: whether that will come."""
        left = self._engines.lose(engine)
        if left is None:
            return False
        waits = self._rooms.engines.gone(engine, reason, followed=followed)
        self._engines.await_end(left, reason, pages_wait=waits, followed=followed)
        return waits

    def ended(self, engine: str) -> None:
        """The process of an engine that is gone has ended, and what its GPUs may have had to do."""
        if self._engines.ended(engine):
            self._rooms.engines.ended(engine)

    def _detach(self, engine: str, message: Detach) -> Accepted:
        """An engine leaves and does not use any page any more: what it has not ended fails, and nothing waits for it."""
        self._engines.detach(engine)
        self._rooms.engines.gone(engine, "it has left")
        self._rooms.engines.ended(engine)
        return Accepted(call=message.call)

    def _attach(self, engine: str, message: Attach) -> Attached:
        if message.role is not self._role:
            raise InvalidInputError(f"this is a {self._role} daemon; a {message.role} engine cannot attach to it")
        ranks = self._engines.ranks_of_node(engine, message.ranks)
        requests = self._rooms.requests
        if not message.ranks and requests.pages.settings.adopted and (missing := requests.missing()):
            raise NotReadyError(f"this engine serves no rank, so there is nothing that it could do yet: {missing}")
        answer = self._answer_attach(message.call, ranks)
        agree(answer.features, message.features, us="this node", them="the engine")
        self._engines.attach(AttachedEngine(engine, self._pid(engine), ranks))
        return answer

    def _attached(self, engine: str, message: Call) -> AttachedEngine:
        """Return who calls. Raises DetachedError when its memory is gone and the call needs it."""
        known = self._engines.get(engine)
        if known.lost and not isinstance(message, _LETTING_GO):
            raise DetachedError(
                f"the device memory of this engine is gone ({known.lost}); release or abort its rooms, close it and attach again"
            )
        return known


def _refused(call: Call, error: BridgeError, *, retry_after_s: float = 0.0) -> Refused:
    return Refused(call=call.call, code=error.code, message=str(error)[:REASON_CHARS], retry_after_s=retry_after_s)

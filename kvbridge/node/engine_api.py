"""The API of engines: calls are carried out on the node's rooms and answered.

Owns: the verbs of each role. Must not know: sockets, who else is attached (`engines`), the tables of either side.

The rooms of an engine fail when its connection ends. Its pages come back when it has said that it is through with them (Detach), or
when its process has ended: while a process is being killed its connection ends first, and its GPU writes on for a while.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import BridgeError, CapacityError, DetachedError, InvalidInputError
from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import (
    AbortRoom,
    Accepted,
    Admit,
    Attach,
    Attached,
    Begin,
    Call,
    Claim,
    Detach,
    EngineToNode,
    Extend,
    Finish,
    NodeToEngine,
    Pages,
    Provide,
    Publish,
    Refused,
    Release,
    RoomEvent,
)
from kvbridge.core.wire.features import ENGINE_FEATURES, agree
from kvbridge.core.wire.messages import REASON_CHARS, to_wire
from kvbridge.node.admission.controller import AdmissionController
from kvbridge.node.engines import AttachedEngine, AttachedEngines
from kvbridge.node.receiver.service import ReceiverRooms
from kvbridge.node.room import Room
from kvbridge.node.rooms import Rooms
from kvbridge.node.sender.service import SenderRooms

_LETTING_GO = Finish | Release | AbortRoom


RoomsT = TypeVar("RoomsT", bound=Rooms[Any])


class EngineApi(ABC, Generic[RoomsT]):
    """The calls that both roles share. Called from the event loop's thread only."""

    role: Role

    def __init__(
        self,
        rooms: RoomsT,
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
        self._admission = admission
        self._engines = engines
        self._pid = pid
        self._answer_attach = attached

    def handle(self, engine: str, message: EngineToNode) -> None:
        """Carry out one call and answer it. Errors become a Refused answer; nothing escapes to the loop."""
        if not isinstance(message, Call):
            return
        try:
            answer = self._answer(engine, message)
        except CapacityError as error:
            answer = _refused(message, error, retry_after_s=self._admission.retry_after_s(error))
        except BridgeError as error:
            answer = _refused(message, error)
        self._engines.send(engine, answer)
        if isinstance(answer, Attached):
            for event in self._open_events():
                self._engines.send(engine, event)

    def _answer(self, engine: str, message: Call) -> NodeToEngine:
        match message:
            case Attach():
                return self._attach(engine, message)
            case Detach():
                return self._detach(engine, message)
        return self._call(self._attached(engine, message), message)

    def gone(self, engine: str, reason: str, *, followed: bool) -> bool:
        """An engine's connection has ended. Returns whether pages wait for `ended`; `followed`: whether that will come."""
        left = self._engines.lose(engine)
        if left is None:
            return False
        waits = self._rooms.engine_gone(engine, reason, followed=followed)
        self._engines.await_end(left, reason, pages_wait=waits, followed=followed)
        return waits

    def ended(self, engine: str) -> None:
        """The process of an engine that is gone has ended, and what its GPUs may have had to do."""
        if self._engines.ended(engine):
            self._rooms.engine_ended(engine)

    def _detach(self, engine: str, message: Detach) -> Accepted:
        """An engine leaves and does not use any page any more: what it has not ended fails, and nothing waits for it."""
        self._engines.detach(engine)
        self._rooms.engine_gone(engine, "it has left")
        self._rooms.engine_ended(engine)
        return Accepted(call=message.call)

    def _attach(self, engine: str, message: Attach) -> Attached:
        if message.role is not self.role:
            raise InvalidInputError(f"this is a {self.role} daemon; a {message.role} engine cannot attach to it")
        agree(ENGINE_FEATURES, message.features, us="this node", them="the engine")
        ranks = self._engines.ranks_of_node(engine, message.ranks)
        answer = self._answer_attach(message.call, ranks)
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

    @abstractmethod
    def _call(self, engine: AttachedEngine, message: Call) -> NodeToEngine:
        """Carry out a call of the role."""

    def _open_events(self) -> list[RoomEvent]:
        """What an engine that attaches now would have been told, had it been there before."""
        return []


class PrefillEngineApi(EngineApi[SenderRooms]):
    """The verbs admit, begin, publish, finish, release and abort."""

    role = Role.PREFILL

    def _call(self, engine: AttachedEngine, message: Call) -> NodeToEngine:
        rooms = self._rooms
        match message:
            case Admit():
                asked = message.model_dump(include={"room", "generation", "prompt_tokens", "max_new_tokens"})
                self._admission.admit_now(AdmissionRequest(**asked, client="engine"))
            case Begin():
                room = rooms.begin(
                    engine.name,
                    engine.ranks,
                    message.room,
                    prompt_tokens=message.prompt_tokens,
                    tables=tables_from_wire(message.tables),
                    by_gpu=message.by_gpu,
                )
                return _pages(message.call, room)
            case Publish():
                rooms.publish(
                    engine.name,
                    engine.ranks,
                    message.room,
                    upto_token=message.upto_token,
                    layers=message.layers,
                    after=message.after,
                )
            case Finish():
                rooms.finish(engine.name, engine.ranks, message.room, metadata=message.metadata, by_gpu=message.by_gpu)
            case Release():
                rooms.release(engine.name, message.room, message.generation)
            case AbortRoom():
                rooms.abort(engine.name, message.room, message.reason)
            case _:
                raise InvalidInputError(f"a prefill daemon does not know the call '{type(message).__name__}'")
        return Accepted(call=message.call)


class DecodeEngineApi(EngineApi[ReceiverRooms]):
    """The verbs claim, extend, release and abort, and provide for adopted pools."""

    role = Role.DECODE

    def _call(self, engine: AttachedEngine, message: Call) -> NodeToEngine:
        rooms = self._rooms
        match message:
            case Provide():
                tables = tables_from_wire(message.tables)
                rooms.provide(message.room, tables, prefix_tokens=message.prefix_tokens)
            case Claim():
                room = rooms.claim(engine.name, message.room)
                answer = _pages(message.call, room)
                return answer.model_copy(
                    update={"metadata": room.metadata, "amounts": room.amounts, "phases_s": room.phases_s}
                )
            case Extend():
                rooms.extend(engine.name, message.room, message.tokens)
                return _pages(message.call, rooms.held(engine.name, message.room))
            case Release():
                rooms.release(engine.name, message.room, message.sparse)
            case AbortRoom():
                rooms.abort(engine.name, message.room, message.reason)
            case _:
                raise InvalidInputError(f"a decode daemon does not know the call '{type(message).__name__}'")
        return Accepted(call=message.call)

    def _open_events(self) -> list[RoomEvent]:
        return self._rooms.open_events()


def _refused(call: Call, error: BridgeError, *, retry_after_s: float = 0.0) -> Refused:
    return Refused(call=call.call, code=error.code, message=str(error)[:REASON_CHARS], retry_after_s=retry_after_s)


def _pages(call: int, room: Room) -> Pages:  # type: ignore[type-arg]
    return Pages(
        call=call,
        room=room.room,
        generation=room.generation,
        prompt_tokens=room.prompt_tokens,
        prefix_tokens=room.prefix_tokens,
        tables=to_wire(room.tables),
    )

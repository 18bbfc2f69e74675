"""The API of engines: calls are carried out on the node's rooms and answered, events are pushed.

Owns: which engine processes are attached and for which ranks. Must not know: sockets (it is handed messages and a way
to send them), the tables of either side.

An engine that dies is noticed through its connection, not through silence: a synchronous engine may compute for
minutes without a word. Its rooms fail then. Its pages come back when it has said that it is through with them (Detach), or
when its process has ended: while a process is being killed its connection ends first, and its GPU writes on for a while.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.core.errors import BridgeError, CapacityError, ConflictError, DetachedError, InvalidInputError
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
    Detached,
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
from kvbridge.node.receiver.service import ReceiverRooms
from kvbridge.node.room import Room
from kvbridge.node.rooms import Rooms
from kvbridge.node.sender.service import SenderRooms
from kvbridge.telemetry.events import EngineAttached, EngineEnded, EngineLeft, EngineLost, EventStream

_LETTING_GO = Finish | Release | AbortRoom


@dataclass
class AttachedEngine:
    """One engine process."""

    name: str
    pid: int
    ranks: tuple[Rank, ...]
    lost: str = ""
    """Why memory that it is attached to is gone: it may only let go of what it has."""
    gone: str = ""
    """Why it is not attached any more, while pages wait for the end of its process."""


RoomsT = TypeVar("RoomsT", bound=Rooms)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePorts:
    """What the API needs of its surroundings."""

    send: Callable[[str, NodeToEngine], None]
    """`send(engine, message)`. Never raises."""
    pid: Callable[[str], int]
    """`pid(engine)`: the kernel's word, 0 for a process of another pid namespace."""
    describe: Callable[[int, tuple[Rank, ...]], Attached]
    """`describe(call, ranks)` answers an attach. Raises NotReadyError."""
    ranks: tuple[Rank, ...]
    """Those of the node."""
    events: EventStream


class EngineApi(ABC, Generic[RoomsT]):
    """Attached engines and the calls that both roles share. Called from the event loop's thread only."""

    role: Role

    def __init__(
        self, rooms: Callable[[], RoomsT], admission: Callable[[], AdmissionController], ports: EnginePorts
    ) -> None:
        """`rooms` and `admission` are asked at each call: they are built after what tells engines of rooms."""
        self._rooms = rooms
        self._admission = admission
        self._ports = ports
        self._send = ports.send
        self._engines: dict[str, AttachedEngine] = {}
        self._departed: dict[str, AttachedEngine] = {}
        """Engines whose connection has ended, and for the end of whose process pages wait."""

    def push(self, event: RoomEvent) -> None:
        """Tell every attached engine."""
        for name in self._engines:
            self._send(name, event)

    def serving(self) -> frozenset[str]:
        """Names of the engines attached now."""
        return frozenset(self._engines)

    def engines(self) -> list[AttachedEngine]:
        """Everything attached, and what is gone and not ended, for `/status`."""
        return [*self._engines.values(), *self._departed.values()]

    def handle(self, engine: str, message: EngineToNode) -> None:
        """Carry out one call and answer it. Errors become a Refused answer; nothing escapes to the loop."""
        if not isinstance(message, Call):
            return
        try:
            answer = self._answer(engine, message)
        except CapacityError as error:
            answer = _refused(message, error, retry_after_s=self._retry_after_s(message, error))
        except BridgeError as error:
            answer = _refused(message, error)
        self._send(engine, answer)
        if isinstance(answer, Attached):
            for event in self._open_events():
                self._send(engine, event)

    def _answer(self, engine: str, message: Call) -> NodeToEngine:
        match message:
            case Attach():
                return self._attach(engine, message)
            case Detach():
                return self._detach(engine, message)
        return self._call(self._attached(engine, message), message)

    def _retry_after_s(self, message: Call, error: CapacityError) -> float:
        """An attach is refused before admission is asked; admission has put its own estimate into what it refused."""
        return error.retry_after_s if isinstance(message, Attach | Admit) else self._admission().retry_after_s(error)

    def gone(self, engine: str, reason: str, *, followed: bool) -> bool:
        """An engine's connection has ended. Returns whether pages wait for `ended`; `followed`: whether that will come."""
        left = self._engines.pop(engine, None)
        if left is None:
            return False
        waits = self._rooms().engine_gone(engine, reason, followed=followed)
        self._ports.events.emit(EngineLost(engine=engine, reason=reason, pages_wait=waits))
        if waits:
            end = "has not ended" if followed else "cannot be followed (another pid namespace)"
            left.gone = f"{reason}; its process {end}"
            self._departed[engine] = left
        return waits

    def ended(self, engine: str) -> None:
        """The process of an engine that is gone has ended, and what its GPUs may have had to do."""
        if self._departed.pop(engine, None) is not None:
            self._ports.events.emit(EngineEnded(engine=engine))
            self._rooms().engine_ended(engine)

    def _detach(self, engine: str, message: Detach) -> Accepted:
        """An engine leaves and does not use any page any more: what it has not ended fails, and nothing waits for it."""
        self._known(engine)
        del self._engines[engine]
        self._ports.events.emit(EngineLeft(engine=engine))
        self._rooms().engine_gone(engine, "it has left")
        self._rooms().engine_ended(engine)
        return Accepted(call=message.call)

    def _attach(self, engine: str, message: Attach) -> Attached:
        if engine in self._departed:
            raise ConflictError(
                f"an engine of the name '{engine}' is gone, and its process has not ended; take another name"
            )
        if message.role is not self.role:
            raise InvalidInputError(f"this is a {self.role} daemon; a {message.role} engine cannot attach to it")
        agree(ENGINE_FEATURES, message.features, us="this node", them="the engine")
        ranks = message.ranks or self._ports.ranks
        unknown = [str(rank) for rank in ranks if rank not in self._ports.ranks]
        if unknown:
            raise InvalidInputError(
                f"ranks {unknown} do not live on this node (it has {[str(rank) for rank in self._ports.ranks]}); "
                "attach to their node"
            )
        answer = self._ports.describe(message.call, ranks)
        attached = self._engines[engine] = AttachedEngine(engine, self._ports.pid(engine), ranks)
        self._ports.events.emit(EngineAttached(engine=engine, pid=attached.pid, ranks=ranks))
        return answer

    def memory_lost(self, rank: Rank, reason: str) -> None:
        """The device memory of a rank is gone: its engines hold nothing but a dead mapping, and have to attach again."""
        for engine in self._engines.values():
            if rank in engine.ranks and not engine.lost:
                engine.lost = reason
                self._ports.events.emit(EngineLost(engine=engine.name, reason=reason))
                self._send(engine.name, Detached(reason=reason[:REASON_CHARS]))

    def _attached(self, engine: str, message: Call) -> AttachedEngine:
        """Return who calls. Raises DetachedError when its memory is gone and the call needs it."""
        known = self._known(engine)
        if known.lost and not isinstance(message, _LETTING_GO):
            raise DetachedError(
                f"the device memory of this engine is gone ({known.lost}); release or abort its rooms, close it and attach again"
            )
        return known

    def _known(self, engine: str) -> AttachedEngine:
        try:
            return self._engines[engine]
        except KeyError:
            raise ConflictError(
                "this engine is not attached (or the daemon was restarted since); attach first"
            ) from None

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
        rooms = self._rooms()
        match message:
            case Admit():
                self._admission().admit_now(_admission_request(message))
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
        rooms = self._rooms()
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
                rooms.release(engine.name, message.room)
            case AbortRoom():
                rooms.abort(engine.name, message.room, message.reason)
            case _:
                raise InvalidInputError(f"a decode daemon does not know the call '{type(message).__name__}'")
        return Accepted(call=message.call)

    def _open_events(self) -> list[RoomEvent]:
        return self._rooms().open_events()


def _refused(call: Call, error: BridgeError, *, retry_after_s: float = 0.0) -> Refused:
    return Refused(call=call.call, code=error.code, message=str(error)[:REASON_CHARS], retry_after_s=retry_after_s)


def _admission_request(message: Admit) -> AdmissionRequest:
    return AdmissionRequest(
        room=message.room,
        generation=message.generation,
        prompt_tokens=message.prompt_tokens,
        max_new_tokens=message.max_new_tokens,
        client="engine",
    )


def _pages(call: int, room: Room) -> Pages:  # type: ignore[type-arg]
    return Pages(
        call=call,
        room=room.room,
        generation=room.generation,
        prompt_tokens=room.prompt_tokens,
        prefix_tokens=room.prefix_tokens,
        tables=to_wire(room.tables),
    )

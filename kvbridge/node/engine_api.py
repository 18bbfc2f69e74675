"""Where engines come in: calls are carried out on the node's rooms and answered, events are pushed.

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
from typing import Protocol

import structlog

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
from kvbridge.node.receiver.service import ReceiverService
from kvbridge.node.rooms import Room
from kvbridge.node.sender.service import SenderService

log = structlog.get_logger(__name__)

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


class Admissions(Protocol):
    """What engines need of the desk that users come to as well."""

    def admit_now(self, request: AdmissionRequest) -> object:
        """Admit or refuse at once. Raises CapacityError, ClientLimitError, ConflictError, InvalidInputError."""

    def retry_after_s(self, error: CapacityError) -> float:
        """When to try again what was refused."""


class EngineRooms(Protocol):
    """What the rooms of either role are told of engines."""

    def engine_gone(self, engine: str, reason: str, *, followed: bool = True) -> bool:
        """An engine's connection has ended. Returns whether pages wait for `engine_ended`."""

    def engine_ended(self, engine: str) -> None:
        """Nothing of an engine that is gone uses a page any more."""


class EngineDoor(ABC):
    """Attached engines and the calls that both roles share. Called from the event loop's thread only."""

    role: Role

    def __init__(
        self,
        desk: Callable[[], Admissions],
        *,
        send: Callable[[str, NodeToEngine], None],
        pid: Callable[[str], int],
        describe: Callable[[int, tuple[Rank, ...]], Attached],
        ranks: tuple[Rank, ...],
    ) -> None:
        """`send(engine, message)` never raises; `pid(engine)` is the kernel's word; `describe(call, ranks)` answers an attach."""
        self._desk = desk
        self._send = send
        self._pid = pid
        self._describe = describe
        self._ranks = ranks
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
        """An attach is refused before there is a desk; the desk has put its own estimate into what it refused."""
        return error.retry_after_s if isinstance(message, Attach | Admit) else self._desk().retry_after_s(error)

    def gone(self, engine: str, reason: str, *, followed: bool) -> bool:
        """An engine's connection has ended. Returns whether pages wait for `ended`; `followed`: whether that will come."""
        left = self._engines.pop(engine, None)
        if left is None:
            return False
        waits = self._rooms().engine_gone(engine, reason, followed=followed)
        log.warning("engine_gone", engine=engine, pid=left.pid, reason=reason, pages_wait=waits, followed=followed)
        if waits:
            end = "has not ended" if followed else "cannot be followed (another pid namespace)"
            left.gone = f"{reason}; its process {end}"
            self._departed[engine] = left
        return waits

    def ended(self, engine: str) -> None:
        """The process of an engine that is gone has ended, and what its GPUs may have had to do."""
        if self._departed.pop(engine, None) is not None:
            log.info("engine_ended", engine=engine)
            self._rooms().engine_ended(engine)

    def _detach(self, engine: str, message: Detach) -> Accepted:
        """An engine leaves and does not use any page any more: what it has not ended fails, and nothing waits for it."""
        self._known(engine)
        del self._engines[engine]
        log.info("engine_detached", engine=engine, reason="it has left")
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
        ranks = message.ranks or self._ranks
        unknown = [str(rank) for rank in ranks if rank not in self._ranks]
        if unknown:
            raise InvalidInputError(
                f"ranks {unknown} do not live on this node (it has {[str(rank) for rank in self._ranks]}); attach to their node"
            )
        answer = self._describe(message.call, ranks)
        attached = self._engines[engine] = AttachedEngine(engine, self._pid(engine), ranks)
        log.info("engine_attached", engine=engine, pid=attached.pid, ranks=[str(rank) for rank in ranks])
        return answer

    def memory_lost(self, rank: Rank, reason: str) -> None:
        """The device memory of a rank is gone: its engines hold nothing but a dead mapping, and have to attach again."""
        for engine in self._engines.values():
            if rank in engine.ranks and not engine.lost:
                engine.lost = reason
                log.warning("engine_detached", engine=engine.name, reason=reason)
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

    @abstractmethod
    def _rooms(self) -> EngineRooms:
        """The rooms of the role."""


class PrefillDoor(EngineDoor):
    """The verbs begin, publish, finish, release and abort."""

    role = Role.PREFILL

    def __init__(
        self,
        sender: Callable[[], SenderService],
        desk: Callable[[], Admissions],
        *,
        send: Callable[[str, NodeToEngine], None],
        pid: Callable[[str], int],
        describe: Callable[[int, tuple[Rank, ...]], Attached],
        ranks: tuple[Rank, ...],
    ) -> None:
        """`sender` and `desk` are asked at each call: door and rooms refer to each other."""
        super().__init__(desk, send=send, pid=pid, describe=describe, ranks=ranks)
        self._sender = sender

    def _call(self, engine: AttachedEngine, message: Call) -> NodeToEngine:
        rooms = self._sender()
        match message:
            case Admit():
                self._desk().admit_now(_admission(message))
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

    def _rooms(self) -> SenderService:
        return self._sender()


class DecodeDoor(EngineDoor):
    """The verbs claim, extend, release and abort, and provide for adopted pools."""

    role = Role.DECODE

    def __init__(
        self,
        receiver: Callable[[], ReceiverService],
        desk: Callable[[], Admissions],
        *,
        send: Callable[[str, NodeToEngine], None],
        pid: Callable[[str], int],
        describe: Callable[[int, tuple[Rank, ...]], Attached],
        ranks: tuple[Rank, ...],
    ) -> None:
        """`receiver` and `desk` are asked at each call: door and rooms refer to each other."""
        super().__init__(desk, send=send, pid=pid, describe=describe, ranks=ranks)
        self._receiver = receiver

    def _call(self, engine: AttachedEngine, message: Call) -> NodeToEngine:
        rooms = self._receiver()
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
        return self._receiver().open_events()

    def _rooms(self) -> ReceiverService:
        return self._receiver()


def _refused(call: Call, error: BridgeError, *, retry_after_s: float = 0.0) -> Refused:
    return Refused(call=call.call, code=error.code, message=str(error)[:REASON_CHARS], retry_after_s=retry_after_s)


def _admission(message: Admit) -> AdmissionRequest:
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

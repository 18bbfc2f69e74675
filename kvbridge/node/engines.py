"""The engine processes of a node: the ranks for which each is attached, their calls, and the rooms that they admit themselves.

The end of an engine is noticed by its connection, not by silence: a synchronous engine may compute for minutes without a word. The
engine's rooms fail when the connection ends. The pages come back when the engine has said that it is through with them (Detach), or
when its process has ended: the connection of a killed process ends first, and its GPU writes on for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from kvbridge.api.rooms import AdmissionRequest
from kvbridge.api.status import EngineStatus
from kvbridge.control.local import LocalServer
from kvbridge.control.unix_sockets import ENGINE_SOCKET, PeerProcess
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    ConflictError,
    DetachedError,
    InvalidInputError,
    NotReadyError,
    code_of,
)
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE
from kvbridge.core.wire.engine_messages import (
    AbortRoom,
    Accepted,
    Admit,
    Answer,
    Attach,
    Attached,
    Begin,
    Call,
    Detach,
    Detached,
    EngineToNode,
    Fetch,
    Finish,
    Hold,
    NodeToEngine,
    Provide,
    Publish,
    Refused,
    Release,
    RoomEvent,
)
from kvbridge.core.wire.messages import REASON_CHARS, agree
from kvbridge.node.room import AdmittingEngine
from kvbridge.telemetry.facts import EngineAttached, EngineEnded, EngineLeft, EngineLost, EventStream

if TYPE_CHECKING:
    from kvbridge.node.admission import AdmissionController
    from kvbridge.node.rooms import Rooms

log = structlog.get_logger(__name__)

CLIENT = "engine"
"""The client of rooms that engines admit, in reports and for the limits of clients."""


@dataclass
class AttachedEngine:
    """One engine process."""

    name: str
    pid: int
    """As the kernel tells it; 0 for a process of another pid namespace."""
    ranks: tuple[Rank, ...]
    lost: str = ""
    """Why its memory is gone: it may only let go of its rooms."""
    gone: str = ""
    """Why its connection has ended, while pages wait for the end of its process."""


class Engines:
    """The engines of one node, and the socket that they connect to. Built anywhere, opened and used in one running loop."""

    _rooms: Rooms[Any]
    _admission: AdmissionController
    _answer_attach: Callable[[int, tuple[Rank, ...]], Attached]

    def __init__(self, ranks: tuple[Rank, ...], events: EventStream, *, settle_s: float) -> None:
        """`ranks` are those of the node; `settle_s`: `timeouts.engine_settle_s`."""
        self._ranks, self._events, self._settle_s = ranks, events, settle_s
        self._server: LocalServer[EngineToNode, NodeToEngine] | None = None
        self._attached: dict[str, AttachedEngine] = {}
        self._departed: dict[str, AttachedEngine] = {}
        """Engines without a connection whose process has not ended: pages wait for its end."""

    def serve(
        self,
        rooms: Rooms[Any],
        admission: AdmissionController,
        *,
        attached: Callable[[int, tuple[Rank, ...]], Attached],
    ) -> None:
        """Carry calls out on these rooms; before `open`.

        `attached(call, ranks)` answers an attach, and raises NotReadyError while there is no memory to attach to.
        """
        self._rooms, self._admission, self._answer_attach = rooms, admission, attached

    def open(self, incarnation: str, runtime_dir: Path) -> None:
        """Listen for engines. Raises ConflictError when another daemon uses the directory."""
        self._server = LocalServer(
            incarnation,
            runtime_dir / ENGINE_SOCKET,
            ENGINE_TO_NODE,
            NODE_TO_ENGINE,
            on_message=self.handle,
            on_gone=self._connection_ended,
            on_refused=self._events.frame_refused,
            to_group=True,
        )

    def close(self) -> None:
        """Stop listening; harmless when closed."""
        if self._server is not None:
            self._server.close()

    # ------------------------------------------------------------------ for rooms and operators

    def send(self, engine: str, message: NodeToEngine) -> None:
        """Send to an engine. A failure is logged; an answer that does not fit into a frame becomes a refusal."""
        if self._server is None:
            return
        try:
            self._server.send(engine, message)
        except BridgeError as error:
            log.warning("engine_unreachable", engine=engine, code=error.code, reason=str(error))
            if isinstance(error, InvalidInputError) and isinstance(message, Answer):
                self.send(engine, Refused(call=message.call, code=error.code, message=str(error)[:REASON_CHARS]))

    def push(self, event: RoomEvent) -> None:
        """Tell every attached engine. Never raises."""
        for name in self._attached:
            self.send(name, event)

    def serving(self) -> dict[str, tuple[Rank, ...]]:
        """Return the engines attached now, and the ranks that each of them serves."""
        return {name: engine.ranks for name, engine in self._attached.items()}

    def states(self) -> dict[str, int]:
        """Count engines: attached, and gone while pages wait for the end of their process."""
        return {"attached": len(self._attached), "gone": len(self._departed)}

    def status(self) -> tuple[EngineStatus, ...]:
        """Return all engines of `states`, for `/status`."""
        return tuple(
            EngineStatus(name=engine.name, pid=engine.pid, ranks=tuple(map(str, engine.ranks)), gone=engine.gone)
            for engine in (*self._attached.values(), *self._departed.values())
        )

    def memory_lost(self, rank: Rank, reason: str) -> None:
        """Detach the engines of a rank whose device memory is gone: they hold dead mappings, and have to attach again."""
        for engine in self._attached.values():
            if rank in engine.ranks and not engine.lost:
                engine.lost = reason
                self._events.emit(EngineLost(engine=engine.name, reason=reason))
                self.send(engine.name, Detached(reason=reason[:REASON_CHARS]))

    # ------------------------------------------------------------------ calls

    def handle(self, engine: str, message: EngineToNode) -> None:
        """Carry out one call and answer it. Every error becomes a Refused answer, so that no engine waits in vain."""
        if not isinstance(message, Call):
            return
        retry_after_s = 0.0
        try:
            answer = self._answer(engine, message)
        except Exception as error:
            refusal = error
            if isinstance(error, CapacityError):
                retry_after_s = self._admission.retry_after_s(error)
            elif not isinstance(error, BridgeError):
                kind = type(message).__name__
                log.exception("engine_call_failed", engine=engine, call=kind, room=getattr(message, "room", None))
                text = f"'{kind}' failed, please report it (the node's log has more): {type(error).__name__}: {error}"
                refusal = BridgeError(text)
            text = str(refusal)[:REASON_CHARS]
            answer = Refused(call=message.call, code=code_of(refusal), message=text, retry_after_s=retry_after_s)
        self.send(engine, answer)
        if isinstance(answer, Attached):
            for room in self._rooms.book:
                if room.state in self._rooms.waits_for_engine:  # its event was before this engine
                    self.send(engine, self._rooms.event(room))

    def _answer(self, name: str, message: Call) -> NodeToEngine:
        if isinstance(message, Attach):
            return self._attach(name, message)
        engine = self._attached.get(name)
        if engine is None:
            raise ConflictError("this engine is not attached (or the daemon was restarted since); attach first")
        if isinstance(message, Detach):  # the engine uses no page any more, and nothing waits for its process
            del self._attached[name]
            self._events.emit(EngineLeft(engine=name))
            self._rooms.engine_gone(name, "it has left")
            self._rooms.engine_ended(name)
            return Accepted(call=message.call)
        if engine.lost and not isinstance(message, Finish | Release | AbortRoom):
            raise DetachedError(
                f"the device memory of this engine is gone ({engine.lost}); release or abort its rooms, close it and attach again"
            )
        match message:
            case Hold() | Fetch() if isinstance(message, Hold) is (self._rooms.role is Role.PREFILL):
                self.admit_own(engine, message)
            case Admit() if self._rooms.role is Role.PREFILL:
                asked = message.model_dump(exclude={"call", "type"})
                self._admission.admit_now(AdmissionRequest(**asked, client=CLIENT))
            case _:
                carry_out = self._rooms.calls.get(type(message))
                if carry_out is None:
                    raise InvalidInputError(
                        f"a {self._rooms.role} daemon does not know the call '{type(message).__name__}'"
                    )
                return carry_out(engine, message) or Accepted(call=message.call)
        return Accepted(call=message.call)

    def _attach(self, name: str, message: Attach) -> Attached:
        role = self._rooms.role
        if message.role is not role:
            raise InvalidInputError(f"this is a {role} daemon; a {message.role} engine cannot attach to it")
        if name in self._departed:
            raise ConflictError(
                f"an engine of the name '{name}' is gone, and its process has not ended; take another name"
            )
        unknown = [str(rank) for rank in message.ranks if rank not in self._ranks]
        if unknown:
            raise InvalidInputError(
                f"ranks {unknown} do not live on this node (it has {[str(rank) for rank in self._ranks]}); "
                "attach to their node"
            )
        if not message.brings_memory and self._rooms.settings.adopted and (missing := self._rooms.workers.missing()):
            raise NotReadyError(f"this engine brings no memory, so there is nothing that it could do yet: {missing}")
        ranks = message.ranks or self._ranks
        answer = self._answer_attach(message.call, ranks)
        agree(answer.features, message.features, us="this node", them="the engine")
        pid = self._server.process(name).pid if self._server is not None else 0
        engine = self._attached[name] = AttachedEngine(name, pid, ranks)
        self._events.emit(EngineAttached(engine=name, pid=engine.pid, ranks=ranks))
        return answer

    # ------------------------------------------------------------------ rooms that engines admit

    def admit_own(self, engine: AttachedEngine, message: Hold | Fetch) -> None:
        """Admit a room for an engine, or let the engine join it, and carry out the calls that the message stands for."""
        try:
            self._admit_own(engine, message)
        except Exception as error:
            known = error if isinstance(error, BridgeError) else BridgeError(str(error) or type(error).__name__)
            self._rooms.not_admitted(message.room, message.generation, known)
            raise

    def _admit_own(self, engine: AttachedEngine, message: Hold | Fetch) -> None:
        if not self._rooms.settings.adopted:
            raise ConflictError(
                "this node owns its pools, so the pages of a room are its own to give: rooms are admitted over HTTP, or by `admit`"
            )
        prefill, held = (message.prefill, message.held) if isinstance(message, Fetch) else ((), False)
        about = {"room": message.room, "generation": message.generation, "prompt_tokens": message.prompt_tokens}
        known = self._rooms.book.find(message.room, message.generation)
        if known is None or not known.lacks(engine.ranks, message.prompt_digest):
            request = AdmissionRequest(**about, prefill=prefill, client=CLIENT)
            self._admission.admit_now(request, engine=AdmittingEngine(engine.name, message.prompt_digest, held))
        try:
            for call in _calls_in(message):
                self._rooms.calls[type(call)](engine, call)
        except Exception as error:
            room = self._rooms.book.find(message.room, message.generation)
            if room is not None:
                self._rooms.fail(room, code_of(error), str(error) or type(error).__name__)
            raise

    # ------------------------------------------------------------------ connections and processes

    def _connection_ended(self, name: str, process: PeerProcess) -> None:
        if self.gone(name, "its connection has ended", followed=process.followed):
            process.when_ended(lambda: self._process_ended(name))

    def _process_ended(self, name: str) -> None:
        asyncio.get_running_loop().call_later(self._settle_s, self.ended, name)

    def gone(self, name: str, reason: str, *, followed: bool) -> bool:
        """Fail the rooms of an engine whose connection has ended.

        Returns whether pages wait for `ended`; `followed`: whether that will come.
        """
        engine = self._attached.pop(name, None)
        if engine is None:
            return False
        waits = self._rooms.engine_gone(name, reason, followed=followed)
        self._events.emit(EngineLost(engine=name, reason=reason, pages_wait=waits))
        if waits:
            end = "has not ended" if followed else "cannot be followed (another pid namespace)"
            engine.gone = f"{reason}; its process {end}"
            self._departed[name] = engine
        return waits

    def ended(self, name: str) -> None:
        """Free the pages of an engine that is gone: its process has ended, and the work of its GPUs."""
        if self._departed.pop(name, None) is not None:
            self._events.emit(EngineEnded(engine=name))
            self._rooms.engine_ended(name)


def _calls_in(message: Hold | Fetch) -> Iterator[Call]:
    about = {"call": message.call, "room": message.room}
    if isinstance(message, Fetch):
        if message.tables is not None:
            yield Provide(**about, tables=message.tables, prefix_tokens=message.prefix_tokens)
        return
    tokens, published_tokens = message.prompt_tokens, message.published_tokens
    if message.tables is not None:
        pages = {"tables": message.tables, "computed_tokens": message.computed_tokens}
        yield Begin(**about, prompt_tokens=tokens, **pages)
    if published_tokens:
        yield Publish(**about, upto_token=published_tokens)
    if published_tokens == tokens:
        yield Finish(**about, metadata=message.metadata)

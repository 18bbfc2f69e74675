"""An engine's connection to its node: numbered calls with answers, and events. Synchronous, for one thread."""

from __future__ import annotations

import itertools
import time
from collections import deque
from pathlib import Path
from typing import TypeVar

import structlog

from kvbridge.control.local import LocalClient
from kvbridge.control.unix_sockets import ENGINE_SOCKET
from kvbridge.core.errors import (
    BridgeError,
    CapacityError,
    DeadlineError,
    NotReadyError,
    ProtocolError,
    errors_by_code,
)
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.codec import ENGINE_TO_NODE, NODE_TO_ENGINE
from kvbridge.core.wire.engine_messages import (
    AbortRoom,
    Answer,
    Attach,
    Attached,
    Call,
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
from kvbridge.core.wire.messages import FEATURES, agree

log = structlog.get_logger(__name__)

AnswerT = TypeVar("AnswerT", bound=Answer)
RoomCall = Hold | Fetch | Provide | Publish | Finish | Release | AbortRoom
"""Calls whose answer is Accepted or a refusal."""
EVENTS_KEPT = 4_096
"""Limit of events kept for an engine that does not ask for them. A room can be claimed without its event."""
RETRY_PAUSE_S = 0.05


class EngineLink:
    """The connection of one engine process. No call blocks longer than its timeout."""

    def __init__(self, runtime_dir: Path | str, *, timeout_s: float, daemon_user: int | None = None) -> None:
        """Connect to the node with this runtime directory. `daemon_user`: the daemon's user (default: this process's)."""
        path = Path(runtime_dir).absolute() / ENGINE_SOCKET
        self._client: LocalClient[NodeToEngine, EngineToNode] = LocalClient(
            path, NODE_TO_ENGINE, ENGINE_TO_NODE, daemon_user=daemon_user
        )
        self.timeout_s = timeout_s
        self.daemon_user = daemon_user
        self._numbers = itertools.count(1)
        self._events: deque[RoomEvent] = deque(maxlen=EVENTS_KEPT)
        self._overflowed = False
        self._posted: dict[int, tuple[int, int]] = {}
        """Room and generation (0: none named) of each posted call, for whose answer nobody waits."""
        self.lost = ""
        """Why the device memory of this attachment is gone; empty while it exists."""

    def number(self) -> int:
        """Return the number for the next call."""
        return next(self._numbers)

    def attach(self, role: Role, ranks: tuple[Rank, ...], *, brings_memory: bool = False) -> Attached:
        """Attach as soon as the node has its memory: adopted memory exists only after its engines have attached."""
        until_s = time.monotonic() + self.timeout_s
        while True:
            try:
                said = {"role": role, "ranks": ranks, "brings_memory": brings_memory, "features": FEATURES}
                answer = self.call(Attach(call=self.number(), **said), Attached)
                break
            except NotReadyError:
                if time.monotonic() >= until_s:
                    raise
            time.sleep(RETRY_PAUSE_S)
        agree(FEATURES, answer.features, us="this engine", them=f"the {role} node of {answer.instance}")
        return answer

    def call(self, message: Call, answer: type[AnswerT]) -> AnswerT:
        """Send a call and return its answer. Raises the error in the node's answer, or DeadlineError."""
        self._client.send(message, self.timeout_s)  # type: ignore[arg-type]
        deadline_s = time.monotonic() + self.timeout_s
        while True:
            left_s = deadline_s - time.monotonic()
            received = self._client.receive(max(0.0, left_s)) if left_s > 0 else None
            if received is None:
                raise DeadlineError(
                    f"the daemon did not answer '{type(message).__name__}' within {self.timeout_s} s "
                    "(call_timeout_s); is it running, and is this its runtime directory?"
                )
            if not isinstance(received, RoomEvent | Detached) and received.call == message.call:
                return _checked(received, answer)
            self._take(received)

    def post(self, message: RoomCall) -> None:
        """Send a call about a room without waiting; a refusal becomes an event of the room.

        Raises NotReadyError when the daemon does not read, PeerError when it is gone. The call was not sent then.
        """
        self._client.send(message, 0.0)
        self._posted[message.call] = message.room, getattr(message, "generation", 0)

    def events(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return the events, waiting up to `timeout_s` for the first."""
        self._receive(0.0 if self._events else timeout_s)
        events = list(self._events)
        self._events.clear()
        return events

    def first_event(self, room: int, timeout_s: float) -> list[RoomEvent]:
        """Return a room's first event in a list, empty without one: this waits up to `timeout_s` for an event of any room."""
        for wait_s in (0.0, timeout_s):
            self._receive(wait_s)
            mine = next((event for event in self._events if event.room == room), None)
            if mine is not None:
                self._events.remove(mine)
                return [mine]
        return []

    def _receive(self, wait_s: float) -> None:
        while (received := self._client.receive(wait_s)) is not None:
            self._take(received)
            wait_s = 0.0

    def _take(self, received: NodeToEngine) -> None:
        """Keep events and refusals of posted calls, as events. Drop other answers."""
        if isinstance(received, Detached):
            self.lost = received.reason
            return
        if not isinstance(received, RoomEvent):
            room, generation = self._posted.pop(received.call, (None, 0))
            if room is None or not isinstance(received, Refused):
                return
            why = {"code": received.code, "reason": received.message}
            received = RoomEvent(room=room, generation=generation, kind="refused", **why)
        if len(self._events) == EVENTS_KEPT and not self._overflowed:
            self._overflowed = True
            log.warning(
                "events_dropped", kept=EVENTS_KEPT, why="this engine does not ask for events; the oldest are dropped"
            )
        self._events.append(received)

    def close(self) -> None:
        """Close the connection; the node notices."""
        self._client.close()


def _checked(received: Answer, answer: type[AnswerT]) -> AnswerT:
    """Return the expected answer, or raise the error of a refusal."""
    if isinstance(received, answer):
        return received
    if not isinstance(received, Refused):
        raise ProtocolError(f"the daemon answered '{type(received).__name__}' where '{answer.__name__}' was expected")
    kind = errors_by_code().get(received.code, BridgeError)
    if issubclass(kind, CapacityError):
        raise kind(received.message, retry_after_s=received.retry_after_s)
    raise kind(received.message)

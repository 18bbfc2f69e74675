"""Which engine processes are attached to a node, for which ranks, and how they are told of rooms.

An engine that dies is noticed through its connection, not through silence: a synchronous engine may compute for
minutes without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbridge.api.status import EngineStatus
from kvbridge.core.errors import ConflictError, InvalidInputError
from kvbridge.core.ids import Rank
from kvbridge.core.wire.engine_messages import Detached, NodeToEngine, RoomEvent
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.telemetry.events import EngineAttached, EngineEnded, EngineLeft, EngineLost
from kvbridge.telemetry.stream import EventStream


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


class AttachedEngines:
    """The engines of one node. Called from the event loop's thread only."""

    def __init__(self, send: Callable[[str, NodeToEngine], None], ranks: tuple[Rank, ...], events: EventStream) -> None:
        """`send(engine, message)` never raises; `ranks` are those of the node."""
        self.send = send
        self._ranks = ranks
        self._events = events
        self._attached: dict[str, AttachedEngine] = {}
        self._departed: dict[str, AttachedEngine] = {}
        """Engines whose connection has ended, and for the end of whose process pages wait."""

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
        """Everything attached, and what is gone and not ended, for `/status`."""
        return tuple(
            EngineStatus(name=engine.name, pid=engine.pid, ranks=tuple(map(str, engine.ranks)), gone=engine.gone)
            for engine in (*self._attached.values(), *self._departed.values())
        )

    def get(self, name: str) -> AttachedEngine:
        """Return an attached engine. Raises ConflictError for one that is not."""
        try:
            return self._attached[name]
        except KeyError:
            raise ConflictError(
                "this engine is not attached (or the daemon was restarted since); attach first"
            ) from None

    def ranks_of_node(self, name: str, asked: tuple[Rank, ...]) -> tuple[Rank, ...]:
        """Return the ranks that an engine which asks for some may attach to: all when it asks for none.

        Raises InvalidInputError for ranks of other nodes, ConflictError while an engine of that name has not ended.
        """
        if name in self._departed:
            raise ConflictError(
                f"an engine of the name '{name}' is gone, and its process has not ended; take another name"
            )
        unknown = [str(rank) for rank in asked if rank not in self._ranks]
        if unknown:
            raise InvalidInputError(
                f"ranks {unknown} do not live on this node (it has {[str(rank) for rank in self._ranks]}); "
                "attach to their node"
            )
        return asked or self._ranks

    def attach(self, engine: AttachedEngine) -> None:
        """Take an engine in."""
        self._attached[engine.name] = engine
        self._events.emit(EngineAttached(engine=engine.name, pid=engine.pid, ranks=engine.ranks))

    def detach(self, name: str) -> None:
        """An engine leaves in order. Raises ConflictError when it is not attached."""
        self.get(name)
        del self._attached[name]
        self._events.emit(EngineLeft(engine=name))

    def lose(self, name: str) -> AttachedEngine | None:
        """An engine's connection has ended: it is attached no more. Returns it, if it was; `await_end` or nothing follows."""
        return self._attached.pop(name, None)

    def await_end(self, engine: AttachedEngine, reason: str, *, pages_wait: bool, followed: bool) -> None:
        """Keep an engine that was lost in the list while pages wait for its process. `followed`: whether its end is seen."""
        self._events.emit(EngineLost(engine=engine.name, reason=reason, pages_wait=pages_wait))
        if pages_wait:
            end = "has not ended" if followed else "cannot be followed (another pid namespace)"
            engine.gone = f"{reason}; its process {end}"
            self._departed[engine.name] = engine

    def ended(self, name: str) -> bool:
        """The process of an engine that is gone has ended. Returns whether somebody waited for that."""
        if self._departed.pop(name, None) is None:
            return False
        self._events.emit(EngineEnded(engine=name))
        return True

    def memory_lost(self, rank: Rank, reason: str) -> None:
        """The device memory of a rank is gone: its engines hold nothing but a dead mapping, and have to attach again."""
        for engine in self._attached.values():
            if rank in engine.ranks and not engine.lost:
                engine.lost = reason
                self._events.emit(EngineLost(engine=engine.name, reason=reason))
                self.send(engine.name, Detached(reason=reason[:REASON_CHARS]))

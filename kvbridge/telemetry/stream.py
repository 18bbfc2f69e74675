"""What a fact is, and the stream that hands each fact to metrics, log, timelines, status and spans.

A fact has happened and cannot be taken back. What *is* (rooms by state, free pages, who is connected) is looked up when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, dataclass_transform

from kvbridge.core.process import Clock, monotonic


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class Fact:
    """Something that has happened. Each kind is a dataclass, and declares its line of the log and whether it is a problem."""

    line: ClassVar[str] = ""
    """Level, event and keys of the line, as `key=field` where the field has another name; empty: the log has no line."""
    seldom: ClassVar[str | None] = None
    """Lines of this kind are limited in number: the field that tells kinds apart, or "". None: all lines are written."""
    problem: ClassVar[str] = ""
    """How `/status` calls the problem; empty: the fact is none."""

    kinds: ClassVar[list[type[Fact]]] = []
    """Every kind of fact."""

    def __init_subclass__(cls, **declared: str) -> None:
        for name, value in declared.items():
            setattr(cls, name, value)
        Fact.kinds.append(dataclass(kw_only=True)(cls))

    @property
    def about(self) -> str:
        """The peer, rank, engine or room that the fact is about."""
        return str(next(getattr(self, name) for name in ("room", "engine", "peer", "rank") if hasattr(self, name)))

    @property
    def why(self) -> str:
        """The reason as `/status` shows it."""
        return str(getattr(self, "reason", ""))


class FrameRefused(Fact, line="warning frame_refused kind detail", seldom="kind"):
    """A frame or a connection was refused; `kind` is one of few words, `detail` is for people."""

    kind: str
    detail: str


class MessagesResent(Fact):
    """Control messages were sent again."""

    count: int


Reader = Mapping[type[Fact], Callable[[float, Any], None]]
"""Functions by kind of fact (a base class stands for all kinds below it), called with monotonic seconds and the fact."""


class EventStream:
    """Hands each fact to every reader at once, in the order in which readers were added. Used from the event loop's thread only.

    A reader must not raise, and must not emit.
    """

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._readers: list[Reader] = []
        self._calls: dict[type[Fact], tuple[Callable[[float, Any], None], ...]] = {}
        """The calls for each kind that has occurred: most facts concern few readers, and a room has many facts."""

    def add_reader(self, reader: Reader) -> None:
        """Let `reader` have every fact that concerns it from now on."""
        self._readers.append(reader)
        self._calls.clear()

    def frame_refused(self, kind: str, detail: str) -> None:
        """Say that a frame or a connection was refused; the form in which sockets report it."""
        self.emit(FrameRefused(kind=kind, detail=detail))

    def messages_resent(self, count: int) -> None:
        """Say that control messages were sent again; the form in which sockets report it."""
        self.emit(MessagesResent(count=count))

    def emit(self, fact: Fact) -> None:
        """Say that something has happened, now."""
        kind, now_s = type(fact), self._clock()
        if kind not in self._calls:
            self._calls[kind] = tuple(
                call for reader in self._readers for known, call in reader.items() if issubclass(kind, known)
            )
        for call in self._calls[kind]:
            call(now_s, fact)

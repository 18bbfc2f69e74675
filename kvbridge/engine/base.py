"""What engines of both roles have in common: how they attach, what they see, how they leave.

Owns: one attachment. Must not know: the verbs of either role.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import Rank, Role
from kvbridge.core.wire.engine_messages import AbortRoom, Accepted, RoomEvent
from kvbridge.engine.adopted import adopt
from kvbridge.engine.attachment import DEFAULT_CALL_TIMEOUT_S, Attachment, attach
from kvbridge.engine.views import PoolViews


class AttachedEngine:
    """One engine process at one node. Synchronous, for one thread; no call takes longer than its timeout."""

    role: ClassVar[Role]

    def __init__(self, attachment: Attachment) -> None:
        """Use `attach` or `adopt` instead."""
        self._attachment = attachment
        self._link = attachment.link

    @classmethod
    def attach(
        cls, runtime_dir: Path | str, *, ranks: Iterable[Rank] = (), call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S
    ) -> Self:
        """Attach to a daemon that owns the pools. See `attachment.attach`."""
        return cls(attach(runtime_dir, cls.role, ranks=ranks, call_timeout_s=call_timeout_s))

    @classmethod
    def adopt(
        cls,
        runtime_dir: Path | str,
        regions: Mapping[Rank, Sequence[Region]],
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> Self:
        """Bring this process's own tensors, for each rank that it serves. See `adopted.adopt`."""
        return cls(adopt(runtime_dir, cls.role, regions, call_timeout_s=call_timeout_s))

    @property
    def geometry(self) -> ModelGeometry:
        """The model that the node serves."""
        return self._attachment.geometry

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """The ranks that this process serves."""
        return self._attachment.ranks

    @property
    def views(self) -> dict[Rank, PoolViews]:
        """Zero-copy views of each rank's pools (on decode with the node's host pool); valid until `close`."""
        return self._attachment.views

    def layers(self, rank: Rank) -> tuple[int, ...]:
        """Global layer ids of a rank."""
        return self._attachment.layers(rank)

    def abort(self, room: int, reason: str) -> None:
        """Give a room up; this engine does not touch its pages any more. Harmless on a room that is over."""
        self._link.call(AbortRoom(call=self._link.number(), room=room, reason=reason), Accepted)

    def events(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return what happened to rooms since the last call, waiting up to `timeout_s` for the first event."""
        return self._attachment.events(timeout_s)

    def close(self) -> None:
        """Leave the node. Rooms that this engine still works on fail; views must not be used any more."""
        self._attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The prefill engine's side of the bridge: begin, publish, finish, abort.

Owns: the verbs. Must not know: how an engine computes, who the decode side is.

The engine writes its pages in place through `views` and says how far it is; sending overlaps computing and needs no further
call. After `finish` or `abort` the pages are not the engine's any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import Rank, Role, Tables
from kvbridge.core.wire.engine_messages import AbortRoom, Accepted, Admit, Begin, Finish, Pages, Publish, RoomEvent
from kvbridge.core.wire.messages import from_wire, to_wire
from kvbridge.engine.adopted import adopt
from kvbridge.engine.attachment import DEFAULT_CALL_TIMEOUT_S, Attachment, attach
from kvbridge.engine.views import PoolViews


@dataclass(frozen=True)
class PrefillRoom:
    """A begun room: where its pages are."""

    room: int
    generation: int
    prompt_tokens: int
    prefix_tokens: int
    """Tokens that decode already holds, if its offer has come; they need not be written."""
    tables: Tables


class PrefillEngine:
    """One prefill engine process. Synchronous, for one thread; no call takes longer than its timeout."""

    def __init__(self, attachment: Attachment) -> None:
        """Use `attach` or `adopt` instead."""
        self._attachment = attachment
        self._link = attachment.link

    @classmethod
    def attach(
        cls, runtime_dir: Path | str, *, ranks: Iterable[Rank] = (), call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S
    ) -> Self:
        """Attach to a daemon that owns the pools. See `attachment.attach`."""
        return cls(attach(runtime_dir, Role.PREFILL, ranks=ranks, call_timeout_s=call_timeout_s))

    @classmethod
    def adopt(
        cls,
        runtime_dir: Path | str,
        regions: Mapping[Rank, Sequence[Region]],
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> Self:
        """Bring this process's own tensors, for each rank that it serves. See `adopted.adopt`."""
        return cls(adopt(runtime_dir, Role.PREFILL, regions, call_timeout_s=call_timeout_s))

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
        """Zero-copy views of each rank's pools; valid until `close`."""
        return self._attachment.views

    def layers(self, rank: Rank) -> tuple[int, ...]:
        """Global layer ids of a rank."""
        return self._attachment.layers(rank)

    def admit(self, room: int, *, prompt_tokens: int, generation: int = 1) -> None:
        """Admit a room from here, as `POST /v1/requests` on the prefill daemon does. Raises CapacityError when full."""
        call = Admit(call=self._link.number(), room=room, generation=generation, prompt_tokens=prompt_tokens)
        self._link.call(call, Accepted)

    def begin(self, room: int, *, prompt_tokens: int, tables: Tables | None = None) -> PrefillRoom:
        """Start to compute an admitted room and learn its pages; adopted pools name theirs in `tables`.

        Raises UnknownRoomError, ConflictError on a second begin, InvalidInputError when the lengths differ.
        """
        wire = to_wire(tables) if tables else ()
        pages = self._link.call(
            Begin(call=self._link.number(), room=room, prompt_tokens=prompt_tokens, tables=wire), Pages
        )
        return PrefillRoom(room, pages.generation, pages.prompt_tokens, pages.prefix_tokens, from_wire(pages.tables))

    def publish(self, room: int, upto_token: int, *, layers: Sequence[int] | None = None) -> None:
        """Say that the first `upto_token` tokens are final in memory, on every layer or on `layers`.

        Raises InvalidInputError past the prompt, ConflictError backwards or when the room is over.
        """
        chosen = None if layers is None else tuple(layers)
        self._link.call(Publish(call=self._link.number(), room=room, upto_token=upto_token, layers=chosen), Accepted)

    def finish(self, room: int, *, metadata: bytes = b"") -> None:
        """Say that everything is published; `metadata` (at most 64 KiB) travels to the decode engine with it."""
        self._link.call(Finish(call=self._link.number(), room=room, metadata=metadata), Accepted)

    def abort(self, room: int, reason: str) -> None:
        """Give a room up. Harmless on a room that is over."""
        self._link.call(AbortRoom(call=self._link.number(), room=room, reason=reason), Accepted)

    def events(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return what happened to rooms: completed, aborted, failed. Waits up to `timeout_s` for the first."""
        return self._attachment.events(timeout_s)

    def close(self) -> None:
        """Leave the node. Rooms that were begun and not finished fail."""
        self._attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

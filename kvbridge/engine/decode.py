"""The decode engine's side of the bridge: claim, extend, release, abort.

Owns: the verbs. Must not know: how an engine computes, who the prefill side is.

A room can be claimed once a `committed` event names it, or once `GET /v1/requests/{room}` says so. From the claim to the
release its pages are the engine's alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from kvbridge.core.errors import ConflictError, DeadlineError, RoomFailedError
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import Region
from kvbridge.core.ids import Rank, Role, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.wire.engine_messages import AbortRoom, Accepted, Claim, Extend, Pages, Provide, Release, RoomEvent
from kvbridge.core.wire.messages import from_wire, to_wire
from kvbridge.engine.adopted import adopt
from kvbridge.engine.attachment import DEFAULT_CALL_TIMEOUT_S, Attachment, attach
from kvbridge.engine.views import PoolViews


@dataclass(frozen=True)
class DecodeRoom:
    """A claimed room: its pages, and what the prefill engine sent along."""

    room: int
    generation: int
    prompt_tokens: int
    prefix_tokens: int
    tables: Tables
    metadata: dict[str, bytes]
    """What each prefill rank's engine gave to `finish`, keyed by `str(rank)`."""
    amounts: Amounts
    phases_s: dict[str, float]


class DecodeEngine:
    """One decode engine process. Synchronous, for one thread; no call takes longer than its timeout."""

    def __init__(self, attachment: Attachment) -> None:
        """Use `attach` or `adopt` instead."""
        self._attachment = attachment
        self._link = attachment.link
        self._later: list[RoomEvent] = []

    @classmethod
    def attach(
        cls, runtime_dir: Path | str, *, ranks: Iterable[Rank] = (), call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S
    ) -> Self:
        """Attach to a daemon that owns the pools. See `attachment.attach`."""
        return cls(attach(runtime_dir, Role.DECODE, ranks=ranks, call_timeout_s=call_timeout_s))

    @classmethod
    def adopt(
        cls,
        runtime_dir: Path | str,
        regions: Mapping[Rank, Sequence[Region]],
        *,
        call_timeout_s: float = DEFAULT_CALL_TIMEOUT_S,
    ) -> Self:
        """Bring this process's own tensors, for each rank that it serves. See `adopted.adopt`."""
        return cls(adopt(runtime_dir, Role.DECODE, regions, call_timeout_s=call_timeout_s))

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
        """Zero-copy views of each rank's pools and of the host pool; valid until `close`."""
        return self._attachment.views

    def layers(self, rank: Rank) -> tuple[int, ...]:
        """Global layer ids of a rank."""
        return self._attachment.layers(rank)

    def provide(self, room: int, tables: Tables) -> None:
        """Adopted pools: name the device pages of a room that a `wanted` event asked for; keep them until the room is over."""
        self._link.call(Provide(call=self._link.number(), room=room, tables=to_wire(tables)), Accepted)

    def claim(self, room: int) -> DecodeRoom:
        """Take a committed room. Raises RoomFailedError with the first cause, ConflictError when it is not committed yet."""
        pages = self._link.call(Claim(call=self._link.number(), room=room), Pages)
        return DecodeRoom(
            room,
            pages.generation,
            pages.prompt_tokens,
            pages.prefix_tokens,
            from_wire(pages.tables),
            pages.metadata,
            pages.amounts,
            pages.phases_s,
        )

    def wait_claim(self, room: int, timeout_s: float) -> DecodeRoom:
        """Wait until a room is committed and claim it. Raises RoomFailedError when it ends first, else DeadlineError."""
        deadline_s = time.monotonic() + timeout_s
        with suppress(ConflictError):  # it may have been committed before we attached
            return self.claim(room)
        while (left_s := deadline_s - time.monotonic()) > 0:
            event = self._next_event(room, left_s)
            if event is None:
                continue
            if event.kind == "committed":
                return self.claim(room)
            if event.kind in {"aborted", "failed"}:
                raise RoomFailedError(f"room {room} {event.kind}: {event.reason}")
        raise DeadlineError(f"room {room} was not committed within {timeout_s} s")

    def _next_event(self, room: int, timeout_s: float) -> RoomEvent | None:
        events = self._later + self._attachment.events(0.0 if self._later else timeout_s)
        mine = next((event for event in events if event.room == room), None)
        self._later = [event for event in events if event is not mine]
        if mine is None and self._later and timeout_s > 0:
            self._later += self._attachment.events(timeout_s)
            mine = next((event for event in self._later if event.room == room), None)
            self._later = [event for event in self._later if event is not mine]
        return mine

    def extend(self, room: int, tokens: int) -> Tables:
        """Make room for `tokens` tokens in all (prompt and generated) and return the tables. Raises CapacityError."""
        pages = self._link.call(Extend(call=self._link.number(), room=room, tokens=tokens), Pages)
        return from_wire(pages.tables)

    def release(self, room: int) -> None:
        """Say that the request is over. The pages may be used again at once: read nothing of them afterwards."""
        self._link.call(Release(call=self._link.number(), room=room), Accepted)

    def abort(self, room: int, reason: str) -> None:
        """Give a room up, claimed or not. Harmless on a room that is over."""
        self._link.call(AbortRoom(call=self._link.number(), room=room, reason=reason), Accepted)

    def events(self, timeout_s: float = 0.0) -> list[RoomEvent]:
        """Return what happened to rooms. Waits up to `timeout_s` for the first event."""
        events, self._later = self._later, []
        return events + self._attachment.events(0.0 if events else timeout_s)

    def close(self) -> None:
        """Leave the node. Rooms that were claimed and not released are over."""
        self._attachment.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The prefill engine's side of the bridge: begin, publish, finish, abort.

Owns: the verbs. Must not know: how an engine computes, who the decode side is.

The engine writes its pages in place through `views` and says how far it is; sending overlaps computing and needs no further
call. After `finish` or `abort` the pages are not the engine's any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbridge.core.ids import Role, Tables
from kvbridge.core.wire.engine_messages import Accepted, Admit, Begin, Finish, Pages, Publish
from kvbridge.core.wire.messages import from_wire, to_wire
from kvbridge.engine.base import AttachedEngine
from kvbridge.engine.device_order import StreamChoice


@dataclass(frozen=True)
class PrefillRoom:
    """A begun room: where its pages are."""

    room: int
    generation: int
    prompt_tokens: int
    prefix_tokens: int
    """Tokens that decode already holds, if its offer has come; they need not be written."""
    tables: Tables


class PrefillEngine(AttachedEngine):
    """One prefill engine process. Synchronous, for one thread; no call takes longer than its timeout."""

    role = Role.PREFILL

    def admit(self, room: int, *, prompt_tokens: int, generation: int = 1) -> None:
        """Admit a room from here, as `POST /v1/requests` on the prefill daemon does. Raises CapacityError when full."""
        call = Admit(call=self._link.number(), room=room, generation=generation, prompt_tokens=prompt_tokens)
        self._call(call, Accepted)

    def begin(self, room: int, *, prompt_tokens: int, tables: Tables | None = None) -> PrefillRoom:
        """Start to compute an admitted room and learn its pages; adopted pools name theirs in `tables`.

        Raises UnknownRoomError, ConflictError on a second begin, InvalidInputError when the lengths differ.
        """
        wire = to_wire(tables) if tables else ()
        pages = self._call(Begin(call=self._link.number(), room=room, prompt_tokens=prompt_tokens, tables=wire), Pages)
        return PrefillRoom(room, pages.generation, pages.prompt_tokens, pages.prefix_tokens, from_wire(pages.tables))

    def publish(
        self, room: int, upto_token: int, *, layers: Sequence[int] | None = None, stream: StreamChoice = None
    ) -> None:
        """Say that the first `upto_token` tokens are final in memory, on every layer or on `layers`.

        With pools on a GPU: that they are when `stream` (default: the current one) has come to this point. Nothing is read
        before that, and this call does not wait for it.

        Raises InvalidInputError past the prompt, ConflictError backwards or when the room is over.
        """
        chosen = None if layers is None else tuple(layers)
        message = Publish(
            call=self._link.number(),
            room=room,
            upto_token=upto_token,
            layers=chosen,
            after=self._order.points(stream),
        )
        self._call(message, Accepted)

    def finish(self, room: int, *, metadata: bytes = b"") -> None:
        """Say that everything is published; `metadata` (at most 64 KiB) travels to the decode engine with it.

        The pages go to a later room once they are sent. Work that the GPU has yet to do on them is what was published, so
        later rooms are computed behind it: on the same stream, or on one that waits for it.
        """
        self._call(Finish(call=self._link.number(), room=room, metadata=metadata), Accepted)

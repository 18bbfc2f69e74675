"""The prefill engine's side of the bridge: begin, publish, finish, abort.

Owns: the verbs. Must not know: how an engine computes, who the decode side is.

The engine writes its pages in place through `views` and says how far it is; sending overlaps computing and needs no further
call. After `finish` or `abort` the pages are not the engine's any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import Role, Tables
from kvbridge.core.prefixes import Retention
from kvbridge.core.wire.engine_messages import (
    Accepted,
    Admit,
    AskRestorable,
    Begin,
    Finish,
    Hold,
    Pages,
    Publish,
    Release,
    Restorable,
)
from kvbridge.core.wire.messages import to_wire
from kvbridge.core.wire.shared_memory import StreamPoint
from kvbridge.engine.attachment import DEFAULT_CALL_TIMEOUT_S, Attachment
from kvbridge.engine.base import Engine
from kvbridge.engine.load_back import Load
from kvbridge.engine.stream_order import StreamChoice
from kvbridge.tier.keys import NO_KEYS, Keys


@dataclass(frozen=True)
class PrefillRoom:
    """A begun room: where its pages are."""

    room: int
    generation: int
    prompt_tokens: int
    prefix_tokens: int
    """Tokens whose rows decode holds already, if its offer has come: they are not sent. They are written all the same, since
    the pages of this node may be shared with later prompts; only `computed_tokens` says what need not be."""
    computed_tokens: int
    """Tokens that this node already holds: where the engine starts to compute. Their rows are in `tables`, to be read only, and
    count as published."""
    host_tokens: int
    """Of these, the last so many that were in the node's host memory, and are loaded into `tables` (see `by_layer` of `begin`)."""
    tables: Tables
    restore: Tables
    """From what to start, as the tables of a request of `computed_tokens` tokens: the same rows, and the windows and states as they
    were there. To be read only, until `finish` or `abort`."""
    checkpoints: Mapping[int, Tables]
    """Where others may start who have the same tokens so far: as soon as the engine has computed exactly so many tokens, it writes
    the windows and states that it has then (and nothing else) to these tables, and names them with `finish`. Ascending. To leave
    one out is no error: it costs a later request its time."""
    traceparent: str = ""
    """The room's span in W3C's form, for the engine's own spans to be parts of; empty when the request is not traced."""


def _begun_room(room: int, pages: Pages) -> PrefillRoom:
    tables = tables_from_wire(pages.tables)
    return PrefillRoom(
        room,
        pages.generation,
        pages.prompt_tokens,
        pages.prefix_tokens,
        pages.computed_tokens,
        pages.host_tokens,
        tables,
        tables | tables_from_wire((pages.restore.table,) if pages.restore else ()),
        {one.tokens: tables | tables_from_wire((one.table,)) for one in pages.checkpoints},
        pages.traceparent,
    )


class PrefillEngine(Engine):
    """One prefill engine process. Synchronous, for one thread; no call takes longer than its timeout."""

    role = Role.PREFILL

    def __init__(self, attachment: Attachment, *, close_timeout_s: float = DEFAULT_CALL_TIMEOUT_S) -> None:
        """Use `attach` or `adopt` instead."""
        super().__init__(attachment, close_timeout_s=close_timeout_s)
        self._begun: dict[int, tuple[int, set[StreamPoint]]] = {}
        """Rooms whose pages a GPU writes: the generation, and the points behind which what was published is written."""

    def admit(
        self,
        room: int,
        *,
        prompt_tokens: int,
        generation: int = 1,
        page_hashes: Keys = NO_KEYS,
        namespace: str = "",
        retention: Retention | None = None,
    ) -> None:
        """Admit a room from here, as `POST /v1/requests` on the prefill daemon does. Raises CapacityError when full.

        `page_hashes`: the `page_keys` of the prompt, computed with the same `namespace`. `retention`: how much its cached pages
        matter, and for how long.
        """
        call = Admit(
            call=self._link.number(),
            room=room,
            generation=generation,
            prompt_tokens=prompt_tokens,
            page_hashes=page_hashes.data,
            namespace=namespace,
            retention=retention,
        )
        self._call(call, Accepted)

    def hold(  # noqa: PLR0913 - each is something else that an engine may say of a room
        self,
        room: int,
        *,
        prompt_tokens: int,
        prompt_digest: bytes = b"",
        generation: int = 1,
        tables: Tables | None = None,
        computed_tokens: int = 0,
        published_tokens: int = 0,
        metadata: bytes = b"",
    ) -> None:
        """Adopted pools: admit a room for a prompt that this engine computes or has computed, and hold its pages for decode.

        `tables`: its pages, as for `begin` with `computed_tokens`, those that there are; None: `begin` follows. An engine that has
        computed all of a prompt names all of it in `computed_tokens`: it only reads the pages by now, and other requests that read
        the same ones may have been held before the one that wrote them. `published_tokens`: so many are final in memory; when
        that is the whole prompt, the room is finished with it and `metadata` travels as with `finish`. Else `publish` follows, with
        further pages, and `finish`. Events say the rest: the pages are the room's until `completed`, `refused`, `aborted` or
        `failed`.
        `prompt_digest`: what the room is of, in at most 32 bytes; nobody gets it who asks for something else.
        """
        message = Hold(
            call=self._link.number(),
            room=room,
            generation=generation,
            prompt_tokens=prompt_tokens,
            prompt_digest=prompt_digest,
            tables=None if tables is None else to_wire(tables),
            computed_tokens=computed_tokens,
            published_tokens=published_tokens,
            metadata=metadata,
        )
        self._tell(message)

    def restorable(self, room: int) -> tuple[int, ...]:
        """Return where an admitted room can start, in tokens, ascending; see `at_most` of `begin`. 0 is always among them.

        It is true now: by the time of `begin` only what the node starts from by itself, the last one, is sure to be there.
        """
        return self._call(AskRestorable(call=self._link.number(), room=room), Restorable).tokens

    def begin(  # noqa: PLR0913 - each is something else that an engine may say of a room
        self,
        room: int,
        *,
        prompt_tokens: int,
        page_hashes: Keys = NO_KEYS,
        tables: Tables | None = None,
        computed_tokens: int = 0,
        at_most: int | None = None,
        by_layer: bool = False,
    ) -> PrefillRoom:
        """Start to compute an admitted room and learn its pages; adopted pools name theirs in `tables`.

        `page_hashes`: the `page_keys` of the tokens that this engine computes. Needed for a room that was admitted with keys, else
        without effect. Raises KeyMismatchError, and the room fails, when they are others.

        `computed_tokens` (adopted pools): how many tokens from the prompt's start the engine's own prefix cache holds. The room
        only reads the pages that hold none but these, so other rooms may name them too, whether they wrote them or read them as
        well; they are to be written by nobody until all of these rooms are over. Every other page is one room's alone.

        `at_most`: start at no more than so many tokens, which an instance of several prefill nodes needs: each has a cache of its
        own, and all engines have to start at the same token. So they compare what `restorable` says, and all begin with the largest
        number that every node has. Raises CapacityError when there are no pages for what is to be computed besides.

        What the node holds of the prompt in host memory, windows and states at its end among it, is loaded by copies on a GPU
        stream of their own. The current stream of each GPU waits for all of them. `by_layer`: it does not, and the engine calls
        `wait_layer` before it touches a layer of `tables` or `restore`. With pools in host memory all is there when this returns.
        Raises TransportError when the copies cannot be submitted; the room is given up then.

        Raises UnknownRoomError, ConflictError on a second begin, and with pools on a GPU for a room of which an earlier attempt was
        neither finished nor aborted; InvalidInputError when the lengths differ.
        """
        wire = to_wire(tables) if tables else ()
        by_gpu = bool(self._order.devices)
        message = Begin(
            call=self._link.number(),
            room=room,
            prompt_tokens=prompt_tokens,
            page_hashes=page_hashes.data,
            end_key=page_hashes.end,
            tables=wire,
            computed_tokens=computed_tokens,
            at_most=at_most,
            by_gpu=by_gpu,
        )
        pages = self._call(message, Pages)
        if by_gpu:
            self._begun[room] = pages.generation, set()
        self._load_back(room, pages, by_layer=by_layer)
        return _begun_room(room, pages)

    def _load_began(self, pages: Pages, load: Load) -> None:
        self._say_published(pages.room, pages.computed_tokens, None, load.points)

    def publish(
        self,
        room: int,
        upto_token: int,
        *,
        layers: Sequence[int] | None = None,
        tables: Tables | None = None,
        stream: StreamChoice = None,
    ) -> None:
        """Say that the first `upto_token` tokens are final in memory, on every layer or on `layers`.

        `tables` (adopted pools): further pages of the room, which follow those that were named before. Those that hold published
        tokens only, on every layer, the room only reads: others may name them too, and nobody writes them until these are over.

        With pools on a GPU: that they are when `stream` (default: the current one) has come to this point. Nothing is read
        before that, and this call does not wait for it.

        Raises InvalidInputError past the prompt, ConflictError backwards or when the room is over.
        """
        self._say_published(room, upto_token, layers, self._order.points(stream), tables)

    def _say_published(
        self,
        room: int,
        upto_token: int,
        layers: Sequence[int] | None,
        points: Mapping[str, StreamPoint],
        tables: Tables | None = None,
    ) -> None:
        message = Publish(
            call=self._link.number(),
            room=room,
            upto_token=upto_token,
            layers=None if layers is None else tuple(layers),
            tables=to_wire(tables or {}),
            after=dict(points),
        )
        self._tell(message)
        if room in self._begun:
            self._begun[room][1].update(points.values())

    def finish(self, room: int, *, metadata: bytes = b"", checkpoints: Collection[int] = ()) -> None:
        """Say that everything is published; `metadata` (at most 64 KiB) travels to the decode engine with it.

        `checkpoints`: at how many tokens the engine has written a checkpoint, of those that `begin` asked for. With pools on a GPU
        it has done so in front of its last `publish`, on the same stream.

        The pages go to a later room once they are sent. With pools on a GPU, those of a room that ends otherwise do when the
        GPU has written what was published of it, of which this or a later call informs the node.
        """
        begun = self._begun.get(room)
        self._loads.forget(room)
        message = Finish(
            call=self._link.number(),
            room=room,
            metadata=metadata,
            by_gpu=begun is not None,
            checkpoints=tuple(checkpoints),
        )
        try:
            self._tell(message)
        finally:  # a room that is over by now is let go of like any other
            if begun is not None:
                generation, points = begun
                written = partial(self._order.passed, frozenset(points))
                self._deferred.send_when(written, f"release of room {room}", partial(self._release, room, generation))

    def _release(self, room: int, generation: int) -> None:
        self._say(Release(call=self._link.number(), room=room, generation=generation))
        if self._begun.get(room, (0,))[0] == generation:
            del self._begun[room]

    def abort(self, room: int, reason: str, *, again: bool = False, stream: StreamChoice = None) -> None:
        """Give a room up, as `Engine.abort` does."""
        super().abort(room, reason, again=again, stream=stream)
        self._begun.pop(room, None)

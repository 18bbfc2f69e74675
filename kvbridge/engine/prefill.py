"""The prefill engine, which begins or holds rooms, publishes rows while it computes, and finishes rooms."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvbridge.core.geometry.components import Component, Liveness, RowInterval
from kvbridge.core.geometry.pages import joined_tables, tables_from_wire
from kvbridge.core.ids import Role, Tables
from kvbridge.core.plan.operations import Section
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
from kvbridge.core.wire.messages import StreamPoint, to_wire
from kvbridge.engine.base import Engine, OwnPages, Room
from kvbridge.engine.streams import Load, StreamChoice
from kvbridge.engine.views import Part, parts_of, section_rows
from kvbridge.tier.keys import NO_KEYS, Keys


@dataclass(eq=False)
class PrefillRoom(Room):
    """A room that this engine computes or has computed. After `finish` or `abort` its pages are not the engine's any more."""

    held_by_decode: int = 0
    """Tokens that decode holds already, if its offer has come: their rows are not sent. Write them all the same, because later
    prompts may share the pages. Only rows of `held_by_prefill` need no writing."""
    held_by_prefill: int = 0
    """Tokens that this node holds already: the engine starts to compute there. Their rows are in `tables`, count as published, and
    must only be read."""
    restore: Tables = field(default_factory=dict)
    """Pages to start from, as tables of a request of `held_by_prefill` tokens: the same growing rows, and the windows and states at
    that token. Only read these pages, until `finish` or `abort`."""
    checkpoints: Mapping[int, Tables] = field(default_factory=dict)
    """Tokens, ascending, at which the node asks for a checkpoint, with the pages for each. An engine that has computed exactly so
    many tokens writes its windows and states there (`checkpoint_parts`) and names the checkpoint with `finish`. Later requests
    cannot start at a checkpoint that it leaves out."""
    _published: int = 0
    _published_layers: dict[int, int] = field(default_factory=dict)
    _points: set[StreamPoint] | None = None
    """Points after which a GPU has written the published rows; None: no GPU writes."""

    def final_parts(self, upto: int, *, layers: Collection[int] | None = None) -> Iterator[Part]:
        """Yield the rows that become final with the first `upto` tokens: those of `publish(upto)`, on all layers or `layers`.

        These are growing rows since the last publication, and with the prompt's last token windows and states.
        """

        def rows(component: Component, layer: int) -> RowInterval:
            start = max(self._published, self._published_layers.get(layer, 0))
            return section_rows(
                component, Section(prompt_tokens=self.prompt_tokens, start_token=min(start, upto), stop_token=upto)
            )

        return parts_of(self.engine.views, self.tables, rows, layers)

    def restored_parts(self) -> Iterator[Part]:
        """Yield the rows to start from: those of `held_by_prefill` tokens, with windows and states."""
        return parts_of(self.engine.views, self.restore, lambda part, _: part.live_rows(self.held_by_prefill))

    def checkpoint_parts(self, tokens: int) -> Iterator[Part]:
        """Yield the windows and states of the checkpoint at `tokens` tokens. Write them before the next `publish`."""

        def rows(component: Component, _: int) -> RowInterval:
            grows = component.liveness is Liveness.GROWING
            return RowInterval(start=0, stop=0) if grows else component.live_rows(tokens)

        return parts_of(self.engine.views, self.checkpoints[tokens], rows)

    def publish(
        self,
        upto: int,
        *,
        layers: Sequence[int] | None = None,
        pages: OwnPages | None = None,
        stream: StreamChoice = None,
    ) -> None:
        """Publish the first `upto` tokens: they are final in memory, on every layer or on `layers`.

        `pages` (adopted pools): further pages of the room, behind the pages before. The room only reads pages whose tokens are all
        published on every layer: other rooms may name them too, and nobody writes them until these rooms are over.

        With pools on a GPU the tokens are final after `stream` (default: the current one) has come to this point. Nobody reads them
        before, and this call does not wait.

        Raises InvalidInputError past the prompt, ConflictError backwards or when the room is over.
        """
        further = {} if pages is None else self.engine._own_tables(pages, behind=self.tables)
        self._say_published(upto, layers, self.engine._order.points(stream), further)
        self.tables = joined_tables(self.tables, further)
        if layers is None:
            self._published = upto
        else:
            self._published_layers |= dict.fromkeys(layers, upto)

    def _say_published(
        self,
        upto: int,
        layers: Sequence[int] | None,
        points: Mapping[str, StreamPoint],
        further: Tables,
    ) -> None:
        named = None if layers is None else tuple(layers)
        self.engine.say(Publish, self.id, upto_token=upto, layers=named, tables=to_wire(further), after=dict(points))
        if self._points is not None:
            self._points.update(points.values())

    def _load_began(self, load: Load) -> None:
        self._say_published(self.held_by_prefill, None, load.points, {})

    def finish(self, *, metadata: bytes = b"", checkpoints: Collection[int] = ()) -> None:
        """Say that everything is published. `metadata` (at most 64 KiB) travels to the decode engine with the last bytes.

        `checkpoints`: tokens of the written checkpoints, among those that the room asks for. With pools on a GPU, write them before
        the last `publish`, on the same stream.

        The pages go to a later room after they are sent. With pools on a GPU, pages of a failed room are used again after the GPU
        has written the published rows; this or a later call tells the node.
        """
        engine = self.engine
        engine._loads.forget(self.id)
        by_gpu = self._points is not None
        try:
            engine.say(Finish, self.id, metadata=metadata, by_gpu=by_gpu, checkpoints=tuple(checkpoints))
        finally:  # the engine lets go in the same way of a room that is over by now
            if self._points is not None:
                written = partial(engine._order.passed, frozenset(self._points))
                engine._deferred.send_when(written, f"release of room {self.id}", self._release)

    def _release(self) -> None:
        self.engine._say(Release(call=self.engine._link.number(), room=self.id, generation=self.generation))

    def abort(self, reason: str, *, again: bool = False, stream: StreamChoice = None) -> None:
        super().abort(reason, again=again, stream=stream)
        self._points = None


class PrefillEngine(Engine):
    """One prefill engine process. Synchronous, for one thread; no call takes longer than its timeout."""

    role = Role.PREFILL

    def admit(
        self,
        room: int,
        *,
        prompt_tokens: int,
        generation: int = 1,
        page_keys: Keys = NO_KEYS,
        namespace: str = "",
        retention: Retention | None = None,
    ) -> None:
        """Admit a room, as `POST /v1/requests` on the prefill daemon does. Raises CapacityError.

        `page_keys`: those of the prompt, with the same `namespace`. `retention`: priority of its cached pages, and for how long.
        """
        call = Admit(
            call=self._link.number(),
            room=room,
            generation=generation,
            prompt_tokens=prompt_tokens,
            page_hashes=page_keys.data,
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
        pages: OwnPages | None = None,
        held_by_prefill: int = 0,
        published_tokens: int = 0,
        metadata: bytes = b"",
    ) -> PrefillRoom:
        """Adopted pools: admit a room for a prompt that this engine computes or has computed, and hold its pages for decode.

        `pages`: the pages so far, as for `begin`; None: `begin` follows. `held_by_prefill`: as for `begin`. After computing the
        whole prompt, name all of it: the room only reads the pages then, and other requests may read them as well.
        `published_tokens`: tokens that are final in memory. The whole prompt finishes the room, and `metadata` travels as with
        `finish`; otherwise `publish`, with further pages, and `finish` follow. `prompt_digest`: at most 32 bytes that identify the
        prompt; a decode engine with another digest gets nothing.

        This does not wait. The pages are the room's until an event `completed`, `refused`, `aborted` or `failed`.
        """
        tables = None if pages is None else self._own_tables(pages)
        self.say(
            Hold,
            room,
            generation=generation,
            prompt_tokens=prompt_tokens,
            prompt_digest=prompt_digest,
            tables=None if tables is None else to_wire(tables),
            computed_tokens=held_by_prefill,
            published_tokens=published_tokens,
            metadata=metadata,
        )
        published = max(held_by_prefill, published_tokens)
        return PrefillRoom(
            self, room, generation, prompt_tokens, tables or {}, held_by_prefill=held_by_prefill, _published=published
        )

    def restorable(self, room: int) -> tuple[int, ...]:
        """Return the tokens at which an admitted room can start, ascending, always with 0; see `at_most` of `begin`.

        The answer is about this moment. At `begin`, only its last entry is sure.
        """
        return self._call(AskRestorable(call=self._link.number(), room=room), Restorable).tokens

    def begin(  # noqa: PLR0913 - each is something else that an engine may say of a room
        self,
        room: int,
        *,
        prompt_tokens: int,
        page_keys: Keys = NO_KEYS,
        pages: OwnPages | None = None,
        held_by_prefill: int = 0,
        at_most: int | None = None,
        by_layer: bool = False,
    ) -> PrefillRoom:
        """Start to compute an admitted room, and get its pages.

        `page_keys`: those of the tokens that this engine computes. Needed for a room that was admitted with keys, otherwise without
        effect. Other keys than the room's raise KeyMismatchError, and the room fails.

        `pages` (adopted pools): the engine's own pages for the room. `held_by_prefill` (adopted pools): tokens from the prompt's
        start in the engine's own prefix cache. The room only reads the pages that hold no other tokens, so other rooms may name
        them too; do not write these pages until all of these rooms have ended. Every other page belongs to one room alone.

        `at_most`: latest token to start at. Engines of an instance with several prefill nodes must start at the same token: they
        compare their answers of `restorable`, and all begin with the largest number in every answer. Raises CapacityError when
        there are no pages for the rest of the prompt.

        `by_layer`: see `host_tokens` and `wait_layer` of the room. Raises TransportError when the copies from host memory cannot be
        submitted; the room is given up then.

        Raises UnknownRoomError; ConflictError on a second begin, and with pools on a GPU for a room with an earlier attempt that
        was neither finished nor aborted; InvalidInputError when the lengths differ.
        """
        by_gpu = bool(self._order.devices)
        message = Begin(
            call=self._link.number(),
            room=room,
            prompt_tokens=prompt_tokens,
            page_hashes=page_keys.data,
            end_key=page_keys.end,
            tables=to_wire(self._own_tables(pages)) if pages is not None else (),
            computed_tokens=held_by_prefill,
            at_most=at_most,
            by_gpu=by_gpu,
        )
        answer = self._call(message, Pages)
        tables = tables_from_wire(answer.tables)
        begun = PrefillRoom(
            self,
            room,
            answer.generation,
            answer.prompt_tokens,
            tables,
            answer.host_tokens,
            answer.traceparent,
            held_by_decode=answer.prefix_tokens,
            held_by_prefill=answer.computed_tokens,
            restore=tables | tables_from_wire((answer.restore.table,) if answer.restore else ()),
            checkpoints={one.tokens: tables | tables_from_wire((one.table,)) for one in answer.checkpoints},
            _published=answer.computed_tokens,
            _points=set() if by_gpu else None,
        )
        self._load_back(begun, answer, by_layer=by_layer)
        return begun

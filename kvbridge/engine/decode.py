"""The decode engine, which claims rooms with all rows there, extends and releases them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, ConflictError, DeadlineError, InvalidInputError, RoomFailedError
from kvbridge.core.geometry.pages import tables_from_wire
from kvbridge.core.ids import Role, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.wire.engine_messages import Claim, Extend, Fetch, Pages, Provide, Release, SparseRows
from kvbridge.core.wire.messages import to_wire
from kvbridge.engine.base import Engine, OwnPages, Room
from kvbridge.engine.streams import StreamChoice
from kvbridge.engine.views import Part, parts_of
from kvbridge.tier.keys import NO_KEYS, Keys


@dataclass(eq=False)
class DecodeRoom(Room):
    """A claimed room. Its pages are the engine's until `release`, which the end of a `with` block calls.

    Other rooms may read whole pages of a prompt with page keys, and nobody writes these pages.
    """

    held_by_decode: int = 0
    """Prompt tokens that this node held already: their rows were not sent."""
    metadata: dict[str, bytes] = field(default_factory=dict)
    """Bytes from `finish` of each prefill rank's engine, by `str(rank)`."""
    amounts: Amounts = field(default_factory=dict)
    phases_s: dict[str, float] = field(default_factory=dict)
    _is_over: bool = False

    def parts(self, tokens: int | None = None, *, behind: int = 0) -> Iterator[Part]:
        """Yield the rows of a request of `tokens` tokens (default: the prompt). Rows of growing caches start at token `behind`."""
        count = self.prompt_tokens if tokens is None else tokens
        return parts_of(self.engine.views, self.tables, lambda component, _: component.live_rows(count, behind))

    def extend(self, tokens: int) -> Tables:
        """Reserve pages for `tokens` tokens (prompt and generated); return the new `tables`. Raises CapacityError.

        The table of window pages is a ring: at each length, `rotate_window` takes out the pages that `window_pages` names.
        """
        engine = self.engine
        pages = engine._call(Extend(call=engine._link.number(), room=self.id, tokens=tokens), Pages)
        self.tables = tables_from_wire(pages.tables)
        return self.tables

    def release(
        self,
        *,
        valid_tokens: int = 0,
        page_keys: Keys = NO_KEYS,
        sparse: SparseRows | None = None,
        stream: StreamChoice = None,
    ) -> None:
        """Say that the request has ended. Submit no more work that touches its pages.

        `valid_tokens`: tokens whose rows are complete in the pages: the prompt, and all generated tokens except the last, which was
        not fed. `page_keys`: the keys of these tokens. Without them, and in a room without keys, nothing of the answer is kept. All
        engines of the node must say the same. After InvalidInputError, KeyMismatchError and ConflictError nothing is kept, and the
        pages are released all the same. `sparse`: counts of a hot buffer (`SparseCache.release`), for the node's metrics.

        With pools on a GPU the pages are used again after `stream` (default: the current one) has come to this point. This call or
        a later one, `events` included, tells the node; this call does not wait.
        """
        self._is_over = True
        answer = {"valid_tokens": valid_tokens, "page_hashes": page_keys.data}
        number = self.engine._link.number()
        self.engine._let_go(Release(call=number, room=self.id, sparse=sparse, **answer), stream)

    def abort(self, reason: str, *, again: bool = False, stream: StreamChoice = None) -> None:
        self._is_over = True
        super().abort(reason, again=again, stream=stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Release the room unless it is over. An error of the block goes before an error of the release."""
        if self._is_over:
            return
        try:
            self.release()
        except BridgeError:
            if kind is None:
                raise


class DecodeEngine(Engine):
    """One decode engine process. Synchronous, for one thread; no call takes longer than its timeout.

    A room can be claimed once a `committed` event names it, or once `GET /v1/requests/{room}` says so.
    """

    role = Role.DECODE

    def fetch(  # noqa: PLR0913 - each is something else that an engine may say of a room
        self,
        room: int,
        *,
        prefill: Sequence[PeerAddress] = (),
        prompt_tokens: int = 0,
        prompt_digest: bytes = b"",
        generation: int = 1,
        held: bool = False,
        pages: OwnPages | None = None,
        held_by_decode: int = 0,
    ) -> None:
        """Adopted pools: admit a room that these prefill nodes hold or will hold, or name the pages of a room. This does not wait.

        `prefill` and `prompt_tokens` admit the room, as soon as the engine hears of the request. The prefill nodes hear at once
        that this node will come, and hold the room without a limit until pages are named, the room is aborted, or this process has
        ended. `prompt_digest`: as in prefill's `hold`; another digest fails the room. `held`: prefill has said that it holds the
        room, so a room that prefill does not know fails soon.

        `pages`: the engine's pages for the room, here or in a later call without `prefill`; also for a room whose `wanted` event
        asks for pages. They belong to the room until an event says that it is committed or over. `held_by_decode`: tokens from the
        start that the engine has already and that are not sent: a multiple of the geometry's `tokens_per_page`, at most the prompt,
        and 0 when a component is in host memory. Page ids begin behind these tokens.

        After the event `committed` the pages are this engine's, with all rows; after `refused`, `aborted` or `failed` nothing
        writes them any more.
        """
        tables = None
        if pages is not None:
            tables = to_wire(self._own_tables(pages, held_by_decode // self.geometry.tokens_per_page))
        if prefill:
            if prompt_tokens < 1:
                raise InvalidInputError(f"room {room}: to fetch it takes the length of its prompt (prompt_tokens)")
            self.say(
                Fetch,
                room,
                generation=generation,
                prompt_tokens=prompt_tokens,
                prompt_digest=prompt_digest,
                prefill=tuple(prefill),
                held=held,
                tables=tables,
                prefix_tokens=held_by_decode,
            )
        elif tables is None:
            raise InvalidInputError(f"room {room}: name the prefill nodes that hold it (prefill), its pages, or both")
        else:
            self.say(Provide, room, tables=tables, prefix_tokens=held_by_decode)

    def claim(
        self, room: int, *, timeout_s: float | None = None, page_keys: Keys = NO_KEYS, by_layer: bool = False
    ) -> DecodeRoom:
        """Take a room with all of its rows, waiting up to `timeout_s`; None: the room must be committed already.

        `page_keys`: those of the prompt as this engine has it. Needed for a room that was admitted with keys, otherwise without
        effect. Other keys than the room's raise KeyMismatchError, and the room fails.

        `by_layer`: see `host_tokens` and `wait_layer` of the room. Raises TransportError when the copies from host memory cannot be
        submitted; the room is given up then.

        Raises RoomFailedError, with the first cause, when the room ends first or the node refuses a call of this engine about it;
        ConflictError when the room is not committed yet and `timeout_s` is None, otherwise DeadlineError.
        """
        take = partial(self._claim, room, page_keys=page_keys, by_layer=by_layer)
        if timeout_s is None:
            return take()
        deadline_s = time.monotonic() + timeout_s
        with suppress(ConflictError):  # it may have been committed before we attached
            return take()
        while (left_s := deadline_s - time.monotonic()) > 0:
            for event in self._await_events(partial(self._link.first_event, room), left_s):
                if event.kind == "committed":
                    return take()
                if event.kind in {"aborted", "failed", "refused"}:
                    raise RoomFailedError(f"room {room} {event.kind}: {event.reason}")
        raise DeadlineError(f"room {room} was not committed within {timeout_s} s")

    def _claim(self, room: int, *, page_keys: Keys, by_layer: bool) -> DecodeRoom:
        claim = Claim(call=self._link.number(), room=room, page_hashes=page_keys.data, end_key=page_keys.end)
        answer = self._call(claim, Pages)
        claimed = DecodeRoom(
            self,
            room,
            answer.generation,
            answer.prompt_tokens,
            tables_from_wire(answer.tables),
            answer.host_tokens,
            answer.traceparent,
            held_by_decode=answer.prefix_tokens,
            metadata=answer.metadata,
            amounts=answer.amounts,
            phases_s=answer.phases_s,
        )
        self._load_back(claimed, answer, by_layer=by_layer)
        return claimed

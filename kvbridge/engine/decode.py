"""The decode engine's side of the bridge: claim, extend, release, abort.

Owns: the verbs. Must not know: how an engine computes, who the prefill side is.

A room can be claimed once a `committed` event names it, or once `GET /v1/requests/{room}` says so. From the claim to the
release its pages are the engine's alone, but for whole pages of a prompt that has page keys: others may read these, and nobody
writes them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import ConflictError, DeadlineError, RoomFailedError
from kvbridge.core.geometry.tables import tables_from_wire
from kvbridge.core.ids import Role, Tables
from kvbridge.core.plan.operations import Amounts
from kvbridge.core.wire.engine_messages import (
    Claim,
    Extend,
    Fetch,
    Pages,
    Provide,
    Release,
    SparseRows,
)
from kvbridge.core.wire.messages import to_wire
from kvbridge.engine.base import Engine
from kvbridge.engine.stream_order import StreamChoice
from kvbridge.tier.keys import NO_KEYS, Keys


@dataclass(frozen=True)
class DecodeRoom:
    """A claimed room: its pages, and what the prefill engine sent along."""

    room: int
    generation: int
    prompt_tokens: int
    prefix_tokens: int
    """Of the prompt, what this node held already and was not sent."""
    tables: Tables
    metadata: dict[str, bytes]
    """What each prefill rank's engine gave to `finish`, keyed by `str(rank)`."""
    amounts: Amounts
    phases_s: dict[str, float]
    host_tokens: int = 0
    """Of `prefix_tokens`, the last so many that were in the node's host memory alone and are loaded (see `by_layer` of `claim`)."""
    traceparent: str = ""
    """The room's span in W3C's form, for the engine's own spans to be parts of; empty when the request is not traced."""


class DecodeEngine(Engine):
    """One decode engine process. Synchronous, for one thread; no call takes longer than its timeout."""

    role = Role.DECODE

    def fetch(  # noqa: PLR0913 - each is something else that an engine may say of a room
        self,
        room: int,
        *,
        prompt_tokens: int,
        prefill: Sequence[PeerAddress],
        prompt_digest: bytes = b"",
        generation: int = 1,
        held: bool = False,
        tables: Tables | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        """Adopted pools: admit a room that these prefill nodes hold, or will. They hear at once that this node will come for it.

        They hold it then without a limit, until `tables` are named, here or by `provide`, or the room is aborted, or this process
        has ended. Events say the rest: `committed`, when the pages are this engine's with all that is to be in them, else
        `refused`, `aborted` or `failed`: then nothing writes them any more. `prompt_digest`: as prefill's `hold` has it, else the
        room fails. `held`: prefill has said that it holds the room, so that one which it does not know fails soon.
        """
        call = Fetch(
            call=self._link.number(),
            room=room,
            generation=generation,
            prompt_tokens=prompt_tokens,
            prompt_digest=prompt_digest,
            prefill=tuple(prefill),
            held=held,
            tables=None if tables is None else to_wire(tables),
            prefix_tokens=prefix_tokens,
        )
        self._tell(call)

    def provide(self, room: int, tables: Tables, *, prefix_tokens: int = 0) -> None:
        """Adopted pools: name the device pages of a room that this engine fetches, or that a `wanted` event asked for.

        They are the room's until an event says that it is committed or over.

        `prefix_tokens`: so many tokens from the start the engine has already, and need not be sent: a multiple of the geometry's
        `tokens_per_page`, at most the prompt, and 0 where a component lives in the node's host pool. The tables may begin behind
        them.
        """
        call = Provide(call=self._link.number(), room=room, tables=to_wire(tables), prefix_tokens=prefix_tokens)
        self._tell(call)

    def claim(self, room: int, *, page_hashes: Keys = NO_KEYS, by_layer: bool = False) -> DecodeRoom:
        """Take a committed room. Raises RoomFailedError with the first cause, ConflictError when it is not committed yet.

        `page_hashes`: the `page_keys` of the request's prompt as this engine has it. Needed for a room that was admitted with keys,
        else without effect. Raises KeyMismatchError, and the room fails, when they are others.

        What the node holds of the prompt in host memory alone, though it belongs on the device, is loaded by copies on a GPU stream
        of their own. The current stream of each GPU waits for all of them. `by_layer`: it does not, and the engine calls
        `wait_layer` before it touches a layer of the room. With pools in host memory all is there when this returns. Raises
        TransportError when the copies cannot be submitted; the room is given up then.
        """
        claim = Claim(call=self._link.number(), room=room, page_hashes=page_hashes.data, end_key=page_hashes.end)
        pages = self._call(claim, Pages)
        self._load_back(room, pages, by_layer=by_layer)
        return DecodeRoom(
            room,
            pages.generation,
            pages.prompt_tokens,
            pages.prefix_tokens,
            tables_from_wire(pages.tables),
            pages.metadata,
            pages.amounts,
            pages.phases_s,
            pages.host_tokens,
            pages.traceparent,
        )

    def wait_claim(
        self, room: int, timeout_s: float, *, page_hashes: Keys = NO_KEYS, by_layer: bool = False
    ) -> DecodeRoom:
        """Wait until a room is committed and claim it.

        Raises RoomFailedError when it ends first, or when the node refuses what this engine has said of it; else DeadlineError.
        `page_hashes`, `by_layer` and what else is raised: as `claim`.
        """
        deadline_s = time.monotonic() + timeout_s
        claim = partial(self.claim, room, page_hashes=page_hashes, by_layer=by_layer)
        with suppress(ConflictError):  # it may have been committed before we attached
            return claim()
        while (left_s := deadline_s - time.monotonic()) > 0:
            for event in self._await_events(partial(self._link.first_event, room), left_s):
                if event.kind == "committed":
                    return claim()
                if event.kind in {"aborted", "failed", "refused"}:
                    raise RoomFailedError(f"room {room} {event.kind}: {event.reason}")
        raise DeadlineError(f"room {room} was not committed within {timeout_s} s")

    def extend(self, room: int, tokens: int) -> Tables:
        """Make room for `tokens` tokens in all (prompt and generated) and return the tables. Raises CapacityError.

        The table of window pages is a ring: at each length, `rotate_window` takes the pages out of it that `window_pages` names.
        """
        pages = self._call(Extend(call=self._link.number(), room=room, tokens=tokens), Pages)
        return tables_from_wire(pages.tables)

    def release(
        self,
        room: int,
        *,
        valid_tokens: int = 0,
        page_hashes: Keys = NO_KEYS,
        sparse: SparseRows | None = None,
        stream: StreamChoice = None,
    ) -> None:
        """Say that the request is over: submit nothing more that touches its pages.

        `valid_tokens`: so many tokens have all their rows in the pages: the prompt's, and those that were *fed* after it, which are
        one less than were produced. `page_hashes`: the `page_keys` of these tokens. Without them, and in a room without keys,
        nothing of the answer is kept. All engines of the node have to say the same. InvalidInputError, KeyMismatchError and
        ConflictError mean that nothing is kept; the pages are let go of all the same.

        `sparse`: what a hot buffer did for it (`SparseCache.release`), for the node's metrics.

        With pools on a GPU the pages are used again when `stream` (default: the current one) has come to this point. The node
        is told by this call or by a later one, `events` included; this call does not wait.
        """
        answer = {"valid_tokens": valid_tokens, "page_hashes": page_hashes.data}
        self._let_go(Release(call=self._link.number(), room=room, sparse=sparse, **answer), stream)

"""Decode's rooms: prompts that are computed elsewhere, from the arrival of their requests until their loads are reported.

Decode says at once that it will fetch a room, and names its blocks when vLLM has allocated them. vLLM waits for named blocks, so no
transfer is under way for a request that vLLM may preempt. A load is over when the worker reports it (`kit.transfers`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto
from typing import Any

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import InvalidInputError
from kvbridge.core.ids import Role
from kvbridge.core.session.tables import WITHDRAWN
from kvbridge.core.wire.engine_messages import Fetch as FetchCall, Provide, RoomEvent
from kvbridge.engine.kit.transfers import Transfer
from kvbridge.engine.vllm.groups import RoomBlocks
from kvbridge.engine.vllm.requests import Instance, Request, Source, source_of
from kvbridge.engine.vllm.rooms import NO_NODE, RoomsOfRole, full_tables

MOST_WITHDRAWALS = 4_096
"""Limit of withdrawals kept for a node that is starting again. Prefill holds forgotten rooms for its `timeouts.offer_s`."""


class FetchState(StrEnum):
    """Progress of a request whose prompt is computed elsewhere."""

    INTENDED = auto()
    """Prefill knows that we will fetch the room. There are no blocks yet."""
    STARTED = auto()
    """Blocks are named. vLLM waits for one report, whatever happens to the request."""
    ABANDONED = auto()
    """Blocks are named, and the request has ended."""
    OVER = auto()
    """The load is reported or was not needed: the request is like any other now."""


@dataclass(slots=True)
class Fetch:
    """The room of one request."""

    request: Request
    source: Source
    order: RoomBlocks
    state: FetchState = FetchState.INTENDED
    generation: int = 1
    provided: int = 0
    """Generation that has got the blocks."""
    blocks: tuple[int, ...] = ()
    """Named blocks, from the room's page `first` on."""
    first: int = 0
    refused: str = ""
    """Reason why no bytes will come; empty: they may come."""


class DecodeRooms(RoomsOfRole):
    """For the scheduler's thread only."""

    role = Role.DECODE

    def __init__(self, instance: Instance, *parts: Any) -> None:
        super().__init__(instance, *parts)
        self._allowed = instance.allowed_prefill
        self._of: dict[str, Fetch] = {}
        self._withdrawals: OrderedDict[int, Mapping[str, Any]] = OrderedDict()
        """Rooms that prefill holds and nobody will fetch, with fields of `Fetch`, until a node has been told."""

    @property
    def idle(self) -> bool:
        owes = self.node and self._withdrawals
        return super().idle and not owes and all(fetch.state is FetchState.OVER for fetch in self._of.values())

    def _node_lost(self) -> None:
        for fetch in self._of.values():
            if fetch.state is FetchState.INTENDED:
                fetch.refused = fetch.refused or "the node process has ended"

    def _is_unknown(self, refused: RoomEvent) -> bool:
        fetch = self._fetch_of(refused.room)
        if fetch is None:
            return True
        if refused.generation != fetch.generation and (refused.generation or fetch.provided != fetch.generation):
            return False  # the refusal is about a generation that is over
        if not fetch.refused:
            fetch.refused = refused.reason
            self._give_up(refused.room, refused.reason)
        return True

    def _over(self, event: RoomEvent) -> None:
        """When prefill computes the prompt again, fetch the next generation into the same blocks."""
        fetch = self._fetch_of(event.room)
        if event.code != WITHDRAWN or fetch is None or event.generation != fetch.generation:
            return
        fetch.generation += 1
        if fetch.state is FetchState.ABANDONED:
            fetch.refused = fetch.refused or "its request was aborted"
        if not fetch.refused:
            self._fetch(fetch)
        if fetch.refused and fetch.state is not FetchState.INTENDED:
            self._refused.setdefault(event.room, fetch.refused)

    def _fetch_of(self, room: int) -> Fetch | None:
        return next((fetch for fetch in self._of.values() if fetch.source.room == room), None)

    def _fetch(self, fetch: Fetch) -> None:
        """Fetch the room, into our blocks if there are any. Without a node, withdraw it later."""
        named = _named(
            len(fetch.order) * self._page_tokens,
            fetch.request.prompt_digest,
            fetch.source.prefill,
            fetch.generation,
        )
        told = self._say(
            FetchCall,
            fetch.source.room,
            **named,
            held=fetch.source.held and fetch.generation == 1,
            tables=full_tables(fetch.blocks, fetch.first) if fetch.state is FetchState.STARTED else None,
            prefix_tokens=fetch.first * self._page_tokens,
        )
        if not told:
            fetch.refused = NO_NODE
            self._withdraw(fetch.source.room, named)

    def _withdraw(self, room: int, named: Mapping[str, Any]) -> None:
        """Tell prefill, now or when a node is attached, that nobody fetches a room: fetch it and give it up."""
        self._withdrawals[room] = named
        if len(self._withdrawals) > MOST_WITHDRAWALS:
            self._withdrawals.popitem(last=False)
        self._begin_step()

    def _begin_step(self) -> None:
        while self.node and self._withdrawals:
            room, named = next(iter(self._withdrawals.items()))
            if not self._say(FetchCall, room, **named):
                return
            self._give_up(room, "decode does not fetch it")
            del self._withdrawals[room]

    def arrived(self, request: Request) -> None:
        """A request has come. When its prompt is computed elsewhere, tell prefill that we fetch it, so that prefill waits.

        Raises InvalidInputError for a room that cannot be read, that is not allowed or that another request has.
        """
        source = source_of(request)
        if source is None or request.id in self._of:
            return
        self._require_allowed(source)
        self._require_new(source.room)
        fetch = self._of[request.id] = Fetch(request, source, self._groups.of(request.tokens))
        self._fetch(fetch)

    def declined(self, request: Request) -> None:
        """A request has come that the API has refused: tell prefill that nobody fetches its room.

        Such a request comes with another prompt, so only prefill's own answer identifies the room. In paired order the client has
        asked prefill as well. Raises the errors of `arrived`.
        """
        source = source_of(request)
        if source is None or not source.prompt_tokens or source.room in self._seen:
            return  # the API also refuses a request that has come already, when its client leaves
        self._require_allowed(source)
        self._require_new(source.room)
        self._withdraw(source.room, _named(source.prompt_tokens, bytes.fromhex(source.prompt_digest), source.prefill))

    def _require_allowed(self, source: Source) -> None:
        wrong = [
            one.endpoint for one in source.prefill if self._allowed is not None and one.endpoint not in self._allowed
        ]
        if wrong:
            raise InvalidInputError(
                f"room {source.room} is said to be at {', '.join(wrong)}, which is not in allowed_prefill"
            )

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return how many tokens after those in vLLM's cache will be loaded, asynchronously. May be asked any number of times.

        0 once blocks were named, also after a failed load and after preemption.
        """
        fetch = self._of.get(request.id)
        if fetch is None or fetch.state is not FetchState.INTENDED or computed_tokens % self._groups.block_tokens:
            return 0
        return max(0, request.tokens - computed_tokens)

    def allocated(self, request: Request, blocks: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Blocks are allocated: all blocks of the request, for each group from the prompt's first on.

        `external_tokens`: tokens to load. vLLM calls this once more when they are there.
        """
        fetch = self._of.get(request.id)
        if fetch is None or fetch.state is not FetchState.INTENDED:
            return
        room = fetch.source.room
        if not external_tokens:
            fetch.state = FetchState.OVER
            self._give_up(room, "decode has all of the prompt")
            return
        fetch.first = fetch.order.within(request.tokens - external_tokens)
        fetch.blocks = fetch.order.pick(blocks, fetch.first)
        fetch.state, fetch.provided = FetchState.STARTED, fetch.generation
        self._begun.append(Transfer(request.id, room, self.node, fetch.generation, is_load=True))
        if not fetch.refused:
            fetch.refused = self._provide(fetch)
            if fetch.refused:
                self._give_up(room, fetch.refused)
        if fetch.refused:
            self._refused.setdefault(room, fetch.refused)

    def _provide(self, fetch: Fetch) -> str:
        """Name the blocks. Return why that failed; empty: it did not."""
        needed = len(fetch.order) - fetch.first
        if len(fetch.blocks) != needed:
            return f"vLLM allocated {len(fetch.blocks)} blocks where the prompt needs {needed}"
        tables = full_tables(fetch.blocks, fetch.first)
        told = self._say(Provide, fetch.source.room, tables=tables, prefix_tokens=fetch.first * self._page_tokens)
        return "" if told else NO_NODE

    def lost(self, request: str, reason: str) -> None:
        fetch = self._of.get(request)
        if fetch is None or fetch.state is FetchState.OVER:
            return
        if fetch.state is FetchState.INTENDED:
            fetch.state = FetchState.OVER
        if not fetch.refused:
            fetch.refused = reason
            self._give_up(fetch.source.room, reason)

    def finished(self, request: str) -> None:
        """The request has ended, so end its transfer. A load is still reported."""
        fetch = self._of.get(request)
        if fetch is None:
            return
        if fetch.state is FetchState.STARTED:
            fetch.state = FetchState.ABANDONED
        else:
            del self._of[request]
        if fetch.state is not FetchState.OVER:
            self._give_up(fetch.source.room, "its request was aborted")

    def reported(self, received: Collection[str]) -> None:
        """A worker has reported these loads."""
        for request in received:
            fetch = self._of.get(request)
            if fetch is not None and fetch.state is FetchState.ABANDONED:
                del self._of[request]
            elif fetch is not None:
                fetch.state = FetchState.OVER


def _named(
    prompt_tokens: int, prompt_digest: bytes, prefill: Sequence[PeerAddress], generation: int = 1
) -> dict[str, Any]:
    return {
        "generation": generation,
        "prompt_tokens": prompt_tokens,
        "prompt_digest": prompt_digest,
        "prefill": tuple(prefill),
    }

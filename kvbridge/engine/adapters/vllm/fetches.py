"""Decode's rooms: prompts that are computed elsewhere, from the arrival of their requests until their loads are reported.

Owns: how far each of them is. Must not know: vLLM, sockets, when a load is over (`worker_side`), prefill's rooms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum, auto

from kvbridge.core.errors import BridgeError
from kvbridge.core.wire.engine_messages import RoomEvent
from kvbridge.engine.adapters.vllm.node_line import NodeLine, Withdrawal
from kvbridge.engine.adapters.vllm.prompts import room_tokens
from kvbridge.engine.adapters.vllm.requests import Load, Request, Source, full_tables


class FetchState(StrEnum):
    """How far a request is whose prompt was computed elsewhere."""

    INTENDED = auto()
    """Prefill knows that we will come; there are no blocks yet."""
    STARTED = auto()
    """Blocks are named: vLLM waits for one report, whatever becomes of the request."""
    ABANDONED = auto()
    """The same, and the request is gone."""
    OVER = auto()
    """Reported, or not needed: from now on it is a request like any other."""


@dataclass(slots=True)
class Fetch:
    """The room of one request."""

    request: Request
    source: Source
    state: FetchState = FetchState.INTENDED
    generation: int = 1
    provided: int = 0
    """The generation for which `provide` named the blocks."""
    blocks: tuple[int, ...] = ()
    """Those that are named, from the prompt's block `first` on."""
    first: int = 0
    refused: str = ""
    """Why nothing will come."""


class Fetches:
    """For the scheduler's thread only. See `SchedulerSide` for what its methods are called for."""

    def __init__(self, node: NodeLine, block_tokens: int) -> None:
        self._node = node
        self._size = block_tokens
        self._of: dict[str, Fetch] = {}
        self._loads: list[Load] = []
        self._refused: dict[int, str] = {}

    def __contains__(self, request: object) -> bool:
        return request in self._of

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing is to be said."""
        said = self._loads or self._refused
        return not said and all(fetch.state is FetchState.OVER for fetch in self._of.values())

    def take(self) -> tuple[list[Load], dict[int, str]]:
        """Return what has begun since the last call, and which rooms come to nothing, and why."""
        begun, self._loads = self._loads, []
        refused, self._refused = self._refused, {}
        return begun, refused

    # ------------------------------------------------------------------ the node

    def node_lost(self) -> None:
        """It is gone, with the rooms that it had."""
        for fetch in self._of.values():
            if fetch.state is FetchState.INTENDED:
                fetch.refused = fetch.refused or "the node process has ended"

    def refusal(self, event: RoomEvent) -> bool:
        """Take a refusal. Returns whether it is of a room of ours."""
        fetch = self._fetch_of(event.room)
        if fetch is None:
            return False
        if event.generation == fetch.generation or (not event.generation and fetch.provided == fetch.generation):
            # The room's pages are known to nobody. What was said of a generation that is over means nothing.
            self._refused.setdefault(event.room, event.reason)
            if not fetch.refused:
                fetch.refused = event.reason
                self._node.give_up(event.room, event.reason)
        return True

    def withdrawn(self, event: RoomEvent) -> None:
        """Prefill computes the prompt again: come for the next generation, with the same blocks."""
        fetch = self._fetch_of(event.room)
        if fetch is None or event.generation != fetch.generation:
            return
        fetch.generation += 1
        if fetch.state is FetchState.ABANDONED:
            fetch.refused = fetch.refused or "its request was aborted"
        if not fetch.refused:
            fetch.refused = self._fetch(fetch)
        if fetch.refused and fetch.state is not FetchState.INTENDED:
            self._refused.setdefault(event.room, fetch.refused)

    def _fetch_of(self, room: int) -> Fetch | None:
        return next((fetch for fetch in self._of.values() if fetch.source.room == room), None)

    def _fetch(self, fetch: Fetch) -> str:
        """Say that we will come, with our blocks where there are any; return why that could not be said. Then prefill is told."""
        said = Withdrawal(
            generation=fetch.generation,
            prompt_tokens=room_tokens(fetch.request.prompt_tokens, self._size),
            prompt_digest=fetch.request.prompt_digest,
            prefill=fetch.source.prefill,
        )
        try:
            self._node.require()
            self._node.calls.fetch(
                fetch.source.room,
                **said.named,
                held=fetch.source.held and fetch.generation == 1,
                tables=full_tables(fetch.blocks, fetch.first) if fetch.state is FetchState.STARTED else None,
                prefix_tokens=fetch.first * self._size,
            )
        except BridgeError as error:
            self._node.withdraw(fetch.source.room, said)
            return str(error)
        return ""

    # ------------------------------------------------------------------ requests

    def arrived(self, request: Request, source: Source) -> None:
        """A request has come: prefill hears that we will come for it, and waits without a limit."""
        fetch = self._of[request.id] = Fetch(request, source)
        fetch.refused = self._fetch(fetch)

    def matched_tokens(self, request: Request, computed_tokens: int) -> int:
        """Return how many tokens behind those in vLLM's cache will be loaded."""
        fetch = self._of.get(request.id)
        if fetch is None or fetch.state is not FetchState.INTENDED or computed_tokens % self._size:
            return 0
        return max(0, request.prompt_tokens - computed_tokens)

    def allocated(self, request: Request, blocks: Sequence[int], external_tokens: int) -> None:
        """The request has blocks: all of them, from the prompt's first on."""
        fetch = self._of.get(request.id)
        if fetch is None or fetch.state is not FetchState.INTENDED:
            return
        room = fetch.source.room
        if not external_tokens:
            fetch.state = FetchState.OVER
            self._node.give_up(room, "decode has all of the prompt")
            return
        fetch.first = (request.prompt_tokens - external_tokens) // self._size
        pages = room_tokens(request.prompt_tokens, self._size) // self._size
        # By place, never from the end: there may be further blocks behind the prompt's.
        fetch.blocks = tuple(blocks[fetch.first : pages])
        fetch.state, fetch.provided = FetchState.STARTED, fetch.generation
        self._loads.append(Load(request.id, room, fetch.blocks, self._node.incarnation, fetch.generation))
        if not fetch.refused:
            fetch.refused = self._provide(fetch, pages)
            if fetch.refused:
                self._node.give_up(room, fetch.refused)
        if fetch.refused:
            self._refused.setdefault(room, fetch.refused)

    def _provide(self, fetch: Fetch, pages: int) -> str:
        """Name the blocks; return why they could not be."""
        if len(fetch.blocks) != pages - fetch.first:
            return f"vLLM allocated {len(fetch.blocks)} blocks where the prompt needs {pages - fetch.first}"
        try:
            self._node.require()
            tables = full_tables(fetch.blocks, fetch.first)
            self._node.calls.provide(fetch.source.room, tables, prefix_tokens=fetch.first * self._size)
        except BridgeError as error:
            return str(error)
        return ""

    def lost(self, request: str, reason: str) -> None:
        """See SchedulerSide."""
        fetch = self._of.get(request)
        if fetch is None or fetch.state is FetchState.OVER:
            return
        if fetch.state is FetchState.INTENDED:
            fetch.state = FetchState.OVER
        if not fetch.refused:
            fetch.refused = reason
            self._node.give_up(fetch.source.room, reason)

    def finished(self, request: str) -> None:
        """The request has ended, and with it whatever is under way for it, but for its report."""
        fetch = self._of.get(request)
        if fetch is None:
            return
        if fetch.state is FetchState.STARTED:
            fetch.state = FetchState.ABANDONED
        else:
            del self._of[request]
        if fetch.state is not FetchState.OVER:
            self._node.give_up(fetch.source.room, "its request was aborted")

    def reported(self, received: Collection[str]) -> None:
        """A worker has reported these loads."""
        for request in received:
            fetch = self._of.get(request)
            if fetch is not None and fetch.state is FetchState.ABANDONED:
                del self._of[request]
            elif fetch is not None:
                fetch.state = FetchState.OVER

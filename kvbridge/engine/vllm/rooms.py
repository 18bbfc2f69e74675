"""The rooms at a node of one role in vLLM's scheduler process: the node to talk to, and the news for the workers.

Nothing here waits. A refusal by the node arrives as an event; so does a call that no message can express.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.ids import IndexSpace, PageTable, Role, Tables
from kvbridge.core.wire.engine_messages import AbortRoom, RoomEvent
from kvbridge.core.wire.messages import REASON_CHARS
from kvbridge.engine.kit import Guard
from kvbridge.engine.kit.attachment import NodeAttachment
from kvbridge.engine.kit.node import Node
from kvbridge.engine.kit.transfers import IDLE_LOOK_S, LAST_EVENTS, StepMetadata, Transfer
from kvbridge.engine.link import RoomCall
from kvbridge.engine.vllm.requests import Instance
from kvbridge.engine.vllm.stats import TransferStats

ROOMS_REMEMBERED = 65_536
"""Limit of remembered rooms. A request that names a remembered room of another request computes its prompt itself."""
NO_NODE = "there is no node process; it is being started again"


def full_tables(blocks: Sequence[int], first: int) -> Tables:
    """Return a prompt's blocks, from block `first` on, as tables."""
    return {IndexSpace.FULL: PageTable(IndexSpace.FULL, np.array(blocks, dtype=np.int32), first)}


class RoomsOfRole(ABC):
    """For the scheduler's thread only."""

    role: ClassVar[Role]

    def __init__(
        self, instance: Instance, node: Node, attachment: NodeAttachment, stats: TransferStats, guard: Guard
    ) -> None:
        self.process = node
        self.attachment = attachment
        self.node = ""
        """Incarnation of the node that gets our calls; empty while there is none."""
        self.addresses: tuple[PeerAddress, ...] = ()
        """Addresses of a prefill node for decode."""
        self._groups = instance.groups
        self._page_tokens = instance.groups.page_tokens
        self._ranks = instance.ranks
        self._stats = stats
        self._guard = guard
        self._known = ""
        self._next_look_s = 0.0
        self._seen: OrderedDict[int, None] = OrderedDict()
        self._begun: list[Transfer] = []
        self._refused: dict[int, str] = {}
        self._closed_by: dict[str, set[int]] = {}
        self._closed: list[str] = []
        self._ended: list[RoomEvent] = []

    def look(self, *, at_step: bool = False) -> None:
        """Take the node's events, and note when another node is there. `at_step`: seldom while nothing is under way."""
        if at_step:
            if self.idle and time.monotonic() < self._next_look_s:
                return
            self._next_look_s = time.monotonic() + IDLE_LOOK_S
        events = self.attachment.events()
        self._stats.heard(events)
        for event in events:
            if event.kind == "refused" and self._is_unknown(event):
                self._refused.setdefault(event.room, event.reason)
            elif event.kind in LAST_EVENTS:
                self._ended.append(event)
                self._over(event)
        node = self.attachment.node
        if node == self._known:
            return
        if self._known:
            self._lose_node()
        self._known = ""
        if node:
            with suppress(BridgeError):  # the node has not said yet where it is
                control = self.process.endpoint().control
                self.addresses = () if control is None else (control,)
                self.node = self._known = node

    def closed(self, rank: int, nodes: Iterable[str]) -> None:
        """A rank moves nothing any more for these incarnations of the node."""
        for node in nodes:
            ranks = self._closed_by.setdefault(node, set())
            ranks.add(rank)
            if len(ranks) == self._ranks:
                del self._closed_by[node]
                self._closed.append(node)
                if node == self.node:
                    self._lose_node()
                self._all_closed(node)

    def _lose_node(self) -> None:
        self.node = ""
        self._node_lost()

    def _say(self, kind: type[RoomCall], room: int, **fields: Any) -> bool:
        """Tell the node; return False when there is none."""
        return bool(self.node) and self.attachment.say(kind, room, **fields)

    def _give_up(self, room: int, reason: str, *, again: bool = False) -> None:
        """Tell the node. Without a node nothing is to do, because the other side notices that the node is gone."""
        self._say(AbortRoom, room, reason=reason[:REASON_CHARS], again=again)

    @abstractmethod
    def _node_lost(self) -> None:
        """The node is gone, with its rooms. Its transfers are over once every rank says so."""

    def _all_closed(self, node: str) -> None:  # noqa: B027 - decode has nothing to do then
        """No rank moves anything any more for that incarnation of the node."""

    @abstractmethod
    def _is_unknown(self, refused: RoomEvent) -> bool:
        """Take a refusal. Return whether nobody knows the room's pages now."""

    @abstractmethod
    def _over(self, event: RoomEvent) -> None:
        """An attempt at a room is over: nobody reads or writes its pages any more."""

    def _require_new(self, room: int) -> None:
        if room in self._seen:
            raise InvalidInputError(f"another request has room {room}")
        self._seen[room] = None
        if len(self._seen) > ROOMS_REMEMBERED:
            self._seen.popitem(last=False)

    @abstractmethod
    def lost(self, request: str, reason: str) -> None:
        """End what has begun for a request because a hook has failed, and begin nothing more.

        A request without blocks for a load is computed here. vLLM waits for a load that has begun, and gets its room's last event.
        """

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing is left to tell."""
        return not (self._begun or self._refused or self._closed or self._ended or self._stats.holds)

    def step(self) -> StepMetadata:
        """Return the news for the workers, and begin the next step."""
        with self._guard.over("step"):
            self._begin_step()
        told = StepMetadata(tuple(self._begun), tuple(self._refused.items()), tuple(self._closed), tuple(self._ended))
        self._begun, self._refused, self._closed, self._ended = [], {}, [], []
        return told

    @abstractmethod
    def _begin_step(self) -> None:
        """Tell the node what could not be told before."""

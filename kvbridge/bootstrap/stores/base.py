"""The contract of a store of the directory: each change is a compare-and-set, and time is the store's own.

Replicas share a store and nothing else, no clock either. Every method is one atomic step, so a caller never has to hold anything
between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from kvbridge.api.directory import NodeHeartbeat, Ticket
from kvbridge.bootstrap.nodes import NodeEntry, NodeKey, NodeRecord

NOTE_KEEP_S: Final = 3600.0
"""A beginning of prompts that has not come again for so long is forgotten."""
NOTE_INSTANCES: Final = 16
"""Instances, of both roles together, that are remembered as the last to get a beginning."""
NOTES: Final = 200_000
"""Beginnings of prompts that a store remembers, some 400 bytes each; those that came longest ago are forgotten first."""


class PairingState(StrEnum):
    """State of a room at bootstrap."""

    PAIRING = "pairing"
    PAIRED = "paired"
    CANCELLED = "cancelled"
    """Its id may be used again, in a later generation."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to pair one room now, with generations of its own that nobody else uses."""

    room: int
    owner: str
    """Drawn for this claim."""
    base: int
    """The generations base + 1 to base + `generations` are the claim's."""


@dataclass(frozen=True, slots=True)
class RoomInUse:
    """Why a room cannot be claimed."""

    age_s: float
    """How long ago it was claimed."""


@dataclass(frozen=True, slots=True)
class RoomTimes:
    """How long rooms are remembered, and how many."""

    claim_s: float
    """A claim that has not ended after this belongs to a replica that died: the room may be claimed again."""
    keep_s: float
    """A room is forgotten so long after it was last claimed."""
    max_rooms: int
    """Cancelled ones are forgotten first, then the oldest; a room that is being paired is not."""


class Store(Protocol):
    """Nodes that are alive, and rooms that were paired or are being paired.

    A node that is silent for longer than the store was told is not there any more. Every method of a shared store raises
    NotReadyError when the store cannot be asked now.
    """

    async def close(self) -> None:
        """Let go of what the store holds open."""

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """Return all nodes, in any order: the larger the fleet, the more a look at all costs."""

    async def look(self, keys: Sequence[NodeKey]) -> tuple[NodeRecord, ...]:
        """Return those of these nodes that are alive, in any order. The cost does not depend on the fleet's size."""

    async def of_instance(self, instance: str) -> tuple[str, tuple[NodeRecord, ...]]:
        """Return the nodes of one instance, and before them the version to give with a change that was decided on them."""

    async def put(self, entry: NodeEntry, *, version: str) -> bool:
        """Add or replace a node, unless its instance has changed since `version`; return whether that was done."""

    async def beat(self, key: NodeKey, heartbeat: NodeHeartbeat) -> NodeRecord | None:
        """Note that a node lives, if it is of the heartbeat's incarnation; return the record of the name now, if there is one."""

    async def remove(self, key: NodeKey, incarnation: str) -> bool:
        """Take a node off if it is of this incarnation; return whether it was."""

    async def charge(self, pages: Mapping[NodeKey, Mapping[str, int]]) -> None:
        """Count one room of so many pages (by node, by index space) against nodes until their next heartbeats."""

    async def expire(self) -> tuple[NodeKey, ...]:
        """Forget silent nodes and return their keys; each is returned once, to one caller."""

    async def claim(self, room: int, *, generations: int) -> Claim | RoomInUse:
        """Begin to pair a room that nobody uses, with so many generations above all that were used before."""

    async def settle(self, claim: Claim, ticket: Ticket, page_keys: Sequence[bytes] = ()) -> bool:
        """Keep the ticket of a claimed room; False, and nothing kept, when another claim has taken the room.

        With it is noted under `page_keys` that its two instances have the beginnings of prompts which these keys name.
        """

    async def give_up(self, claim: Claim, generation: int) -> None:
        """End a claim without a ticket: the id may be used again, above `generation`. Harmless when another claim has it."""

    async def ticket(self, room: int) -> Ticket | None:
        """Return the ticket of a room that is remembered, with the time that it has now."""

    async def cancelled(self, room: int, generation: int) -> None:
        """Free the id of a room that was paired in this generation; harmless when it is in another one."""

    async def noted(self, page_keys: Sequence[bytes]) -> tuple[Mapping[str, float], ...]:
        """Return who was given prompts that begin so, for each key: seconds ago, by instance."""

    async def room_counts(self) -> dict[PairingState, int]:
        """Forget rooms older than they are kept; return how many are remembered, by what became of them."""

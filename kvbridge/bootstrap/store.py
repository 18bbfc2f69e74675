"""The directory store: nodes that are alive and rooms that were paired. `MemoryStore` documents what both stores promise.

Replicas share a store and nothing else, no clock either: each method is one atomic step, each change a compare-and-set, and time is
the store's own. Every method of a shared store raises NotReadyError while the store does not answer.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from kvbridge.api.directory import NodeHeartbeat, Ticket
from kvbridge.bootstrap.nodes import NodeEntry, NodeKey, NodeRecord
from kvbridge.core.process import Clock, monotonic

if TYPE_CHECKING:
    from kvbridge.bootstrap.redis_store import RedisStore

Store: TypeAlias = "MemoryStore | RedisStore"

NOTE_KEEP_S: Final = 3600.0
"""A note about the beginning of a prompt is forgotten when no such prompt has come for so long."""
NOTE_INSTANCES: Final = 16
"""The most instances, of both roles together, that one note names."""
NOTES: Final = 200_000
"""The most notes that a store keeps, some 400 bytes each; the oldest are forgotten first."""


class PairingState(StrEnum):
    """State of a room at bootstrap."""

    PAIRING = "pairing"
    PAIRED = "paired"
    CANCELLED = "cancelled"
    """The room's id may be used again, in a later generation."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right of one bootstrap to pair one room now."""

    room: int
    owner: str
    """Drawn for this claim."""
    base: int
    """The generations base + 1 to base + `generations` are the claim's alone."""


class RoomInUse(NamedTuple):
    """The reason why a room cannot be claimed."""

    age_s: float
    """Seconds since the room was claimed."""


@dataclass(frozen=True, slots=True)
class RoomTimes:
    """How long a store remembers rooms, and how many."""

    claim_s: float
    """A claim that is older belongs to a replica that died: the room may be claimed again."""
    keep_s: float
    """A room is forgotten so long after its last claim."""
    max_rooms: int
    """Beyond this, cancelled rooms are forgotten first, then the oldest paired ones; a room that is being paired never is."""


@dataclass(slots=True)
class _Node:
    """One node; `pages` and `rooms` were charged since its last heartbeat."""

    entry: NodeEntry
    number: int
    """Number of its registration."""
    heartbeat: NodeHeartbeat
    seen_s: float
    pages: dict[str, int] = field(default_factory=dict)
    rooms: int = 0

    def record(self, now_s: float) -> NodeRecord:
        return NodeRecord(self.entry, self.heartbeat, now_s - self.seen_s, self.pages, self.rooms)


@dataclass(slots=True)
class _Room:
    """One room; `owner` names the claim that made it."""

    owner: str
    generation: int
    claimed_s: float
    state: PairingState = PairingState.PAIRING
    ticket: Ticket | None = None
    settled_s: float = 0.0


class MemoryStore:
    """The store of a single bootstrap. It starts empty, and knows every node again after one heartbeat of each.

    A node that is silent for longer than `expire_after_s` is absent.
    """

    def __init__(self, *, expire_after_s: float, rooms: RoomTimes, clock: Clock = monotonic) -> None:
        self._expire_after_s, self._times, self._clock = expire_after_s, rooms, clock
        self._nodes: dict[NodeKey, _Node] = {}
        self._numbers = count()
        self._rooms: OrderedDict[int, _Room] = OrderedDict()
        """In the order of their claims."""
        self._notes: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        """By page key: the time at which each instance was given such a prompt. The newest note is last."""

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._nodes)} nodes, {len(self._rooms)} rooms, {len(self._notes)} notes)"

    async def close(self) -> None:
        """Close connections."""

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """Return all nodes, in any order. The cost grows with the fleet."""
        return await self.look(self._nodes)

    async def look(self, keys: Iterable[NodeKey]) -> tuple[NodeRecord, ...]:
        """Return those of these nodes that are alive, in any order. The cost does not depend on the fleet's size."""
        now_s = self._clock()
        found = (self._live(key, now_s) for key in keys)
        return tuple(node.record(now_s) for node in found if node is not None)

    async def of_instance(self, instance: str) -> tuple[str, tuple[NodeRecord, ...]]:
        """Return the version of an instance, to be given to `put`, and the instance's nodes."""
        return self._version(instance), await self.look([key for key in self._nodes if key[0] == instance])

    async def put(self, entry: NodeEntry, *, version: str) -> bool:
        """Add or replace a node, and return True; False, and nothing done, if its instance has changed since `version`."""
        if version != self._version(entry.key[0]):
            return False
        self._nodes[entry.key] = _Node(entry, next(self._numbers), entry.beat, self._clock())
        return True

    async def beat(self, key: NodeKey, heartbeat: NodeHeartbeat) -> NodeRecord | None:
        """Take the heartbeat of a node, if the incarnation is the node's. Returns the node's record, if there is one."""
        now_s = self._clock()
        node = self._live(key, now_s)
        if node is not None and node.heartbeat.incarnation == heartbeat.incarnation:
            node = self._nodes[key] = _Node(node.entry, node.number, heartbeat, now_s)
        return None if node is None else node.record(now_s)

    async def remove(self, key: NodeKey, incarnation: str) -> bool:
        """Remove a node if it is of this incarnation; return whether it was."""
        node = self._live(key, self._clock())
        if node is None or node.heartbeat.incarnation != incarnation:
            return False
        del self._nodes[key]
        return True

    async def charge(self, pages: Mapping[NodeKey, Mapping[str, int]]) -> None:
        """Count a room against nodes until their next heartbeats. `pages`: by node, by index space."""
        now_s = self._clock()
        for key, counts in pages.items():
            if (node := self._live(key, now_s)) is not None:
                # Another dictionary: records that were given out keep what they said.
                node.pages = dict(Counter(node.pages) + Counter(counts))
                node.rooms += 1

    async def expire(self) -> tuple[NodeKey, ...]:
        """Forget silent nodes and return their keys; each is returned once, to one caller."""
        now_s = self._clock()
        silent = tuple(key for key in self._nodes if self._live(key, now_s) is None)
        for key in silent:
            del self._nodes[key]
        return silent

    def _version(self, instance: str) -> str:
        now_s = self._clock()
        nodes = (self._live(key, now_s) for key in self._nodes if key[0] == instance)
        return " ".join(str(node.number) for node in nodes if node is not None)

    def _live(self, key: NodeKey, now_s: float) -> _Node | None:
        node = self._nodes.get(key)
        return node if node is not None and now_s - node.seen_s <= self._expire_after_s else None

    async def claim(self, room: int, *, generations: int) -> Claim | RoomInUse:
        """Begin to pair a room that nobody uses, with so many generations above all that were used before."""
        self._forget_old()
        now_s, known = self._clock(), self._rooms.get(room)
        if known is not None:
            age_s = now_s - known.claimed_s
            is_pairing = known.state is PairingState.PAIRING and age_s < self._times.claim_s
            if is_pairing or known.state is PairingState.PAIRED:
                return RoomInUse(age_s)
        claim = Claim(room, secrets.token_hex(8), known.generation if known else 0)
        self._rooms[room] = _Room(claim.owner, claim.base + generations, now_s)
        self._rooms.move_to_end(room)
        if len(self._rooms) > self._times.max_rooms:
            order = (PairingState.CANCELLED, PairingState.PAIRED)
            ended = (old for state in order for old, found in self._rooms.items() if found.state is state)
            self._rooms.pop(next(ended, -1), None)
        return claim

    async def settle(self, claim: Claim, ticket: Ticket, page_keys: Sequence[bytes] = ()) -> bool:
        """Keep the ticket of a claimed room; False, and nothing kept, when another claim has taken the room.

        The store also notes that both instances of the ticket hold the beginnings of prompts that `page_keys` name.
        """
        found, now_s = self._rooms.get(claim.room), self._clock()
        if found is None or found.owner != claim.owner:
            return False
        found.state, found.ticket, found.settled_s = PairingState.PAIRED, ticket, now_s
        found.generation = ticket.generation
        for key in page_keys:
            given_s = self._notes.setdefault(key, {})
            self._notes.move_to_end(key)
            for name in (ticket.prefill.instance, ticket.decode.instance):
                given_s.pop(name, None)
                given_s[name] = now_s  # the newest is last
            while len(given_s) > NOTE_INSTANCES:
                del given_s[next(iter(given_s))]
        while len(self._notes) > NOTES or (
            self._notes and max(next(iter(self._notes.values())).values()) < now_s - NOTE_KEEP_S
        ):
            self._notes.popitem(last=False)
        return True

    async def noted(self, page_keys: Sequence[bytes]) -> tuple[Mapping[str, float], ...]:
        """Return for each key the instances that were given such prompts, and how many seconds ago."""
        now_s = self._clock()
        return tuple(
            {name: now_s - at_s for name, at_s in self._notes.get(key, {}).items() if now_s - at_s <= NOTE_KEEP_S}
            for key in page_keys
        )

    async def give_up(self, claim: Claim, generation: int) -> None:
        """End a claim without a ticket: the id may be used again, above `generation`. Harmless when another claim has it."""
        found = self._rooms.get(claim.room)
        if found is not None and found.owner == claim.owner:
            found.state, found.generation = PairingState.CANCELLED, generation

    async def ticket(self, room: int) -> Ticket | None:
        """Return the ticket of a room that is remembered, with the time that is left."""
        self._forget_old()
        found = self._rooms.get(room)
        return found.ticket.after(self._clock() - found.settled_s) if found and found.ticket else None

    async def cancelled(self, room: int, generation: int) -> None:
        """Free the id of a room that was paired in this generation; harmless when the room is in another one."""
        found = self._rooms.get(room)
        if found is not None and (found.state, found.generation) == (PairingState.PAIRED, generation):
            found.state = PairingState.CANCELLED

    async def room_counts(self) -> dict[PairingState, int]:
        """Forget old rooms; return how many are remembered in each state."""
        self._forget_old()
        counted = Counter(found.state for found in self._rooms.values())
        return {state: counted[state] for state in PairingState}

    def _forget_old(self) -> None:
        forgotten_s = self._clock() - self._times.keep_s
        while self._rooms and next(iter(self._rooms.values())).claimed_s <= forgotten_s:
            self._rooms.popitem(last=False)

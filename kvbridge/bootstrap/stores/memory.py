"""Nodes and rooms of one bootstrap process; gone with it, and the nodes back after one heartbeat of each."""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvbridge.api.directory import NodeHeartbeat, Ticket
from kvbridge.bootstrap.nodes import NodeEntry, NodeKey, NodeRecord
from kvbridge.bootstrap.stores.base import (
    NOTE_INSTANCES,
    NOTE_KEEP_S,
    NOTES,
    Claim,
    PairingState,
    RoomInUse,
    RoomTimes,
)
from kvbridge.core.clock import Clock, monotonic


@dataclass(slots=True)
class _Node:
    """One node; `pages` and `rooms` were charged since its last heartbeat."""

    entry: NodeEntry
    number: int
    """Number of its registration: no other one has it."""
    heartbeat: NodeHeartbeat
    seen_s: float
    pages: dict[str, int] = field(default_factory=dict)
    rooms: int = 0


@dataclass(slots=True)
class _Room:
    """One room; `owner` names the claim that made it."""

    owner: str
    generation: int
    claimed_s: float
    state: PairingState = PairingState.PAIRING
    ticket: Ticket | None = None
    settled_s: float = 0.0
    """When the ticket was kept."""


class MemoryStore:
    """A Store. Nothing in it waits, so every method is one step of the loop."""

    def __init__(self, *, expire_after_s: float, rooms: RoomTimes, clock: Clock = monotonic) -> None:
        """`expire_after_s` is `directory.expire_after_s`."""
        self._expire_after_s = expire_after_s
        self._times = rooms
        self._clock = clock
        self._nodes: dict[NodeKey, _Node] = {}
        self._numbers = count()
        self._rooms: OrderedDict[int, _Room] = OrderedDict()
        self._notes: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        """When instances were given a beginning of prompts, by its key; the one that came last, last."""

    def __repr__(self) -> str:
        return f"MemoryStore({len(self._nodes)} nodes, {len(self._rooms)} rooms, {len(self._notes)} notes)"

    async def close(self) -> None:
        return

    async def nodes(self) -> tuple[NodeRecord, ...]:
        return await self.look(self._nodes)

    async def look(self, keys: Iterable[NodeKey]) -> tuple[NodeRecord, ...]:
        now_s = self._clock()
        found = (self._live(key, now_s) for key in keys)
        return tuple(_record(node, now_s) for node in found if node is not None)

    async def of_instance(self, instance: str) -> tuple[str, tuple[NodeRecord, ...]]:
        return self._version(instance), await self.look(self._keys_of(instance))

    async def put(self, entry: NodeEntry, *, version: str) -> bool:
        if version != self._version(entry.key[0]):
            return False
        self._nodes[entry.key] = _Node(entry, next(self._numbers), entry.beat, self._clock())
        return True

    async def beat(self, key: NodeKey, heartbeat: NodeHeartbeat) -> NodeRecord | None:
        now_s = self._clock()
        node = self._live(key, now_s)
        if node is not None and node.heartbeat.incarnation == heartbeat.incarnation:
            node = self._nodes[key] = _Node(node.entry, node.number, heartbeat, now_s)
        return None if node is None else _record(node, now_s)

    async def remove(self, key: NodeKey, incarnation: str) -> bool:
        node = self._live(key, self._clock())
        if node is None or node.heartbeat.incarnation != incarnation:
            return False
        del self._nodes[key]
        return True

    async def charge(self, pages: Mapping[NodeKey, Mapping[str, int]]) -> None:
        now_s = self._clock()
        for key, counts in pages.items():
            if (node := self._live(key, now_s)) is not None:
                # Another dictionary: records that were given out keep what they said.
                node.pages = {
                    space: node.pages.get(space, 0) + counts.get(space, 0) for space in {**node.pages, **counts}
                }
                node.rooms += 1

    async def expire(self) -> tuple[NodeKey, ...]:
        now_s = self._clock()
        silent = tuple(key for key in self._nodes if self._live(key, now_s) is None)
        for key in silent:
            del self._nodes[key]
        return silent

    def _keys_of(self, instance: str) -> list[NodeKey]:
        return [key for key in self._nodes if key[0] == instance]

    def _version(self, instance: str) -> str:
        now_s = self._clock()
        nodes = (self._live(key, now_s) for key in self._keys_of(instance))
        return " ".join(str(node.number) for node in nodes if node is not None)

    def _live(self, key: NodeKey, now_s: float) -> _Node | None:
        node = self._nodes.get(key)
        return node if node is not None and now_s - node.seen_s <= self._expire_after_s else None

    async def claim(self, room: int, *, generations: int) -> Claim | RoomInUse:
        self._forget_old()
        known = self._rooms.get(room)
        age_s = self._clock() - known.claimed_s if known else 0.0
        if known is not None and (
            known.state is PairingState.PAIRED or (known.state is PairingState.PAIRING and age_s < self._times.claim_s)
        ):
            return RoomInUse(age_s)
        claim = Claim(room, secrets.token_hex(8), known.generation if known else 0)
        self._rooms[room] = _Room(claim.owner, claim.base + generations, self._clock())
        self._rooms.move_to_end(room)
        if len(self._rooms) > self._times.max_rooms:
            self._forget_oldest()
        return claim

    async def settle(self, claim: Claim, ticket: Ticket, page_keys: Sequence[bytes] = ()) -> bool:
        found = self._rooms.get(claim.room)
        if found is None or found.owner != claim.owner:
            return False
        found.state, found.ticket, found.generation = PairingState.PAIRED, ticket, ticket.generation
        found.settled_s = self._clock()
        for key in page_keys:
            self._note(key, (ticket.prefill.instance, ticket.decode.instance), found.settled_s)
        return True

    def _note(self, key: bytes, instances: Iterable[str], now_s: float) -> None:
        given_s = self._notes.setdefault(key, {})
        self._notes.move_to_end(key)
        for name in instances:
            given_s.pop(name, None)
            given_s[name] = now_s  # the last one last
        while len(given_s) > NOTE_INSTANCES:
            del given_s[next(iter(given_s))]
        while len(self._notes) > NOTES or _newest_s(self._notes) < now_s - NOTE_KEEP_S:
            self._notes.popitem(last=False)

    async def noted(self, page_keys: Sequence[bytes]) -> tuple[Mapping[str, float], ...]:
        now_s = self._clock()
        return tuple(
            {name: now_s - at_s for name, at_s in self._notes.get(key, {}).items() if now_s - at_s <= NOTE_KEEP_S}
            for key in page_keys
        )

    async def give_up(self, claim: Claim, generation: int) -> None:
        found = self._rooms.get(claim.room)
        if found is not None and found.owner == claim.owner:
            found.state, found.generation = PairingState.CANCELLED, generation

    async def ticket(self, room: int) -> Ticket | None:
        self._forget_old()
        found = self._rooms.get(room)
        return found.ticket.after(self._clock() - found.settled_s) if found and found.ticket else None

    async def cancelled(self, room: int, generation: int) -> None:
        found = self._rooms.get(room)
        if found is not None and found.state is PairingState.PAIRED and found.generation == generation:
            found.state = PairingState.CANCELLED

    async def room_counts(self) -> dict[PairingState, int]:
        self._forget_old()
        counted = Counter(found.state for found in self._rooms.values())
        return {state: counted[state] for state in PairingState}

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._rooms and next(iter(self._rooms.values())).claimed_s + self._times.keep_s <= now_s:
            self._rooms.popitem(last=False)

    def _forget_oldest(self) -> None:
        for state in (PairingState.CANCELLED, PairingState.PAIRED):
            oldest = (room for room, found in self._rooms.items() if found.state is state)
            if (room := next(oldest, None)) is not None:
                del self._rooms[room]
                return


def _record(node: _Node, now_s: float) -> NodeRecord:
    return NodeRecord(node.entry, node.heartbeat, now_s - node.seen_s, node.pages, node.rooms)


def _newest_s(notes: OrderedDict[bytes, dict[str, float]]) -> float:
    """When the note that comes first was last made."""
    return next(reversed(next(iter(notes.values())).values()))

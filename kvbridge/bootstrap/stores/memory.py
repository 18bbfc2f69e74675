"""Nodes and rooms of one bootstrap process; gone with it, and the nodes back after one heartbeat of each.

Owns: the dictionaries, the clock that they age by, and the draw. Must not know: what is decided on their contents.
"""

from __future__ import annotations

import random
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvbridge.api.directory import NodeHeartbeat, Ticket
from kvbridge.bootstrap.nodes import NodeEntry, NodeKey, NodeRecord
from kvbridge.bootstrap.stores.base import (
    NOTE_INSTANCES,
    NOTE_KEEP_S,
    NOTES,
    Claim,
    InstanceNodes,
    PairingState,
    RoomInUse,
    RoomTimes,
)
from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.ids import Role


@dataclass(slots=True)
class _Node:
    """One node; `pages` and `rooms` were charged since its last heartbeat."""

    entry: NodeEntry
    heartbeat: NodeHeartbeat
    seen_s: float
    pages: dict[str, int] = field(default_factory=dict)
    rooms: int = 0


@dataclass(slots=True)
class _Instance:
    """The nodes of one instance by name, and the number of their last change."""

    version: int = 0
    nodes: dict[str, _Node] = field(default_factory=dict)


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
    """A NodeStore and a RoomStore. Nothing in it waits, so every method is one step of the loop."""

    def __init__(
        self,
        *,
        expire_after_s: float,
        rooms: RoomTimes,
        clock: Clock = monotonic,
        chance: random.Random | None = None,
    ) -> None:
        """`expire_after_s` is `directory.expire_after_s`; `chance` is what instances are drawn by."""
        self._expire_after_s = expire_after_s
        self._times = rooms
        self._clock = clock
        self._chance = chance or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._instances: dict[str, _Instance] = {}
        self._changes = 0
        self._groups: dict[tuple[Role, str], list[str]] = {}
        """Instances by role and fingerprint, and all of a role under the fingerprint ""; empty when it has to be made again."""
        self._rooms: OrderedDict[int, _Room] = OrderedDict()
        self._notes: OrderedDict[bytes, dict[str, float]] = OrderedDict()
        """When instances were given a beginning of prompts, by its key; the one that came last, last."""

    def __repr__(self) -> str:
        nodes = sum(len(instance.nodes) for instance in self._instances.values())
        return f"MemoryStore({nodes} nodes, {len(self._rooms)} rooms, {len(self._notes)} notes)"

    async def close(self) -> None:
        """See NodeStore."""

    # ------------------------------------------------------------------------------------- nodes

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """See NodeStore."""
        return tuple(self._records(self._instances))

    async def draw(self, count: int, fingerprint: str = "", names: Sequence[str] = ()) -> tuple[NodeRecord, ...]:
        """See NodeStore."""
        drawn = set(names)
        for role in Role if count else ():
            group = self._grouped().get((role, fingerprint), [])
            drawn |= set(group) if len(group) <= count else self._some(group, count)
        return tuple(self._records(drawn))

    async def of_instance(self, instance: str) -> InstanceNodes:
        """See NodeStore."""
        found = self._instances.get(instance)
        return InstanceNodes(str(found.version if found else 0), tuple(self._records([instance])))

    async def put(self, entry: NodeEntry, *, version: str) -> bool:
        """See NodeStore."""
        name, node = entry.key
        found = self._instances.get(name)
        if version != str(found.version if found else 0):
            return False
        self._changed(self._instances.setdefault(name, _Instance())).nodes[node] = _Node(
            entry, entry.beat, self._clock()
        )
        return True

    async def beat(self, key: NodeKey, heartbeat: NodeHeartbeat) -> NodeRecord | None:
        """See NodeStore."""
        node = self._live(key)
        if node is not None and node.heartbeat.incarnation == heartbeat.incarnation:
            node = self._instances[key[0]].nodes[key[1]] = _Node(node.entry, heartbeat, self._clock())
        return None if node is None else self._record(node, self._clock())

    async def remove(self, key: NodeKey, incarnation: str) -> NodeRecord | None:
        """See NodeStore."""
        node = self._live(key)
        if node is None:
            return None
        if node.heartbeat.incarnation == incarnation:
            self._remove(key)
        return self._record(node, self._clock())

    async def charge(self, pages: Mapping[NodeKey, Mapping[str, int]]) -> None:
        """See NodeStore."""
        for key, counts in pages.items():
            if (node := self._live(key)) is not None:
                # Another dictionary: records that were given out keep what they said.
                node.pages = {
                    space: node.pages.get(space, 0) + counts.get(space, 0) for space in {**node.pages, **counts}
                }
                node.rooms += 1

    async def expire(self) -> tuple[NodeKey, ...]:
        """See NodeStore."""
        now_s = self._clock()
        silent = [
            (name, node)
            for name, instance in self._instances.items()
            for node, found in instance.nodes.items()
            if not self._lives(found, now_s)
        ]
        for key in silent:
            self._remove(key)
        return tuple(silent)

    def _grouped(self) -> dict[tuple[Role, str], list[str]]:
        """Made anew after a registration or an end, which are rare beside pairings."""
        if not self._groups:
            for name, instance in self._instances.items():
                first = next(iter(instance.nodes.values())).entry.registration
                for fingerprint in ("", first.fingerprint):
                    self._groups.setdefault((first.role, fingerprint), []).append(name)
        return self._groups

    def _changed(self, instance: _Instance) -> _Instance:
        self._changes += 1
        instance.version = self._changes
        self._groups = {}
        return instance

    def _remove(self, key: NodeKey) -> None:
        name, node = key
        del self._changed(self._instances[name]).nodes[node]
        if not self._instances[name].nodes:
            del self._instances[name]

    def _some(self, group: Sequence[str], count: int) -> set[str]:
        found: set[str] = set()
        while len(found) < count:
            found.add(group[int(self._chance.random() * len(group))])
        return found

    def _records(self, names: Iterable[str]) -> Iterator[NodeRecord]:
        now_s = self._clock()
        for name in names:
            instance = self._instances.get(name)
            for node in instance.nodes.values() if instance else ():
                if self._lives(node, now_s):
                    yield self._record(node, now_s)

    def _lives(self, node: _Node, now_s: float) -> bool:
        return now_s - node.seen_s <= self._expire_after_s

    def _live(self, key: NodeKey) -> _Node | None:
        instance = self._instances.get(key[0])
        node = instance.nodes.get(key[1]) if instance else None
        return node if node is not None and self._lives(node, self._clock()) else None

    @staticmethod
    def _record(node: _Node, now_s: float) -> NodeRecord:
        return NodeRecord(node.entry, node.heartbeat, now_s - node.seen_s, node.pages, node.rooms)

    # ------------------------------------------------------------------------------------- rooms

    async def claim(self, room: int, *, generations: int) -> Claim | RoomInUse:
        """See RoomStore."""
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
        """See RoomStore."""
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
        """See RoomStore."""
        now_s = self._clock()
        return tuple(
            {name: now_s - at_s for name, at_s in self._notes.get(key, {}).items() if now_s - at_s <= NOTE_KEEP_S}
            for key in page_keys
        )

    async def give_up(self, claim: Claim, generation: int) -> None:
        """See RoomStore."""
        found = self._rooms.get(claim.room)
        if found is not None and found.owner == claim.owner:
            found.state, found.generation = PairingState.CANCELLED, generation

    async def ticket(self, room: int) -> Ticket | None:
        """See RoomStore."""
        self._forget_old()
        found = self._rooms.get(room)
        return found.ticket.after(self._clock() - found.settled_s) if found and found.ticket else None

    async def cancelled(self, room: int, generation: int) -> None:
        """See RoomStore."""
        found = self._rooms.get(room)
        if found is not None and found.state is PairingState.PAIRED and found.generation == generation:
            found.state = PairingState.CANCELLED

    async def room_counts(self) -> dict[PairingState, int]:
        """See RoomStore."""
        self._forget_old()
        counted = Counter(found.state for found in self._rooms.values())
        return {state: counted[state] for state in PairingState}

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._rooms and next(iter(self._rooms.values())).claimed_s + self._times.keep_s <= now_s:
            self._rooms.popitem(last=False)

    def _forget_oldest(self) -> None:
        """Rooms that are being paired are few and lie at the young end, so this looks at few."""
        oldest = (room for room, found in self._rooms.items() if found.state is not PairingState.PAIRING)
        if (room := next(oldest, None)) is not None:
            del self._rooms[room]


def _newest_s(notes: OrderedDict[bytes, dict[str, float]]) -> float:
    """When the note that comes first was last made."""
    return next(reversed(next(iter(notes.values())).values()))

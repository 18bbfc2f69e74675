"""Nodes and rooms that several bootstraps share, in Redis.

Owns: the way from Redis's answers to records. Must not know: what is decided on the records, what the scripts do inside, how
Redis is reached (`redis_connection`, the only module that knows the library).

Redis does the expiry by its own clock. What it returns is input from outside: a malformed value is counted, logged once
and treated as absent, so that the node it belongs to registers again, or the room's id is free again.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final, cast

import msgpack
import structlog
from pydantic import TypeAdapter, ValidationError

from kvbridge.api.directory import Name, NodeHeartbeat, Ticket
from kvbridge.bootstrap.nodes import NodeEntry, NodeKey, NodeRecord, check_registration
from kvbridge.bootstrap.stores.base import (
    NOTE_INSTANCES,
    NOTE_KEEP_S,
    NOTES,
    Claim,
    InstanceNodes,
    PairingState,
    RoomInUse,
    RoomTimes,
    StoreObserver,
)
from kvbridge.bootstrap.stores.redis_connection import RedisConnection, RedisSettings
from kvbridge.bootstrap.stores.scripts import PRELUDE, SCRIPTS
from kvbridge.core.errors import BridgeError, InvalidInputError
from kvbridge.core.ids import NonNegative, Role

log = structlog.get_logger(__name__)

ENTRIES_KEPT: Final = 4096
"""Parsed entries that are kept, by member and digest; and refusals that were logged."""
VERSION_KEEP_MS: Final = 3_600_000
"""A version outlives every registration that is being decided on it."""

_KEY = TypeAdapter(tuple[Name, Name])
_CHARGES = TypeAdapter(dict[str, NonNegative])
_ROOM_STATES: Final = (PairingState.PAIRING, PairingState.PAIRED, PairingState.CANCELLED)


class RedisStore:
    """A NodeStore and a RoomStore. Close it."""

    def __init__(
        self, settings: RedisSettings, *, expire_after_s: float, rooms: RoomTimes, observer: StoreObserver
    ) -> None:
        """Connect to nothing yet: every call does when it has to. Raises ConfigError for a URL that cannot be read."""
        self._settings = settings
        self._prefix = f"{settings.namespace}:"
        self._expire_ms = _ms(expire_after_s)
        self._times = rooms
        self._observer = observer
        self._entries: OrderedDict[tuple[bytes, bytes], NodeEntry | None] = OrderedDict()
        self._beats: dict[bytes, tuple[bytes, NodeHeartbeat]] = {}
        """By member: of a large fleet few have changed between two looks."""
        self._told: OrderedDict[bytes, None] = OrderedDict()
        scripts = {name: PRELUDE + text for name, text in SCRIPTS.items()}
        self._redis = RedisConnection(settings, scripts, on_failure=observer.store_failed)

    def __repr__(self) -> str:
        return f"RedisStore({self._redis.where}, namespace '{self._settings.namespace}')"

    async def close(self) -> None:
        """Close all connections."""
        await self._redis.close()

    # ------------------------------------------------------------------------------------- nodes

    async def nodes(self) -> tuple[NodeRecord, ...]:
        """See NodeStore."""
        now_ms, rows = _unpacked(await self._redis.run("NODES", [self._key("nodes")], self._prefix))
        records = await self._records(rows, now_ms)
        self._beats = {member: self._beats[member] for member, _ in rows if member in self._beats}
        return records

    async def draw(self, count: int, fingerprint: str = "", names: Sequence[str] = ()) -> tuple[NodeRecord, ...]:
        """See NodeStore."""
        groups = [self._key("group", f"{role}:{fingerprint}".rstrip(":")) for role in Role] if count else []
        now_ms, rows = _unpacked(await self._redis.run("DRAW", groups, self._prefix, count, *names))
        return await self._records(rows, now_ms)

    async def _records(self, rows: Sequence[tuple[bytes, Sequence[Any]]], now_ms: int) -> tuple[NodeRecord, ...]:
        await self._learn(rows)
        found = (self._record(member, row, now_ms) for member, row in rows)
        return tuple(record for record in found if record is not None)

    async def of_instance(self, instance: str) -> InstanceNodes:
        """See NodeStore."""
        # First the version: what changes while the nodes are read makes it an old one.
        (version,) = await self._redis.ask(self._redis.client.mget([self._key("version", instance)]))
        return InstanceNodes(_text(version or b""), await self.draw(0, names=[instance]))

    async def put(self, entry: NodeEntry, *, version: str) -> bool:
        """See NodeStore."""
        member, text = _member(entry.key), entry.model_dump_json().encode()
        keys = [*self._node_keys(member), self._key("version", entry.key[0])]
        drawn, beat = secrets.token_hex(8), entry.beat.model_dump_json()
        facts = (member, entry.registration.incarnation, _digest(text), beat, text)
        limits = (self._expire_ms, VERSION_KEEP_MS)
        where = (self._prefix, entry.key[0], _group(entry))
        return bool(await self._redis.run("PUT", keys, version, drawn, *facts, *limits, *where))

    async def beat(self, key: NodeKey, heartbeat: NodeHeartbeat) -> NodeRecord | None:
        """See NodeStore."""
        member = _member(key)
        facts = (member, heartbeat.incarnation, heartbeat.model_dump_json(), self._expire_ms)
        packed = await self._redis.run("BEAT", self._node_keys(member), *facts, self._prefix, key[0])
        if packed is None:
            return None
        now_ms, row = _unpacked(packed)
        await self._learn([(member, row)])
        return self._record(member, row, now_ms)

    async def remove(self, key: NodeKey, incarnation: str) -> NodeRecord | None:
        """See NodeStore."""
        member = _member(key)
        packed = await self._redis.run("REMOVE", self._node_keys(member), member, incarnation)
        if packed is None:
            return None
        now_ms, row, text = _unpacked(packed)
        self._entry(text, member)
        return self._record(member, row, now_ms)

    async def charge(self, pages: Mapping[NodeKey, Mapping[str, int]]) -> None:
        """See NodeStore."""
        touched = [self._key(kind, _member(key)) for key in pages for kind in ("node", "charge")]
        fields = [msgpack.packb(["rooms", 1, *chain(*counts.items())]) for counts in pages.values()]
        await self._redis.run("CHARGE", touched, *fields)

    async def expire(self) -> tuple[NodeKey, ...]:
        """See NodeStore."""
        gone = await self._redis.run("EXPIRE", [self._key("nodes")])
        keys = (self._parsed_key(member) for member in gone)
        return tuple(key for key in keys if key is not None)

    async def _learn(self, rows: Sequence[tuple[bytes, Sequence[Any]]]) -> None:
        """Read the entries that are not remembered as they are now."""
        unknown = [member for member, row in rows if (member, row[1]) not in self._entries]
        if not unknown:
            return
        # MGET returns nothing for a key of another type, which GET would fail on.
        texts = await self._redis.ask(self._redis.client.mget([self._key("entry", member) for member in unknown]))
        for member, text in zip(unknown, texts, strict=True):
            if text is not None:
                self._entry(text, member)

    def _record(self, member: bytes, row: Sequence[Any], now_ms: int) -> NodeRecord | None:
        """Return the record of one row, or None when a part of it is missing or malformed."""
        holder, digest, raw_beat, seen_ms, group, charges = row
        entry = self._entries.get((member, digest))
        if entry is None and digest:
            return None  # replaced just now, or refused when it was parsed
        try:
            if entry is None or not (holder and raw_beat and seen_ms):
                raise ValueError("one of its fields is missing")  # noqa: TRY301 - told below
            self._entries.move_to_end((member, digest))
            known = self._beats.get(member)
            if known is None or known[0] != raw_beat:
                told = NodeHeartbeat.model_validate_json(raw_beat, extra="ignore")
                known = self._beats[member] = (raw_beat, told)
            incarnation = entry.registration.incarnation
            if known[1].incarnation != incarnation or holder != incarnation.encode():
                raise ValueError("its fields are of several incarnations")  # noqa: TRY301
            if group != _group(entry):
                raise ValueError("it is drawn among others than it belongs to")  # noqa: TRY301
            silent_s = max(0, now_ms - int(seen_ms)) / 1e3
            pages = _charged(charges) if charges else {}
            return NodeRecord(entry, known[1], silent_s, pages, pages.pop("rooms", 0))
        except (ValueError, TypeError) as error:
            self._refused("node", member, error)
            return None

    def _entry(self, text: bytes, member: bytes) -> None:
        """Parse an entry and remember it, or that it is malformed."""
        name = member, _digest(text)
        if name in self._entries:
            return
        entry: NodeEntry | None = None
        try:
            entry = NodeEntry.model_validate_json(text, extra="ignore")
            check_registration(entry.registration)
            if _member(entry.key) != member:
                raise InvalidInputError(f"it is the entry of {entry.key}")
        except (ValidationError, BridgeError) as error:
            entry = None
            self._refused("node", member, error)
        self._entries[name] = entry
        while len(self._entries) > ENTRIES_KEPT:
            self._entries.popitem(last=False)

    def _parsed_key(self, member: bytes) -> NodeKey | None:
        try:
            return _KEY.validate_json(member)
        except ValidationError as error:
            self._refused("node", member, error)
            return None

    # ------------------------------------------------------------------------------------- rooms

    async def claim(self, room: int, *, generations: int) -> Claim | RoomInUse:
        """See RoomStore."""
        owner, times = secrets.token_hex(8), self._times
        limits = (generations, _ms(times.claim_s), _ms(times.keep_s), times.max_rooms)
        claimed, figure, malformed = await self._redis.run(
            "CLAIM", self._room_keys(room), self._prefix, room, owner, *limits
        )
        if malformed:
            self._refused("room", str(room).encode(), ValueError("its state or generation was malformed"))
        return Claim(room, owner, int(figure)) if claimed else RoomInUse(int(figure) / 1e3)

    async def settle(self, claim: Claim, ticket: Ticket, page_keys: Sequence[bytes] = ()) -> bool:
        """See RoomStore."""
        keys = [*self._room_keys(claim.room), self._key("prefixes"), *self._note_keys(page_keys)]
        facts = (claim.room, claim.owner, ticket.generation, ticket.model_dump_json(), _ms(NOTE_KEEP_S), NOTE_INSTANCES)
        instances = (ticket.prefill.instance, ticket.decode.instance)
        return bool(await self._redis.run("SETTLE", keys, *facts, *instances, NOTES, self._prefix))

    async def noted(self, page_keys: Sequence[bytes]) -> tuple[Mapping[str, float], ...]:
        """See RoomStore."""
        now_ms, rows = _unpacked(await self._redis.run("NOTED", self._note_keys(page_keys)))
        return tuple(
            {_text(name): max(0.0, now_ms - float(ms)) / 1e3 for name, ms in zip(row[::2], row[1::2], strict=True)}
            for row in rows
        )

    async def give_up(self, claim: Claim, generation: int) -> None:
        """See RoomStore."""
        await self._redis.run("GIVE_UP", self._room_keys(claim.room), claim.room, claim.owner, generation)

    async def ticket(self, room: int) -> Ticket | None:
        """See RoomStore."""
        now_ms, state, generation, raw, settled_ms = await self._redis.run("TICKET", [self._key("room", room)])
        if raw is None:
            return None
        try:
            ticket = Ticket.model_validate_json(raw, extra="ignore")
            PairingState(_text(state or b""))
            if (ticket.room, ticket.generation) != (room, int(generation)):
                which = f"room {ticket.room} generation {ticket.generation}"
                raise ValueError(f"the ticket is that of {which}")  # noqa: TRY301 - told below
            return ticket.after(max(0, now_ms - int(settled_ms)) / 1e3)
        except (ValueError, TypeError) as error:
            self._refused("room", str(room).encode(), error)
            return None

    async def cancelled(self, room: int, generation: int) -> None:
        """See RoomStore."""
        await self._redis.run("CANCELLED", self._room_keys(room), room, generation)

    async def room_counts(self) -> dict[PairingState, int]:
        """See RoomStore."""
        counts = await self._redis.run("COUNTS", self._room_keys()[1:])
        return dict(zip(_ROOM_STATES, counts, strict=True))

    # ------------------------------------------------------------------------------------- Redis

    def _key(self, kind: str, name: str | bytes | int = "") -> bytes:
        tail = name if isinstance(name, bytes) else str(name).encode()
        return f"{self._prefix}{kind}".encode() + (b":" + tail if tail else b"")

    def _node_keys(self, member: bytes) -> list[bytes]:
        return [self._key("nodes"), *(self._key(kind, member) for kind in ("node", "entry", "charge"))]

    def _room_keys(self, room: int | None = None) -> list[bytes]:
        return [self._key("room", "" if room is None else room), *(self._key(state.value) for state in _ROOM_STATES)]

    def _note_keys(self, page_keys: Sequence[bytes]) -> list[bytes]:
        return [self._key("prefix", key.hex()) for key in page_keys]

    def _refused(self, reason: str, name: bytes, error: Exception) -> None:
        """Count a malformed value, and log it unless that was done: it may be read again before it is replaced."""
        self._observer.store_value_refused(reason)
        told = _digest(b"\0".join((name, str(error).encode(errors="replace"))))
        if told in self._told:
            return
        self._told[told] = None
        while len(self._told) > ENTRIES_KEPT:
            self._told.popitem(last=False)
        log.warning(
            "stored_value_refused", kind=reason, name=_text(name), namespace=self._settings.namespace, reason=str(error)
        )


def _group(entry: NodeEntry) -> bytes:
    return f"{entry.registration.role}:{entry.registration.fingerprint}".encode()


def _charged(charges: list[bytes]) -> dict[str, int]:
    """Parse pages by space, and `rooms`. Raises ValueError (of pydantic too) for what nobody of ours has written."""
    return _CHARGES.validate_python(dict(zip(charges[::2], charges[1::2], strict=True)))


def _unpacked(packed: bytes) -> list[Any]:
    return cast("list[Any]", msgpack.unpackb(packed, raw=True, strict_map_key=False))


def _member(key: NodeKey) -> bytes:
    return json.dumps(key, separators=(",", ":")).encode()


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1e3))

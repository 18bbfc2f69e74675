"""Nodes and rooms that several bootstraps share, in Redis.

What Redis returns is input from outside: a malformed value is counted, logged once and treated as absent, so that the node that it
belongs to registers again, or the room's id is free again. Time is Redis's.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

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
)
from kvbridge.bootstrap.stores.redis_connection import RedisConnection, RedisSettings
from kvbridge.bootstrap.stores.scripts import PRELUDE, SCRIPTS
from kvbridge.core.errors import BridgeError, NotReadyError
from kvbridge.core.ids import NonNegative
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

KEPT: Final = 4096
"""Parsed entries and heartbeats that are kept, and refusals that were logged."""
MEMBER_KEEP_MS: Final = 3_600_000
"""A node that has gone while no bootstrap was there is told of for so long."""

Rows = Sequence[tuple[bytes, Sequence[Any]]]
_KEY = TypeAdapter(tuple[Name, Name])
_CHARGES = TypeAdapter(dict[str, NonNegative])
_STATES: Final = (PairingState.PAIRING, PairingState.PAIRED, PairingState.CANCELLED)


class RedisStore:
    """A NodeStore and a RoomStore. Close it."""

    def __init__(self, settings: RedisSettings, *, expire_after_s: float, rooms: RoomTimes, observer: Metrics) -> None:
        """Connect to nothing yet: every call does when it has to. Raises ConfigError for a URL that cannot be read."""
        self._settings = settings
        self._prefix = f"{settings.namespace}:"
        self._lives_ms = (_ms(expire_after_s), MEMBER_KEEP_MS)
        self._times = rooms
        self._observer = observer
        self._entries: dict[bytes, NodeEntry | None] = {}
        """By digest; None for one that is malformed."""
        self._told: set[tuple[bytes, str]] = set()
        scripts = {name: PRELUDE + text for name, text in SCRIPTS.items()}
        self._redis = RedisConnection(settings, scripts, on_failure=observer.store_failed)

    def __repr__(self) -> str:
        return f"RedisStore({self._redis.where}, namespace '{self._settings.namespace}')"

    async def close(self) -> None:
        await self._redis.client.aclose()

    # ------------------------------------------------------------------------------------- nodes

    async def nodes(self) -> tuple[NodeRecord, ...]:
        return await self._records(*await self._rows(b""))

    async def look(self, keys: Sequence[NodeKey]) -> tuple[NodeRecord, ...]:
        return await self._records(*await self._rows(b"", *map(_member, keys))) if keys else ()

    async def of_instance(self, instance: str) -> InstanceNodes:
        now_ms, rows = await self._rows(_members_of(instance))
        return InstanceNodes(_version(rows), await self._records(now_ms, rows))

    async def put(self, entry: NodeEntry, *, version: str) -> bool:
        member, text = _member(entry.key), entry.model_dump_json().encode()
        node = {"incarnation": entry.registration.incarnation, "beat": entry.beat.model_dump_json()}
        fields = [part for pair in (node | {"entry": text, "digest": _digest(text)}).items() for part in pair]
        where = (_members_of(entry.key[0]), self._prefix, member)
        return bool(await self._redis.run("PUT", self._node_keys(member), version, *where, *self._lives_ms, *fields))

    async def beat(self, key: NodeKey, heartbeat: NodeHeartbeat) -> NodeRecord | None:
        member = _member(key)
        facts = (heartbeat.incarnation, heartbeat.model_dump_json(), member)
        packed = await self._redis.run("BEAT", self._node_keys(member), *facts, *self._lives_ms)
        if packed is None:
            return None
        now_ms, row = _unpacked(packed)
        return next(iter(await self._records(now_ms, [(member, row)])), None)

    async def remove(self, key: NodeKey, incarnation: str) -> bool:
        return bool(await self._redis.run("REMOVE", self._node_keys(_member(key)), incarnation, _member(key)))

    async def charge(self, pages: Mapping[NodeKey, Mapping[str, int]]) -> None:
        charges = [msgpack.packb({**counts, "rooms": 1}) for counts in pages.values()]
        await self._redis.run("CHARGE", [self._key("node", _member(key)) for key in pages], *charges)

    async def expire(self) -> tuple[NodeKey, ...]:
        gone = []
        for member in await self._redis.run("EXPIRE", [self._key("nodes")], self._prefix):
            try:
                gone.append(_KEY.validate_json(member))
            except ValidationError as error:
                self._refused("node", member, error)
        return tuple(gone)

    async def _rows(self, prefix: bytes, *members: bytes) -> tuple[int, Rows]:
        now_ms, rows = _unpacked(await self._redis.run("LOOK", [self._key("nodes")], self._prefix, prefix, *members))
        return now_ms, rows

    async def _records(self, now_ms: int, rows: Rows) -> tuple[NodeRecord, ...]:
        """Return the records of rows; entries that are not known as they are now are read before."""
        unknown = [member for member, row in rows if row[1] not in self._entries]
        if unknown:
            pipeline = self._redis.client.pipeline(transaction=False)
            for member in unknown:
                pipeline.hget(self._key("node", member), "entry")
            texts = await self._redis.ask(pipeline.execute(raise_on_error=False))
            for member, text in zip(unknown, texts, strict=True):
                if isinstance(text, bytes):
                    self._learn_entry(text, member)
        found = (self._record(member, row, now_ms) for member, row in rows)
        return tuple(record for record in found if record is not None)

    def _record(self, member: bytes, row: Sequence[Any], now_ms: int) -> NodeRecord | None:
        """Return the record of one row, or None when a part of it is missing or malformed."""
        holder, digest, raw_beat, seen_ms, charges = row
        entry = self._entries.get(digest)
        if entry is None and digest:
            return None  # replaced just now, or refused when it was parsed
        try:
            if entry is None or not (holder and raw_beat and seen_ms):
                raise ValueError("one of its fields is missing")  # noqa: TRY301 - told below
            beat, incarnation = _heartbeat(raw_beat), entry.registration.incarnation
            if beat.incarnation != incarnation or holder != incarnation.encode():
                raise ValueError("its fields are of several incarnations")  # noqa: TRY301
            if member != _member(entry.key):
                raise ValueError(f"it is the entry of {entry.key}")  # noqa: TRY301
            pages = _CHARGES.validate_python(msgpack.unpackb(charges)) if charges else {}
            silent_s = max(0, now_ms - int(seen_ms)) / 1e3
            return NodeRecord(entry, beat, silent_s, pages, pages.pop("rooms", 0))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            self._refused("node", member, error)
            return None

    def _learn_entry(self, text: bytes, member: bytes) -> None:
        """Parse an entry and remember it, or that it is malformed."""
        digest = _digest(text)
        if digest in self._entries:
            return
        if len(self._entries) >= KEPT:
            self._entries.clear()
        try:
            entry = NodeEntry.model_validate_json(text, extra="ignore")
            check_registration(entry.registration)
            self._entries[digest] = entry
        except (ValidationError, BridgeError) as error:
            self._entries[digest] = None
            self._refused("node", member, error)

    # ------------------------------------------------------------------------------------- rooms

    async def claim(self, room: int, *, generations: int) -> Claim | RoomInUse:
        owner, times = secrets.token_hex(8), self._times
        limits = (generations, _ms(times.claim_s), _ms(times.keep_s), times.max_rooms)
        claimed, figure = await self._redis.run("CLAIM", self._room_keys(room), self._prefix, room, owner, *limits)
        return Claim(room, owner, int(figure)) if claimed else RoomInUse(int(figure) / 1e3)

    async def settle(self, claim: Claim, ticket: Ticket, page_keys: Sequence[bytes] = ()) -> bool:
        settled = (claim.room, "owner", claim.owner, PairingState.PAIRED, ticket.generation)
        kept = await self._end(*settled, ticket.model_dump_json())
        if kept and page_keys:
            keys = [self._key("prefixes"), *self._note_keys(page_keys)]
            limits = (_ms(NOTE_KEEP_S), NOTE_INSTANCES, NOTES)
            with contextlib.suppress(NotReadyError):  # the ticket counts; a note that is missing costs a guess
                await self._redis.run(
                    "NOTE", keys, self._prefix, *limits, ticket.prefill.instance, ticket.decode.instance
                )
        return kept

    async def give_up(self, claim: Claim, generation: int) -> None:
        await self._end(claim.room, "owner", claim.owner, PairingState.CANCELLED, generation)

    async def cancelled(self, room: int, generation: int) -> None:
        await self._end(room, "paired_in", str(generation), PairingState.CANCELLED, generation)

    async def _end(self, room: int, field: str, value: str, state: PairingState, generation: int, *ticket: str) -> bool:
        place = _STATES.index(state) + 2
        facts = (room, field, value, state.value, place, generation, *ticket)
        return bool(await self._redis.run("END", self._room_keys(room), *facts))

    async def ticket(self, room: int) -> Ticket | None:
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

    async def room_counts(self) -> dict[PairingState, int]:
        counts = await self._redis.run("COUNTS", [self._key(state.value) for state in _STATES])
        return dict(zip(_STATES, counts, strict=True))

    async def noted(self, page_keys: Sequence[bytes]) -> tuple[Mapping[str, float], ...]:
        now_ms, rows = _unpacked(await self._redis.run("NOTED", self._note_keys(page_keys)))
        return tuple(
            {_text(name): max(0.0, now_ms - float(ms)) / 1e3 for name, ms in zip(row[::2], row[1::2], strict=True)}
            for row in rows
        )

    # ------------------------------------------------------------------------------------- Redis

    def _key(self, kind: str, name: str | bytes | int = "") -> bytes:
        tail = name if isinstance(name, bytes) else str(name).encode()
        return f"{self._prefix}{kind}".encode() + (b":" + tail if tail else b"")

    def _node_keys(self, member: bytes) -> list[bytes]:
        return [self._key("node", member), self._key("nodes")]

    def _room_keys(self, room: int) -> list[bytes]:
        return [self._key("room", room), *(self._key(state.value) for state in _STATES)]

    def _note_keys(self, page_keys: Iterable[bytes]) -> list[bytes]:
        return [self._key("prefix", key.hex()) for key in page_keys]

    def _refused(self, reason: str, name: bytes, error: Exception) -> None:
        """Count a malformed value, and log it unless that was done: it may be read again before it is replaced."""
        self._observer.store_value_refused(reason)
        told = name, str(error)
        if told in self._told:
            return
        if len(self._told) >= KEPT:
            self._told.clear()
        self._told.add(told)
        log.warning(
            "stored_value_refused", kind=reason, name=_text(name), namespace=self._settings.namespace, reason=str(error)
        )


@lru_cache(KEPT)
def _heartbeat(raw: bytes) -> NodeHeartbeat:
    """Of a large fleet few have changed between two looks."""
    return NodeHeartbeat.model_validate_json(raw, extra="ignore")


def _version(rows: Rows) -> str:
    parts = sorted(b"\0".join((member, row[0] or b"", row[1] or b"")) for member, row in rows)
    return hashlib.sha1(b"\1".join(parts), usedforsecurity=False).hexdigest()


def _unpacked(packed: bytes) -> list[Any]:
    found: list[Any] = msgpack.unpackb(packed, raw=True, strict_map_key=False)
    return found


def _member(key: NodeKey) -> bytes:
    return json.dumps(key, separators=(",", ":")).encode()


def _members_of(instance: str) -> bytes:
    """Return what the members of an instance, and no others, begin with."""
    return _member((instance, ""))[:-3]


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1e3))

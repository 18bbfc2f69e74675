"""The store that several bootstraps share, in Redis. `redis_store.lua` has its keys and its scripts.

Redis's answers are input from outside. A malformed value is counted, logged once and treated as absent: its node registers again,
or the id of its room is free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any, Final
from urllib.parse import SplitResult, unquote, urlsplit

import msgpack
import structlog
from pydantic import TypeAdapter, ValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import ConnectionError as RedisConnectionError, RedisError, TimeoutError as RedisTimeoutError

from kvbridge.api.directory import Name, NodeHeartbeat, Ticket
from kvbridge.bootstrap.nodes import NodeEntry, NodeKey, NodeRecord, check_registration
from kvbridge.bootstrap.store import NOTE_INSTANCES, NOTE_KEEP_S, NOTES, Claim, PairingState, RoomInUse, RoomTimes
from kvbridge.core.addresses import redis_hosts
from kvbridge.core.errors import BridgeError, ConfigError, NotReadyError
from kvbridge.core.ids import NonNegative
from kvbridge.telemetry.metrics import STORE_FAILED, STORE_REFUSED
from kvbridge.telemetry.registry import Metrics

log = structlog.get_logger(__name__)

CONNECTIONS: Final = 32
"""The most open connections; further calls wait for one, within `timeouts.store_s`."""
SENTINELS: Final = "redis+sentinel://"
"""The beginning of a URL that names sentinels."""
SENTINEL_PORT: Final = 26379
KEPT: Final = 4096
"""The most parsed entries, parsed heartbeats and logged refusals that are remembered."""
_KEY = TypeAdapter(tuple[Name, Name])
_CHARGES = TypeAdapter(dict[str, NonNegative])


class RedisStore:
    """The store of several bootstraps. Close it."""

    def __init__(
        self,
        client: Redis,
        *,
        namespace: str,
        timeout_s: float,
        expire_after_s: float,
        rooms: RoomTimes,
        metrics: Metrics,
    ) -> None:
        """`client`: made by `redis_client`. `namespace`: before the name of every key. `timeout_s`: `timeouts.store_s`."""
        self._client = client
        options = client.connection_pool.connection_kwargs
        self._where = options.get("path") or f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
        if isinstance(client.connection_pool, _MasterPool):
            self._where = f"the sentinels of {client.connection_pool.service_name}"
        self._namespace, self._timeout_s, self._metrics = namespace, timeout_s, metrics
        self._entries: dict[bytes, NodeEntry | None] = {}
        """By digest; None stands for a malformed entry."""
        self._told: set[tuple[str, ...]] = set()
        """Malformed values that were logged."""
        times_s = {"expire": expire_after_s, "claim": rooms.claim_s, "keep": rooms.keep_s, "note_keep": NOTE_KEEP_S}
        limits = {f"{name}_ms": max(1, round(seconds * 1e3)) for name, seconds in times_s.items()}
        limits |= {"max_rooms": rooms.max_rooms, "note_instances": NOTE_INSTANCES, "notes": NOTES}
        scripts = resources.files(__package__).joinpath("redis_store.lua").read_text()
        prelude, *parts = re.split(r"(?m)^--- (\w+).*\n", scripts)
        head = "".join(f"local {name} = {value}\n" for name, value in limits.items()) + prelude
        self._scripts = {
            name: client.register_script(f"{head}{body}end)() or false)")
            for name, body in zip(parts[::2], parts[1::2], strict=True)
        }

    def __repr__(self) -> str:
        return f"RedisStore({self._where}, namespace '{self._namespace}')"

    async def close(self) -> None:
        await self._client.aclose()

    async def nodes(self) -> tuple[NodeRecord, ...]:
        return await self._records(await self._run("LOOK", instance="", prefix=""))

    async def look(self, keys: Sequence[NodeKey]) -> tuple[NodeRecord, ...]:
        members = [*map(_member, keys)]
        return await self._records(await self._run("LOOK", instance="", prefix="", members=members)) if keys else ()

    async def of_instance(self, instance: str) -> tuple[str, tuple[NodeRecord, ...]]:
        prefix = _member((instance, ""))[:-3]  # its members begin with this, and no others
        found = await self._run("LOOK", instance=instance, prefix=prefix)
        # Hexadecimal: what somebody has left under this name may be no text, and Redis must get the same bytes back.
        return found[2].hex(), await self._records(found)

    async def put(self, entry: NodeEntry, *, version: str) -> bool:
        text, incarnation = entry.model_dump_json().encode(), entry.registration.incarnation
        beat = entry.beat.model_dump_json()
        fields = {"incarnation": incarnation, "beat": beat, "entry": text, "digest": _digest(text)}
        where = {"instance": entry.key[0], "member": _member(entry.key), "version": bytes.fromhex(version)}
        return bool(await self._run("PUT", **where, drawn=secrets.token_hex(8), fields=fields))

    async def beat(self, key: NodeKey, heartbeat: NodeHeartbeat) -> NodeRecord | None:
        facts = {"incarnation": heartbeat.incarnation, "beat": heartbeat.model_dump_json()}
        return next(iter(await self._records(await self._run("BEAT", member=_member(key), **facts))), None)

    async def remove(self, key: NodeKey, incarnation: str) -> bool:
        return bool(await self._run("REMOVE", member=_member(key), incarnation=incarnation))

    async def charge(self, pages: Mapping[NodeKey, Mapping[str, int]]) -> None:
        await self._run("CHARGE", counts={_member(key): {**counts, "rooms": 1} for key, counts in pages.items()})

    async def expire(self) -> tuple[NodeKey, ...]:
        gone = []
        for member in await self._run("EXPIRE"):
            try:
                gone.append(_KEY.validate_json(member))
            except ValidationError as error:
                self._refused("node", member, error)
        return tuple(gone)

    async def _records(self, found: Sequence[Any]) -> tuple[NodeRecord, ...]:
        """Return the records of an answer of LOOK. Entries whose digest is new here are read and parsed first."""
        now_ms, rows, _ = found
        unknown = [member for member, row in rows if row[1] not in self._entries]
        texts = await self._run("ENTRIES", members=unknown) if unknown else ()
        for member, text in zip(unknown, texts, strict=True):
            if not text or (digest := _digest(text)) in self._entries:
                continue
            if len(self._entries) >= KEPT:
                self._entries.clear()
            try:
                entry = NodeEntry.model_validate_json(text, extra="ignore")
                check_registration(entry.registration)
                self._entries[digest] = entry
            except (ValidationError, BridgeError) as error:
                self._entries[digest] = None
                self._refused("node", member, error)
        records = (self._record(member, row, now_ms) for member, row in rows)
        return tuple(record for record in records if record is not None)

    def _record(self, member: bytes, row: Sequence[Any], now_ms: int) -> NodeRecord | None:
        """Return None for a row of which a part is missing or malformed."""
        holder, digest, raw_beat, seen_ms, charges = row
        entry = self._entries.get(digest)
        if entry is None and digest:
            return None  # replaced a moment ago, or refused when it was parsed
        try:
            if entry is None or not (holder and raw_beat and seen_ms):
                raise ValueError("one of its fields is missing")  # noqa: TRY301 - told below
            beat, incarnation = _heartbeat(raw_beat), entry.registration.incarnation
            if beat.incarnation != incarnation or holder != incarnation.encode():
                raise ValueError("its fields are of several incarnations")  # noqa: TRY301
            if member != _member(entry.key):
                raise ValueError(f"it is the entry of {entry.key}")  # noqa: TRY301
            pages = _CHARGES.validate_python(msgpack.unpackb(charges)) if charges else {}
            return NodeRecord(entry, beat, max(0, now_ms - int(seen_ms)) / 1e3, pages, pages.pop("rooms", 0))
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            self._refused("node", member, error)
            return None

    async def claim(self, room: int, *, generations: int) -> Claim | RoomInUse:
        owner = secrets.token_hex(8)
        claimed, figure = await self._run("CLAIM", room=str(room), owner=owner, generations=generations)
        return Claim(room, owner, figure) if claimed else RoomInUse(figure / 1e3)

    async def settle(self, claim: Claim, ticket: Ticket, page_keys: Sequence[bytes] = ()) -> bool:
        facts = {"owner": claim.owner, "ticket": ticket.model_dump_json()}
        kept = await self._end(PairingState.PAIRED, claim.room, ticket.generation, **facts)
        if kept and page_keys:
            instances = (ticket.prefill.instance, ticket.decode.instance)
            with contextlib.suppress(NotReadyError):  # a note that is missing costs no ticket, only a guess
                await self._run("NOTE", keys=[key.hex() for key in page_keys], instances=instances)
        return kept

    async def give_up(self, claim: Claim, generation: int) -> None:
        await self._end(PairingState.CANCELLED, claim.room, generation, owner=claim.owner)

    async def cancelled(self, room: int, generation: int) -> None:
        await self._end(PairingState.CANCELLED, room, generation, paired_in=str(generation))

    async def _end(self, state: PairingState, room: int, generation: int, **facts: str) -> bool:
        field = "owner" if "owner" in facts else "paired_in"
        facts |= {"room": str(room), "field": field, "value": facts[field], "state": state.value}
        return bool(await self._run("END", **facts, generation=generation))

    async def ticket(self, room: int) -> Ticket | None:
        now_ms, state, generation, raw, settled_ms = await self._run("TICKET", room=str(room))
        if not raw:
            return None
        try:
            ticket = Ticket.model_validate_json(raw, extra="ignore")
            PairingState((state or b"").decode(errors="replace"))
            if (ticket.room, ticket.generation) != (room, int(generation)):
                raise ValueError(f"its ticket is of room {ticket.room} generation {ticket.generation}")  # noqa: TRY301 - told below
            return ticket.after(max(0, now_ms - int(settled_ms)) / 1e3)
        except (ValueError, TypeError) as error:
            self._refused("room", str(room).encode(), error)
            return None

    async def room_counts(self) -> dict[PairingState, int]:
        counts = await self._run("COUNTS", states=[state.value for state in PairingState])
        return dict(zip(PairingState, counts, strict=True))

    async def noted(self, page_keys: Sequence[bytes]) -> tuple[Mapping[str, float], ...]:
        now_ms, rows = await self._run("NOTED", keys=[key.hex() for key in page_keys])
        return tuple(
            {
                name.decode(errors="replace"): max(0.0, now_ms - float(ms)) / 1e3
                for name, ms in zip(row[::2], row[1::2], strict=True)
            }
            for row in rows
        )

    async def _run(self, name: str, **arguments: object) -> Any:  # noqa: ANN401 - as the script answers
        """Run a script within `timeouts.store_s`. Returns its answer, strings as bytes. Raises NotReadyError."""
        packed = msgpack.packb(arguments, use_bin_type=False)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._scripts[name](keys=[f"{self._namespace}:"], args=[packed])
        except (TimeoutError, RedisTimeoutError) as error:
            raise self._away("timeout", f"did not answer within {self._timeout_s:g} s (timeouts.store_s)") from error
        except (RedisConnectionError, OSError) as error:
            raise self._away("connection", f"cannot be reached: {error}") from error
        except RedisError as error:
            raise self._away("refused", f"refused a call: {error}") from error
        return msgpack.unpackb(answer, raw=True)

    def _away(self, kind: str, what: str) -> NotReadyError:
        self._metrics.count(STORE_FAILED, kind)
        return NotReadyError(f"the directory's Redis at {self._where} {what} (directory.redis_url)")

    def _refused(self, kind: str, name: bytes, error: Exception) -> None:
        """Count a malformed value. Log it once: it may be read many times before it is replaced."""
        self._metrics.count(STORE_REFUSED, kind)
        told = {"kind": kind, "name": name.decode(errors="replace"), "namespace": self._namespace, "reason": str(error)}
        if (key := tuple(told.values())) not in self._told:
            self._told = {key} if len(self._told) >= KEPT else self._told | {key}
            log.warning("stored_value_refused", **told)


@lru_cache(KEPT)
def _heartbeat(raw: bytes) -> NodeHeartbeat:
    """Parse a heartbeat; cached, because few nodes of a large fleet change between two looks."""
    return NodeHeartbeat.model_validate_json(raw, extra="ignore")


def _member(key: NodeKey) -> bytes:
    return json.dumps(key, separators=(",", ":")).encode()


def _digest(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest().encode()


class _Credentials(CredentialProvider):
    def __init__(self, user: str | None, password: Callable[[], str]) -> None:
        self._user = (user,) if user else ()
        self._password = password

    def get_credentials(self) -> Any:  # noqa: ANN401 - one or two strings
        return (*self._user, self._password())

    async def get_credentials_async(self) -> Any:  # noqa: ANN401 - the library's own logs a warning
        return self.get_credentials()


class _MasterPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the server that the sentinels name when a connection is made."""


def redis_client(url: str, password: Callable[[], str] = str, *, timeout_s: float) -> Redis:
    """Return a client that connects when it has to, and never repeats a call: a script must not run twice.

    Each new connection shows `password`, unless the password is empty or `url` has one. `RedisStore` limits the calls: the
    library's own limit is `asyncio.wait_for`, which in Python 3.11 loses a cancellation that meets the end of the wait, so a
    caller's deadline would never come. Raises ConfigError for a URL that cannot be read.
    """
    none = {"socket_timeout": None, "socket_connect_timeout": None, "retry": Retry(NoBackoff(), 0), "protocol": 2}
    limits = {"max_connections": CONNECTIONS, "timeout": timeout_s}
    try:
        if url.startswith(SENTINELS):
            return _master_client(urlsplit(url), password, limits, none)
        pool = BlockingConnectionPool.from_url(url, **limits, **none)
    except (ValueError, TypeError) as error:
        expected = f"redis://, rediss://, unix:// or {SENTINELS}HOST:PORT,HOST:PORT/NAME"
        raise ConfigError(f"directory.redis_url: cannot be read; expected {expected}") from error
    if password():
        options = pool.connection_kwargs
        options["credential_provider"] = _Credentials(options.pop("username", None), password)
    return Redis.from_pool(pool)


def _master_client(
    url: SplitResult, password: Callable[[], str], limits: Mapping[str, Any], none: Mapping[str, Any]
) -> Redis:
    """Return a client of the server that sentinels name. The sentinels ask for the same password. Raises ValueError."""
    name, given = url.path.strip("/"), unquote(url.password or "")
    if not url.hostname or not name:
        raise ValueError("no host, or no name of a server")
    sentinels = [(host, port or SENTINEL_PORT) for host, port in redis_hosts(url)]
    shown = _Credentials(url.username, (lambda: given) if given else password) if given or password() else None
    options = {**none, "credential_provider": shown}
    sentinel = Sentinel(sentinels, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    pool = _MasterPool(name, sentinel, **limits, **options)  # type: ignore[no-untyped-call]
    return Redis.from_pool(pool)

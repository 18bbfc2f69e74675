"""The directory: the nodes that announced themselves, the instances that they make up, and those to look at for a request.

A registration takes effect only if the store's answer that it was decided on is still true. A pairing may use an old answer: at
worst a daemon refuses the reservation.

For each request a few instances of each role are drawn at random. Their best pair is as good as the best of all, or better: what
the directory knows is as old as a heartbeat, so the best of all would be the same instances for everybody (`docs/performance.md`
has the figures). In a fleet that is filled evenly, few have place for a very long prompt. When no drawn pair has place, more
instances are therefore drawn, together with those that had the most free pages lately; then all are looked at. A pair that looks
full is offered last: the daemons decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable, Mapping
from heapq import nlargest
from typing import Final

import structlog

from kvbridge.api.client import DaemonClient
from kvbridge.api.directory import InstanceView, NodeHeartbeat, NodeRegistration, NodeView, PairRequest, Registered
from kvbridge.bootstrap.fit import Ranking, guess_held_pages, holders, noted_keys
from kvbridge.bootstrap.nodes import (
    Instance,
    NodeKey,
    NodeRecord,
    by_instance,
    check_agreement,
    check_registration,
    incompatible,
    succeed,
    ways_of,
)
from kvbridge.bootstrap.store import Store
from kvbridge.core import errors
from kvbridge.core.ids import Role
from kvbridge.core.wire.messages import FEATURES, MAX_INSTANCE_NODES, agree
from kvbridge.tier.keys import Keys

log = structlog.get_logger(__name__)

REGISTER_ATTEMPTS = 16
"""A node is told to register again after its instance has changed so many times in between."""
DRAWN: Final = (5, 64)
"""Instances of each role that are drawn for a request: at first, and when no pair of those has place."""
FREEST = 16
"""Instances of each role that are remembered as those with the most free pages."""


class Directory:
    """The nodes that are alive, by instance. Every method raises NotReadyError while the store does not answer."""

    def __init__(self, store: Store, daemons: DaemonClient, *, probe_s: float = 1.0) -> None:
        """`probe_s`: a daemon whose name another process claims has this time to say that it is still there."""
        self._store, self._daemons, self._probe_s = store, daemons, probe_s
        self._looking_at_all = asyncio.Lock()
        """Held by one pairing at a time: in a large fleet a look at all takes so long that heartbeats have to come in between."""
        # As of the last look at all, which the overview takes every quarter of a second, and of registrations here since.
        self._keys: dict[str, list[NodeKey]] = {}
        self._groups: dict[tuple[Role, str], list[str]] = {}
        """Instances by role and fingerprint, and all of a role under the fingerprint ""."""
        self._freest: dict[str, list[str]] = {}

    async def register(self, registration: NodeRegistration) -> Registered:
        """Add a node, or replace its former incarnation if that is gone.

        Raises InvalidInputError for a registration that contradicts itself, FingerprintMismatchError or ConflictError
        for one that contradicts the other nodes of its instance, ConflictError for a name that another process has,
        StaleError for an incarnation that was replaced, FeatureError.
        """
        who = f"node '{registration.node}' of instance '{registration.instance}'"
        agree(FEATURES, registration.features, us="this bootstrap", them=who)
        check_registration(registration)
        for _ in range(REGISTER_ATTEMPTS):
            version, records = await self._store.of_instance(registration.instance)
            others = {record.entry.key: record for record in records}
            known = others.pop((registration.instance, registration.node), None)
            for record in others.values():
                check_agreement(registration, record.registration)
            if len(others) >= MAX_INSTANCE_NODES:
                raise errors.ConflictError(
                    f"{who} is one too many: the instance has {len(others)} nodes, and may have {MAX_INSTANCE_NODES}; "
                    "put more ranks on a node"
                )
            entry = succeed(known.entry if known else None, registration)
            if known is not None and known.registration.incarnation != registration.incarnation:
                await self._require_gone(known)
            if await self._store.put(entry, version=version):
                if known is None or entry.epoch != known.entry.epoch:
                    log.info(
                        "node_registered",
                        peer_name=f"{registration.instance}/{registration.node}",
                        peer_role=registration.role.value,
                        incarnation=registration.incarnation,
                        epoch=entry.epoch,
                        url=registration.http_url,
                    )
                self._learn(registration)
                view = NodeRecord(entry, entry.beat, silent_s=0.0).view()
                return Registered(**dict(view), features=FEATURES)
        raise errors.NotReadyError(
            f"{who} could not be registered: other nodes of the instance registered in between {REGISTER_ATTEMPTS} times; "
            "register again"
        )

    async def _require_gone(self, known: NodeRecord) -> None:
        """Raise ConflictError unless the holder of a name is proved to be gone, although its heartbeats are fresh.

        The proof is at the holder's address: nobody answers, or another incarnation does. A daemon that was killed is thus replaced
        at once, and a second process of the same name is kept out.
        """
        holder = known.registration
        where = f"node '{holder.node}' of instance '{holder.instance}' is incarnation {holder.incarnation} at {holder.http_url}"
        heard = f"which was heard of {known.silent_s:.1f} s ago"
        try:
            async with asyncio.timeout(self._probe_s):
                if await self._daemons.incarnation(holder.http_url) != holder.incarnation:
                    return
        except (TimeoutError, errors.BridgeError) as error:
            raise errors.ConflictError(
                f"{where}, {heard} and could not be asked whether it still is "
                f"({str(error) or f'limit: {self._probe_s:g} s'}): its name is free after directory.expire_after_s of silence"
            ) from error
        raise errors.ConflictError(
            f"{where}, and answers there: two processes use one name; end one, or give it another `node`"
        )

    async def heartbeat(self, instance: str, node: str, heartbeat: NodeHeartbeat) -> NodeView:
        """Take a node's heartbeat: the node lives, and is so full.

        Raises NotFoundError when the node must register (again), StaleError when another incarnation has its name.
        """
        record = await self._store.beat((instance, node), heartbeat)
        return _owned(record, instance, node, heartbeat.incarnation).view()

    async def deregister(self, instance: str, node: str, incarnation: str) -> None:
        """Remove a node at its own wish. Raises NotFoundError and StaleError as `heartbeat` does."""
        if not await self._store.remove((instance, node), incarnation):
            record = next(iter(await self._store.look([(instance, node)])), None)
            _owned(record, instance, node, incarnation)
        log.info("node_left", peer_name=f"{instance}/{node}", incarnation=incarnation)

    async def expire(self) -> tuple[NodeKey, ...]:
        """Forget silent nodes, log them, and return their keys. No look shows them before that either."""
        gone = await self._store.expire()
        for instance, node in gone:
            log.warning("node_lost", peer_name=f"{instance}/{node}", limit="directory.expire_after_s")
        return gone

    async def instances(self) -> tuple[Instance, ...]:
        """Return every instance with a live node, ordered by name, its nodes too."""
        instances = by_instance(await self._store.nodes())
        self._keys, self._groups, self._freest = {}, {}, _freest(instances)
        for instance in instances:
            for record in instance.nodes:
                self._learn(record.registration)
        return instances

    def _learn(self, of: NodeRegistration) -> None:
        key, known = (of.instance, of.node), self._keys.setdefault(of.instance, [])
        if key not in known:
            known.append(key)
            if len(known) == 1:
                for fingerprint in ("", of.fingerprint):
                    self._groups.setdefault((of.role, fingerprint), []).append(of.instance)

    async def look(self, request: PairRequest, keys: Keys) -> Ranking:
        """Rank instances of which two are a pair for the request. Raises as `Ranking` when no two of all are."""
        found: Ranking | None = None
        for count, names in zip(DRAWN, ((), self._freest.get(request.fingerprint, ())), strict=True):
            instances, held = await self._guess(await self.draw(count, request.fingerprint, names), request, keys)
            with contextlib.suppress(errors.NotReadyError, errors.FingerprintMismatchError, errors.InvalidInputError):
                found = Ranking(instances, request, held, len(keys))
                if not found.looks_full:
                    break
        if found is not None:
            return found
        async with self._looking_at_all:
            instances, held = await self._guess(await self.instances(), request, keys)
            return Ranking(instances, request, held, len(keys))

    async def _guess(
        self, instances: tuple[Instance, ...], request: PairRequest, keys: Keys
    ) -> tuple[tuple[Instance, ...], dict[str, int]]:
        """Return `instances` with those that may hold the prompt, and the pages of it that each is likely to hold, by name."""
        if not (keys and any(instance.keeps_prefixes for instance in instances)):
            return instances, {}
        notes = await self._store.noted(noted_keys(keys, request.namespace))
        known = {instance.name for instance in instances}
        if others := [name for name in holders(notes) if name not in known]:
            instances = (*instances, *await self.draw(0, names=others))
        return instances, guess_held_pages(instances, notes, len(keys))

    async def draw(self, count: int, fingerprint: str = "", names: Iterable[str] = ()) -> tuple[Instance, ...]:
        """Return `count` random instances of each role (of this fingerprint, where one is given), and those named.

        They are drawn among those that are known here, and read from the store: the cost does not depend on the fleet's size.
        """
        drawn = set(names)
        for role in Role:
            group = self._groups.get((role, fingerprint), [])
            drawn.update(random.sample(group, min(count, len(group))))
        return by_instance(await self._store.look([key for name in drawn for key in self._keys.get(name, ())]))

    async def listing(self) -> tuple[InstanceView, ...]:
        """Return every instance as operators see it."""
        instances = await self.instances()
        found = incompatible(instances)
        return tuple(instance.view(found.get(instance.name, "")) for instance in instances)

    async def charge(self, pages: Iterable[tuple[Instance, Mapping[str, int]]]) -> None:
        """Count a room against all nodes of instances until their next heartbeats.

        Otherwise every request between two heartbeats would go to the same, least busy instance.
        """
        await self._store.charge({record.entry.key: counts for instance, counts in pages for record in instance.nodes})


def _freest(instances: Iterable[Instance]) -> dict[str, list[str]]:
    """Return the names of the ready instances with the most free pages by fingerprint, and of all under the fingerprint ""."""
    groups: dict[tuple[str, Role], list[tuple[float, str]]] = {}
    for instance in instances:
        if instance.ready:
            for fingerprint in ("", instance.first.fingerprint):
                groups.setdefault((fingerprint, instance.first.role), []).append((instance.free_share, instance.name))
    found: dict[str, list[str]] = {}
    for (fingerprint, _), of_role in groups.items():
        found.setdefault(fingerprint, []).extend(name for _, name in nlargest(FREEST, of_role))
    return found


def absences(listing: Iterable[InstanceView]) -> tuple[str, ...]:
    """Return why no pair can be made of the instances that are there; empty when one can."""
    listing = tuple(listing)
    reasons = []
    for role in Role:
        of_role = [one for one in listing if one.role is role]
        if not any(one.ready for one in of_role):
            reasons.append(f"no {role} instance is ready ({len(of_role)} known{_reasons_of_first(of_role)})")
    ways = [{way for one in listing if one.ready and one.role is role for way in ways_of(one)} for role in Role]
    if not reasons and not set.intersection(*ways):
        waiting = _reasons_of_first([one for one in listing if not one.ready])
        reasons.append(f"no ready prefill instance can be paired with a ready decode instance{waiting}")
    return tuple(reasons)


def _reasons_of_first(listing: list[InstanceView]) -> str:
    return f"; '{listing[0].instance}': {', '.join(listing[0].reasons)}" if listing else ""


def _owned(record: NodeRecord | None, instance: str, node: str, incarnation: str) -> NodeRecord:
    if record is None:
        raise errors.NotFoundError(f"node '{node}' of instance '{instance}' is not registered now: register again")
    if record.registration.incarnation != incarnation:
        raise errors.StaleError(
            f"node '{node}' of instance '{instance}' is now incarnation {record.registration.incarnation} at "
            f"{record.registration.http_url}, not {incarnation}: two processes use one name, or this one was replaced"
        )
    return record

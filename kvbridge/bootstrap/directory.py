"""The directory: the nodes that announced themselves, and the instances that they make up.

Every decision is made on an answer of the store, and takes effect only if that answer is still true. The worst that an old answer
leads to is a refused reservation: the daemons decide.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest

import structlog

from kvbridge.api.client import DaemonClient
from kvbridge.api.directory import InstanceView, NodeHeartbeat, NodeRegistration, NodeView, Registered
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
from kvbridge.bootstrap.stores.base import Store
from kvbridge.core.errors import BridgeError, ConflictError, NotFoundError, NotReadyError, StaleError
from kvbridge.core.ids import Role
from kvbridge.core.wire.features import FEATURES, agree
from kvbridge.core.wire.messages import MAX_INSTANCE_NODES

log = structlog.get_logger(__name__)

REGISTER_ATTEMPTS = 16
"""Registrations of one instance that may come in between, one after another, before a node is told to come again."""
FREEST = 16
"""Instances of each role that are remembered as those with the most free pages."""


class Directory:
    """The nodes that are alive, by instance. Every method raises NotReadyError when the store cannot be asked now."""

    def __init__(
        self, store: Store, daemons: DaemonClient, *, probe_s: float = 1.0, chance: random.Random | None = None
    ) -> None:
        """`probe_s`: a daemon whose name another process claims has this time to say that it is still there. `chance` draws."""
        self._store = store
        self._daemons = daemons
        self._probe_s = probe_s
        self._chance = chance or random.Random()  # noqa: S311 - spreads load, keeps no secret
        # As of the last look at all, which the overview takes every quarter of a second, and of registrations here since.
        self._keys: dict[str, list[NodeKey]] = {}
        self._groups: dict[tuple[Role, str], list[str]] = {}
        """Instances by role and fingerprint, and all of a role under the fingerprint ""."""
        self._freest: dict[str, list[str]] = {}

    async def register(self, registration: NodeRegistration) -> Registered:
        """Add a node, or replace its former incarnation if that is gone.

        Raises InvalidInputError for a registration that contradicts itself, FingerprintMismatchError or ConflictError
        for one that contradicts the other nodes of its instance, ConflictError for a name that another process has,
        StaleError for an incarnation already replaced, FeatureError.
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
                raise ConflictError(
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
        raise NotReadyError(
            f"{who} could not be registered: other nodes of the instance came in between {REGISTER_ATTEMPTS} times; register again"
        )

    async def _require_gone(self, known: NodeRecord) -> None:
        """Raise ConflictError unless it is proved that the holder of a name, whose heartbeats are fresh, is not there.

        The proof is at its address: nobody answers, or another incarnation does. So a daemon that was killed is replaced at once,
        and a second process of the same name is kept out.
        """
        holder = known.registration
        where = f"node '{holder.node}' of instance '{holder.instance}' is incarnation {holder.incarnation} at {holder.http_url}"
        heard = f"which was heard of {known.silent_s:.1f} s ago"
        try:
            async with asyncio.timeout(self._probe_s):
                if await self._daemons.incarnation(holder.http_url) != holder.incarnation:
                    return
        except (TimeoutError, BridgeError) as error:
            raise ConflictError(
                f"{where}, {heard} and could not be asked whether it still is "
                f"({str(error) or f'limit: {self._probe_s:g} s'}): its name is free after directory.expire_after_s of silence"
            ) from error
        raise ConflictError(
            f"{where}, and answers there: two processes use one name; end one of them or give it another `node`"
        )

    async def heartbeat(self, instance: str, node: str, heartbeat: NodeHeartbeat) -> NodeView:
        """Note that a node lives, and how full it is.

        Raises NotFoundError when the node must register (again), StaleError when another incarnation took its place.
        """
        record = await self._store.beat((instance, node), heartbeat)
        return _owned(record, instance, node, heartbeat.incarnation).view()

    async def deregister(self, instance: str, node: str, incarnation: str) -> None:
        """Take a node off at its own wish. Raises NotFoundError and StaleError as `heartbeat` does."""
        if not await self._store.remove((instance, node), incarnation):
            record = next(iter(await self._store.look([(instance, node)])), None)
            _owned(record, instance, node, incarnation)
        log.info("node_left", peer_name=f"{instance}/{node}", incarnation=incarnation)

    async def expire(self) -> tuple[NodeKey, ...]:
        """Forget silent nodes, say so in the log, and return their keys. Nobody sees them before that either."""
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

    async def draw(self, count: int, fingerprint: str = "", names: Iterable[str] = ()) -> tuple[Instance, ...]:
        """Return `count` instances of each role, drawn at random (of this fingerprint, where one is given), and those named.

        They are drawn among those that are known here, and read from the store: that costs what they are, not what the fleet is.
        """
        drawn = set(names)
        for role in Role:
            group = self._groups.get((role, fingerprint), [])
            drawn.update(self._chance.sample(group, min(count, len(group))))
        return by_instance(await self._store.look([key for name in drawn for key in self._keys.get(name, ())]))

    def freest(self, fingerprint: str = "") -> Sequence[str]:
        """Return the instances of both roles that had the most free pages when the overview looked at all instances last."""
        return self._freest.get(fingerprint, ())

    async def listing(self) -> tuple[InstanceView, ...]:
        """Return what operators see."""
        instances = await self.instances()
        found = incompatible(instances)
        return tuple(instance.view(found.get(instance.name, "")) for instance in instances)

    async def charge(self, pages: Iterable[tuple[Instance, Mapping[str, int]]]) -> None:
        """Count a room against all nodes of instances until their next heartbeats tell the truth.

        Without it every request between two heartbeats would go to the same, least busy instance.
        """
        await self._store.charge({record.entry.key: counts for instance, counts in pages for record in instance.nodes})


def _freest(instances: Iterable[Instance]) -> dict[str, list[str]]:
    """By fingerprint, and those of all under the fingerprint ""."""
    groups: dict[tuple[str, Role], list[tuple[float, str]]] = {}
    for instance in instances:
        if instance.ready:
            for fingerprint in ("", instance.fingerprint):
                groups.setdefault((fingerprint, instance.role), []).append((instance.free_share, instance.name))
    found: dict[str, list[str]] = {}
    for (fingerprint, _), of_role in groups.items():
        found.setdefault(fingerprint, []).extend(name for _, name in nlargest(FREEST, of_role))
    return found


def absences(listing: Iterable[InstanceView]) -> tuple[str, ...]:
    """Return why no pair can be made, judged by who is there; empty when one can."""
    listing = tuple(listing)
    ready = [instance for instance in listing if instance.ready]
    reasons = []
    for role in Role:
        of_role = [instance for instance in listing if instance.role is role]
        if not any(instance.role is role for instance in ready):
            first = "".join(f"; '{each.instance}': {', '.join(each.reasons)}" for each in of_role[:1])
            reasons.append(f"no {role} instance is ready ({len(of_role)} known{first})")
    if not reasons:
        ways = [{way for one in ready if one.role is role for way in ways_of(one)} for role in Role]
        if not set.intersection(*ways):
            waiting = [one for one in listing if not one.ready]
            first = "".join(f"; '{each.instance}': {', '.join(each.reasons)}" for each in waiting[:1])
            reasons.append(f"no ready prefill instance can be paired with a ready decode instance{first}")
    return tuple(reasons)


def _owned(record: NodeRecord | None, instance: str, node: str, incarnation: str) -> NodeRecord:
    if record is None:
        raise NotFoundError(f"node '{node}' of instance '{instance}' is not registered (any more): register again")
    if record.registration.incarnation != incarnation:
        raise StaleError(
            f"node '{node}' of instance '{instance}' is now incarnation {record.registration.incarnation} at "
            f"{record.registration.http_url}, not {incarnation}: "
            "two processes use one name, or this one was replaced"
        )
    return record

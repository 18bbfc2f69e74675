"""Who is there: the nodes that announced themselves, and the instances that they make up.

Owns: registration, incarnations, expiry, completeness, the agreement of an instance's nodes.
Must not know: HTTP, how a pair is chosen, where records are kept.

All decisions are made on the records at hand and a clock, without waiting. A store that is shared by several replicas
keeps its own copy of the records current; the worst that an old copy leads to is a refused reservation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import structlog

from kvbridge.core.clock import Clock, monotonic
from kvbridge.core.errors import (
    ConflictError,
    FingerprintMismatchError,
    InvalidInputError,
    NotFoundError,
    StaleError,
)
from kvbridge.core.geometry.components import ModelGeometry
from kvbridge.core.geometry.manifest import fingerprint, first_difference
from kvbridge.core.ids import FrozenModel, Positive, Rank, Role
from kvbridge.service.ports import Load, NodeHeartbeat, NodeRegistration, Readiness

log = structlog.get_logger(__name__)

REPLACED_KEPT = 16
"""Former incarnations of a node that are remembered, so that they are refused when they come back."""

NodeKey = tuple[str, str]
"""(instance, node)."""


class NodeRecord(FrozenModel):
    """One node as the directory knows it."""

    registration: NodeRegistration
    ready: bool
    load: Load
    seen_s: float
    """When it was last heard of, on the directory's clock."""
    epoch: Positive = 1
    """Counts the incarnations seen under this name."""
    replaced: tuple[str, ...] = ()
    """Former incarnations, oldest first."""

    @property
    def key(self) -> NodeKey:
        """What the record is stored under."""
        return self.registration.instance, self.registration.node


class NodeView(FrozenModel):
    """One node in a listing."""

    node: str
    http_url: str
    control_endpoint: str
    incarnation: str
    epoch: Positive
    ranks: tuple[Rank, ...]
    ready: bool
    load: Load
    silent_s: float
    """Seconds since it was last heard of."""


class InstanceView(FrozenModel):
    """One instance in a listing."""

    instance: str
    role: Role
    model: str
    fingerprint: str
    pp_size: Positive
    tp_size: Positive
    complete: bool
    """Whether all pp x tp ranks are there."""
    ready: bool
    """Whether it is complete and every node is ready."""
    reasons: tuple[str, ...] = ()
    """Why it is not ready."""
    nodes: tuple[NodeView, ...]


class Instance(FrozenModel):
    """The live nodes of one instance, ordered by name; they agree on role, sizes and geometry."""

    name: str
    nodes: tuple[NodeRecord, ...]

    @property
    def first(self) -> NodeRegistration:
        """A node that speaks for all in what all agree on."""
        return self.nodes[0].registration

    @property
    def role(self) -> Role:
        """What the instance does."""
        return self.first.role

    @property
    def fingerprint(self) -> str:
        """What must be equal on both sides of a pair."""
        return self.first.fingerprint

    @property
    def geometry(self) -> ModelGeometry:
        """The model's geometry."""
        return self.first.geometry

    @property
    def rooms(self) -> int:
        """Rooms on the busiest node."""
        return max(record.load.rooms for record in self.nodes)

    @property
    def http_urls(self) -> tuple[str, ...]:
        """The doors of all nodes, in the order of their names."""
        return tuple(record.registration.http_url for record in self.nodes)

    def missing(self) -> tuple[Rank, ...]:
        """Return the ranks that no live node has."""
        here = {(rank.pp, rank.tp) for record in self.nodes for rank in record.registration.ranks}
        return tuple(
            Rank(pp=pp, tp=tp)
            for pp in range(self.first.pp_size)
            for tp in range(self.first.tp_size)
            if (pp, tp) not in here
        )

    def reasons(self) -> tuple[str, ...]:
        """Return why no request may be sent here now; empty when it is ready."""
        found = []
        if missing := self.missing():
            found.append(f"{len(missing)} of its ranks are missing, first {missing[0]}")
        found += [f"node '{record.registration.node}' is not ready" for record in self.nodes if not record.ready]
        return tuple(found)


class DirectoryStore(Protocol):
    """Where records are kept."""

    def records(self) -> list[NodeRecord]:
        """Return all records."""

    def get(self, key: NodeKey) -> NodeRecord | None:
        """Return one record."""

    def put(self, record: NodeRecord) -> None:
        """Add or replace a record under its key."""

    def remove(self, key: NodeKey) -> None:
        """Forget a record; harmless when there is none."""


class MemoryStore:
    """Records of one process; gone with it, and back after one heartbeat of each node."""

    def __init__(self) -> None:
        self._records: dict[NodeKey, NodeRecord] = {}

    def records(self) -> list[NodeRecord]:
        """See DirectoryStore."""
        return list(self._records.values())

    def get(self, key: NodeKey) -> NodeRecord | None:
        """See DirectoryStore."""
        return self._records.get(key)

    def put(self, record: NodeRecord) -> None:
        """See DirectoryStore."""
        self._records[record.key] = record

    def remove(self, key: NodeKey) -> None:
        """See DirectoryStore."""
        self._records.pop(key, None)


class Directory:
    """The nodes that are alive, by instance. Every call first takes the silent ones off."""

    def __init__(self, store: DirectoryStore, *, expire_after_s: float, clock: Clock = monotonic) -> None:
        self._store = store
        self._expire_after_s = expire_after_s
        self._clock = clock

    def __repr__(self) -> str:
        instances = self.instances()
        ready = sum(1 for instance in instances if not instance.reasons())
        nodes = sum(len(instance.nodes) for instance in instances)
        return f"Directory({len(instances)} instances, {ready} ready, {nodes} nodes)"

    def register(self, registration: NodeRegistration) -> NodeView:
        """Add a node, or replace its former incarnation.

        Raises InvalidInputError for a registration that contradicts itself, FingerprintMismatchError or ConflictError
        for one that contradicts the other nodes of its instance, StaleError for an incarnation already replaced.
        """
        _check_itself(registration)
        self.expire()
        key = (registration.instance, registration.node)
        known = self._store.get(key)
        for record in self._of_instance(registration.instance):
            if record.key != key:
                _check_agreement(registration, record.registration)
        epoch, replaced = _succession(known, registration.incarnation)
        record = NodeRecord(
            registration=registration,
            ready=registration.ready,
            load=registration.load,
            seen_s=self._clock(),
            epoch=epoch,
            replaced=replaced,
        )
        self._store.put(record)
        if known is None or epoch != known.epoch:
            log.info(
                "node registered",
                instance=registration.instance,
                node=registration.node,
                role=registration.role.value,
                incarnation=registration.incarnation,
                epoch=epoch,
                url=registration.http_url,
            )
        return self._node_view(record)

    def heartbeat(self, instance: str, node: str, heartbeat: NodeHeartbeat) -> NodeView:
        """Note that a node lives, and how full it is.

        Raises NotFoundError when the node must register (again), StaleError when another incarnation took its place.
        """
        record = self._owned(instance, node, heartbeat.incarnation)
        seen = record.model_copy(update={"ready": heartbeat.ready, "load": heartbeat.load, "seen_s": self._clock()})
        self._store.put(seen)
        return self._node_view(seen)

    def deregister(self, instance: str, node: str, incarnation: str) -> None:
        """Take a node off at its own wish. Raises NotFoundError and StaleError as `heartbeat` does."""
        record = self._owned(instance, node, incarnation)
        self._store.remove(record.key)
        log.info("node left", instance=instance, node=node, incarnation=incarnation)

    def expire(self) -> tuple[NodeKey, ...]:
        """Take silent nodes off and return their keys. Call it now and then: it also writes the log."""
        now_s = self._clock()
        gone = [record for record in self._store.records() if now_s - record.seen_s > self._expire_after_s]
        for record in gone:
            self._store.remove(record.key)
            log.warning(
                "node lost: no heartbeat",
                instance=record.registration.instance,
                node=record.registration.node,
                silent_s=round(now_s - record.seen_s, 3),
                limit="directory.expire_after_s",
            )
        return tuple(record.key for record in gone)

    def instances(self) -> tuple[Instance, ...]:
        """Return every instance with a live node, ordered by name, its nodes too."""
        self.expire()
        grouped: dict[str, list[NodeRecord]] = {}
        for record in sorted(self._store.records(), key=lambda record: record.key):
            grouped.setdefault(record.registration.instance, []).append(record)
        return tuple(Instance(name=name, nodes=tuple(records)) for name, records in grouped.items())

    def listing(self) -> tuple[InstanceView, ...]:
        """Return what operators see."""
        return tuple(self._view(instance) for instance in self.instances())

    def charge(self, instance: str, pages: Mapping[str, int]) -> None:
        """Count a reservation against an instance's nodes until their next heartbeats tell the truth.

        Without it every request between two heartbeats would go to the same, least busy instance.
        """
        for record in self._of_instance(instance):
            free = {space: max(0, count - pages.get(space, 0)) for space, count in record.load.free_pages.items()}
            load = record.load.model_copy(update={"free_pages": free, "rooms": record.load.rooms + 1})
            self._store.put(record.model_copy(update={"load": load}))

    def readiness(self) -> Readiness:
        """Return ready always, since nodes must be able to register; the reasons say why no pair can be made yet."""
        instances = self.instances()
        reasons = []
        for role in Role:
            of_role = [instance for instance in instances if instance.role is role]
            if not any(not instance.reasons() for instance in of_role):
                reasons.append(f"no {role} instance is ready ({len(of_role)} known)")
        return Readiness(ready=True, reasons=tuple(reasons))

    def _of_instance(self, instance: str) -> list[NodeRecord]:
        return [record for record in self._store.records() if record.registration.instance == instance]

    def _owned(self, instance: str, node: str, incarnation: str) -> NodeRecord:
        self.expire()
        record = self._store.get((instance, node))
        if record is None:
            raise NotFoundError(f"node '{node}' of instance '{instance}' is not registered (any more): register again")
        if record.registration.incarnation != incarnation:
            raise StaleError(
                f"node '{node}' of instance '{instance}' is now incarnation {record.registration.incarnation} at "
                f"{record.registration.http_url}, not {incarnation}: "
                "two processes use one name, or this one was replaced"
            )
        return record

    def _node_view(self, record: NodeRecord) -> NodeView:
        registration = record.registration
        return NodeView(
            node=registration.node,
            http_url=registration.http_url,
            control_endpoint=registration.control.endpoint if registration.control else "",
            incarnation=registration.incarnation,
            epoch=record.epoch,
            ranks=registration.ranks,
            ready=record.ready,
            load=record.load,
            silent_s=self._clock() - record.seen_s,
        )

    def _view(self, instance: Instance) -> InstanceView:
        reasons = instance.reasons()
        return InstanceView(
            instance=instance.name,
            role=instance.role,
            model=instance.geometry.name,
            fingerprint=instance.fingerprint,
            pp_size=instance.first.pp_size,
            tp_size=instance.first.tp_size,
            complete=not instance.missing(),
            ready=not reasons,
            reasons=reasons,
            nodes=tuple(self._node_view(record) for record in instance.nodes),
        )


def _succession(known: NodeRecord | None, incarnation: str) -> tuple[int, tuple[str, ...]]:
    """Return the epoch and the former incarnations once `incarnation` stands in the place of `known`."""
    if known is None:
        return 1, ()
    present = known.registration.incarnation
    if incarnation == present:
        return known.epoch, known.replaced
    if incarnation in known.replaced:
        raise StaleError(
            f"incarnation {incarnation} of node '{known.registration.node}' was replaced by {present} at "
            f"{known.registration.http_url}: two processes use one name, or this one should have ended"
        )
    return known.epoch + 1, (*known.replaced, present)[-REPLACED_KEPT:]


def _check_itself(registration: NodeRegistration) -> None:
    who = f"node '{registration.node}' of instance '{registration.instance}'"
    expected = fingerprint(registration.geometry)
    if registration.fingerprint != expected:
        raise InvalidInputError(
            f"{who}: the fingerprint {registration.fingerprint} is not that of its geometry ({expected}): "
            "the node runs another version of kvbridge"
        )
    if not registration.ranks:
        raise InvalidInputError(f"{who} has no rank")
    seen: set[tuple[int, int]] = set()
    for rank in registration.ranks:
        if rank.pp >= registration.pp_size or rank.tp >= registration.tp_size:
            raise InvalidInputError(
                f"{who}: rank {rank} does not exist in {registration.pp_size} stages x {registration.tp_size}"
            )
        if (rank.pp, rank.tp) in seen:
            raise InvalidInputError(f"{who}: rank {rank} is listed twice")
        seen.add((rank.pp, rank.tp))


def _check_agreement(new: NodeRegistration, other: NodeRegistration) -> None:
    """Refuse a node that cannot belong to the same copy of a model as another one."""
    where = f"node '{new.node}' cannot join instance '{new.instance}'"
    for name in ("role", "pp_size", "tp_size"):
        ours, theirs = getattr(new, name), getattr(other, name)
        if ours != theirs:
            raise ConflictError(f"{where}: its {name} is {ours}, that of node '{other.node}' is {theirs}")
    if difference := first_difference(new.geometry, other.geometry):
        raise FingerprintMismatchError(
            f"{where}: {difference} (here: node '{new.node}', peer: node '{other.node}'); "
            "give both the same model and encoding"
        )
    taken = {(rank.pp, rank.tp) for rank in other.ranks}
    for rank in new.ranks:
        if (rank.pp, rank.tp) in taken:
            raise ConflictError(f"{where}: rank {rank} already lives on node '{other.node}' at {other.http_url}")

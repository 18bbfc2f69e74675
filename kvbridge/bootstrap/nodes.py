"""Nodes and instances as the directory knows them, and the checks of registrations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from kvbridge.api import directory as api
from kvbridge.api.directory import InstanceView, NodeHeartbeat, NodeRegistration, NodeView, TicketEnd
from kvbridge.core import errors
from kvbridge.core.geometry.manifest import fingerprint, first_difference
from kvbridge.core.ids import FrozenModel, Positive, Rank, Role
from kvbridge.core.prefixes import identity_conflict
from kvbridge.pool.memory.layout import stage_layers

REPLACED_KEPT = 16
"""The most former incarnations of a node that are remembered, to be refused when they come back."""

NodeKey = tuple[str, str]
"""(instance, node)."""


class NodeEntry(FrozenModel):
    """The large part of a record; it changes only when the node registers."""

    registration: NodeRegistration
    epoch: Positive = 1
    """Counts the incarnations seen under this name."""
    replaced: tuple[api.Name, ...] = ()
    """Former incarnations, oldest first."""

    @property
    def key(self) -> NodeKey:
        """The node's key in a store."""
        return self.registration.instance, self.registration.node

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """See `ways_of`; cached for pairings."""
        return ways_of(self.registration)

    @cached_property
    def kind(self) -> tuple[str, ...]:
        """Equal on nodes of which a request needs equally many pages: model, role, components in the host pool."""
        of = self.registration
        return of.fingerprint, of.role.value, *(kind.value for kind in of.host)

    @property
    def beat(self) -> NodeHeartbeat:
        """The heartbeat that the registration stands for."""
        return self.registration.heartbeat


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node as a store knows it at the moment of the call."""

    entry: NodeEntry
    """Its registration's `ready` and `load` are old; those of `beat` count."""
    beat: NodeHeartbeat
    silent_s: float
    """Seconds since the heartbeat, on the store's clock."""
    charged_pages: Mapping[str, int] = field(default_factory=dict)
    """Pages that rooms were given since the heartbeat, by index space."""
    charged_rooms: int = 0

    @property
    def registration(self) -> NodeRegistration:
        """See NodeEntry."""
        return self.entry.registration

    def free_pages(self, space: str) -> int:
        """Return the available pages of a space less those charged; negative when more were charged."""
        return self.beat.load.available_pages.get(space, 0) - self.charged_pages.get(space, 0)

    def view(self) -> NodeView:
        """Return what operators and the node itself see. Charges count as used."""
        of, load = self.registration, self.beat.load
        if self.charged_rooms:
            free = {space: max(0, self.free_pages(space)) for space in load.available_pages}
            load = load.model_copy(update={"available_pages": free, "rooms": load.rooms + self.charged_rooms})
        return NodeView(
            node=of.node,
            http_url=of.http_url,
            engine_url=of.engine_url,
            control_endpoint=of.control.endpoint if of.control else "",
            incarnation=of.incarnation,
            epoch=self.entry.epoch,
            ranks=of.ranks,
            ready=self.beat.ready,
            load=load,
            silent_s=self.silent_s,
        )


@dataclass(frozen=True, slots=True)
class Instance:
    """The live nodes of one instance, at least one, ordered by name; they agree on role, sizes and geometry."""

    name: str
    nodes: tuple[NodeRecord, ...]
    first: NodeRegistration
    """The registration of one node, for what all agree on."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """See `ways_of`."""
        return self.nodes[0].entry.ways

    @property
    def rooms(self) -> int:
        """Rooms on the busiest node."""
        return max(record.beat.load.rooms + record.charged_rooms for record in self.nodes)

    @property
    def free_share(self) -> float:
        """The free share of the scarcest pool of the fullest node."""
        return min(
            record.free_pages(space) / total
            for record in self.nodes
            for space, total in (record.beat.load.total_pages or {"": 1}).items()
            if total
        )

    @property
    def end(self) -> TicketEnd:
        """The instance's side of a ticket."""
        registrations = [record.registration for record in self.nodes]
        return TicketEnd(
            instance=self.name,
            http_urls=tuple(of.http_url for of in registrations),
            engine_urls=tuple(of.engine_url for of in registrations if of.engine_url),
        )

    @property
    def keeps_prefixes(self) -> bool:
        """True if all nodes say that they keep prefixes."""
        return all(record.beat.load.prefixes_kept_s is not None for record in self.nodes)

    @property
    def ready(self) -> bool:
        """True if requests may be sent here now. A pairing may ask a whole large fleet, so this is quick."""
        return all(record.beat.ready for record in self.nodes) and not self.missing

    @property
    def missing(self) -> int:
        """Number of ranks that no live node has; no two nodes have the same rank."""
        return self.first.pp_size * self.first.tp_size - sum(len(record.registration.ranks) for record in self.nodes)

    def reasons(self) -> tuple[str, ...]:
        """Return why no request may be sent here now; empty when it is ready."""
        found = []
        if self.missing:
            # Counted one by one: the number of ranks is a registration's word, and may be huge.
            here = {rank for record in self.nodes for rank in record.registration.ranks}
            tp_size = self.first.tp_size
            places = (Rank(pp=number // tp_size, tp=number % tp_size) for number in count())
            first = next(rank for rank in places if rank not in here)
            found.append(f"{self.missing} of its ranks are missing, first {first}")
        for record in self.nodes:
            if not record.beat.ready:
                why = f": {'; '.join(record.beat.reasons)}" if record.beat.reasons else ""
                found.append(f"node '{record.registration.node}' is not ready{why}")
        return tuple(found)

    def view(self, unmatched: str = "") -> InstanceView:
        """Return what operators see. `unmatched`: why nobody can be paired with the instance, see `incompatible`."""
        return InstanceView(
            instance=self.name,
            role=self.first.role,
            model=self.first.geometry.name,
            fingerprint=self.first.fingerprint,
            model_identity=self.first.model_identity,
            tokens_per_page=self.first.geometry.tokens_per_page,
            pp_size=self.first.pp_size,
            tp_size=self.first.tp_size,
            meets_by=tuple(sorted(set(self.first.meets_by))),
            complete=not self.missing,
            ready=self.ready and not unmatched,
            reasons=(*self.reasons(), unmatched) if unmatched else self.reasons(),
            nodes=tuple(record.view() for record in self.nodes),
        )


Way = tuple[str, str, tuple[str, str] | None]
"""A way to be one of a pair: fingerprint of the model, how nodes meet, name and revision of the weights. Strings hash quickly."""


def ways_of(of: NodeRegistration | InstanceView) -> tuple[Way, ...]:
    """Return the ways of an instance. A prefill and a decode instance can be paired if they have a way in common.

    A decode instance that does not state its weights takes pages of any: every prefill instance has that way, too. A decode
    instance that states its weights takes pages of those only (`identity_conflict`).
    """
    model = of.model_identity
    own = (model.name, model.revision) if model else None
    held = {own, None} if of.role is Role.PREFILL else {own}
    return tuple((of.fingerprint, mode.value, one) for mode in of.meets_by for one in held)


MODES_REMEDY = "give all of them keys (control.curve.secret_key_file), or none (and `insecure`, beyond one machine)"


def modes_text(*registrations: NodeRegistration) -> str:
    """Return the ways in which nodes meet others, in words."""
    return " or ".join(sorted({mode for of in registrations for mode in of.meets_by}))


def incompatible(instances: Iterable[Instance]) -> dict[str, str]:
    """Return why instances can be paired with none of the other role, although there are some: reasons by name."""
    instances = tuple(instances)
    found = {}
    for role in Role:
        ours = [one for one in instances if one.first.role is role]
        others = [one for one in instances if one.first.role is not role]
        ways = {way for one in others for way in one.ways}
        for one in ours if others else ():
            if ways.isdisjoint(one.ways):
                found[one.name] = str(mismatch(one, others))
    return found


def mismatch(ours: Instance, others: Sequence[Instance]) -> errors.BridgeError:
    """Return why an instance can be paired with none of these, at least one, of the other role."""
    role, name = others[0].first.role, f"'{ours.name}'"
    of_model = [one for one in others if one.first.fingerprint == ours.first.fingerprint]
    if not of_model:
        difference = first_difference(ours.first.geometry, others[0].first.geometry)
        return errors.FingerprintMismatchError(
            f"no {role} instance holds the model '{ours.first.geometry.name}' of {name}; between {name} (here) and "
            f"'{others[0].name}' (peer) the first difference is: {difference}; give both the same model and encoding"
        )
    pairs = [(ours, one) if ours.first.role is Role.PREFILL else (one, ours) for one in of_model]
    conflicts = [identity_conflict(*(one.first.model_identity for one in pair)) for pair in pairs]
    if all(conflicts):
        return errors.FingerprintMismatchError(f"no {role} instance holds the weights of {name}: {conflicts[0]}")
    modes = modes_text(*(one.first for one in of_model))
    return errors.NotReadyError(
        f"{name} meets others by {modes_text(ours.first)}, {role} instances of its model by {modes}: {MODES_REMEDY}"
    )


def by_instance(records: Iterable[NodeRecord]) -> tuple[Instance, ...]:
    """Return the instances that the records make up, ordered by name, and so are their nodes."""
    grouped: dict[str, list[NodeRecord]] = {}
    for record in records:
        grouped.setdefault(record.entry.registration.instance, []).append(record)
    for nodes in grouped.values():
        if len(nodes) > 1:
            nodes.sort(key=lambda record: record.entry.registration.node)
    return tuple(Instance(name, tuple(nodes), nodes[0].registration) for name, nodes in sorted(grouped.items()))


def succeed(known: NodeEntry | None, registration: NodeRegistration) -> NodeEntry:
    """Return the entry for a registration that takes the place of `known`. Raises StaleError for a former incarnation."""
    if known is None:
        return NodeEntry(registration=registration)
    present = known.registration.incarnation
    if registration.incarnation == present:
        return known.model_copy(update={"registration": registration})
    if registration.incarnation in known.replaced:
        raise errors.StaleError(
            f"incarnation {registration.incarnation} of node '{registration.node}' was replaced by {present} at "
            f"{known.registration.http_url}: two processes use one name, or this one should have ended"
        )
    replaced = (*known.replaced, present)[-REPLACED_KEPT:]
    return NodeEntry(registration=registration, epoch=known.epoch + 1, replaced=replaced)


def check_registration(registration: NodeRegistration) -> None:
    """Raise InvalidInputError for a registration that contradicts itself."""
    who = f"node '{registration.node}' of instance '{registration.instance}'"
    expected = fingerprint(registration.geometry)
    if registration.fingerprint != expected:
        raise errors.InvalidInputError(
            f"{who}: the fingerprint {registration.fingerprint} is not that of its geometry ({expected}): "
            "the node runs another version of kvbridge"
        )
    for kind in registration.host:
        if not registration.geometry.component(kind).host_capable:
            raise errors.InvalidInputError(f"{who}: component '{kind}' cannot live in its host pool")
    modes, control = set(registration.meets_by), registration.control
    if registration.role is Role.PREFILL and control and (modes == {api.ControlMode.CURVE}) != bool(control.public_key):
        raise errors.InvalidInputError(f"{who} meets others by {modes_text(registration)}; its control address differs")
    try:
        stage_layers(registration.geometry.layer_count, registration.pp_size, 0, registration.stage_boundaries)
    except errors.InvalidInputError as error:
        raise errors.InvalidInputError(f"{who}: {error}") from error
    if not registration.ranks:
        raise errors.InvalidInputError(f"{who} has no rank")
    seen: set[Rank] = set()
    for rank in registration.ranks:
        if rank.pp >= registration.pp_size or rank.tp >= registration.tp_size:
            raise errors.InvalidInputError(f"{who}: no rank {rank} in {registration.pp_size} x {registration.tp_size}")
        if rank in seen:
            raise errors.InvalidInputError(f"{who}: rank {rank} is listed twice")
        seen.add(rank)


def check_agreement(new: NodeRegistration, other: NodeRegistration) -> None:
    """Raise ConflictError or FingerprintMismatchError for a node that cannot be in the same instance as another one."""
    where = f"node '{new.node}' cannot join instance '{new.instance}'"
    for name in ("role", "pp_size", "tp_size", "stage_boundaries", "model_identity"):
        ours, theirs = getattr(new, name), getattr(other, name)
        if ours != theirs:
            raise errors.ConflictError(f"{where}: its {name} is {ours}, that of node '{other.node}' is {theirs}")
    if set(new.meets_by) != set(other.meets_by):
        raise errors.ConflictError(
            f"{where}: it meets others by {modes_text(new)}, node '{other.node}' by {modes_text(other)}: {MODES_REMEDY}"
        )
    if difference := first_difference(new.geometry, other.geometry):
        raise errors.FingerprintMismatchError(
            f"{where}: {difference} (here: node '{new.node}', peer: node '{other.node}'); "
            "give both the same model and encoding"
        )
    taken = set(other.ranks)
    for rank in new.ranks:
        if rank in taken:
            raise errors.ConflictError(f"{where}: rank {rank} already lives on node '{other.node}' at {other.http_url}")

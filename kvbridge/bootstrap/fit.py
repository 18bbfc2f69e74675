"""Which pair of instances suits a request: a pure choice.

Owns: demand, fit, order of preference. Must not know: HTTP, reservations, time.

An instance is *free* by the share of its scarcest pool that would be left after the request; a negative share says that it looks
full. The best pair has the largest sum of both shares; equal ones go by fewer rooms, then by name, so that the choice is the
same wherever it is made. Each of these is a sum, or an order, of one part for each side: the best pair is the best prefill with the
best decode instance, and nobody has to look at all pairs.

What the directory knows is as old as a heartbeat, and what was charged since is a guess. So a pair that looks full is offered too,
after all others: the daemons decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kvbridge.api.directory import ControlMode, Load, NodeRegistration, PairRequest
from kvbridge.api.rooms import PeerAddress
from kvbridge.bootstrap.nodes import MODES_REMEDY, Instance, modes_text
from kvbridge.core.errors import FingerprintMismatchError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.manifest import first_difference
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import Role

Pages = dict[str, int]
"""Pages by index space."""

SHOWN = 8
"""Instances that are named in a refusal."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two instances that could serve one request."""

    prefill: Instance
    decode: Instance
    demands: dict[str, Pages]
    """What the request needs on each node, by the name of its instance."""
    looks_full: bool
    """Whether one of them has no room for it by the directory's knowledge."""

    @property
    def controls(self) -> tuple[PeerAddress, ...]:
        """Where the decode side meets the prefill nodes."""
        found = (record.registration.control for record in self.prefill.nodes)
        return tuple(control for control in found if control is not None)


@dataclass(frozen=True, slots=True)
class _Option:
    """One instance for one request."""

    instance: Instance
    needed: Pages
    share: float

    def order(self) -> tuple[float, int, str]:
        return -self.share, self.instance.rooms, self.instance.name


_Way = tuple[str, ControlMode]
"""What the two instances of a pair have in common: the model, by its fingerprint, and how they meet."""


class Ranking:
    """The instances that could serve one request."""

    def __init__(self, instances: Iterable[Instance], request: PairRequest) -> None:
        """Order the instances by how well they suit the request.

        Raises NotReadyError when a role has no ready instance, FingerprintMismatchError when no two ready instances
        hold the same model, InvalidInputError when the request is larger than every pool.
        """
        instances = tuple(instances)
        prefill = _ready(instances, Role.PREFILL, request)
        decode = _ready(instances, Role.DECODE, request)
        ways = _ways(prefill) & _ways(decode)
        if not ways:
            models = {instance.fingerprint for instance in prefill} & {instance.fingerprint for instance in decode}
            if not models:
                raise _mismatch(prefill[0], decode[0])
            raise _no_common_mode([one for one in (*prefill, *decode) if one.fingerprint in models])
        known: dict[tuple[object, ...], Pages] = {}
        matching: list[Instance] = []
        sides: dict[_Way, tuple[list[_Option], list[_Option]]] = {way: ([], []) for way in sorted(ways)}
        for instance in (*prefill, *decode):
            # All of a large fleet, for each request: compared, since an enumeration's hash is not quick.
            own = [way for way in ways if way[0] == instance.fingerprint and way[1] in instance.first.meets_by]
            if not own:
                continue
            matching.append(instance)
            if (option := _option(instance, request, known)) is not None:
                for way in own:
                    sides[way][instance.role is Role.DECODE].append(option)
        # Prefill and decode of each way to be a pair, the best first.
        self._sides = [
            (sorted(senders, key=_Option.order), sorted(receivers, key=_Option.order))
            for senders, receivers in sides.values()
            if senders and receivers
        ]
        if not self._sides:
            raise InvalidInputError(
                f"a request of {request.prompt_tokens} prompt and {request.max_new_tokens} new tokens is larger than "
                f"the pools of every pair of instances ({_names(matching)}): enlarge pools.* or shorten the request"
            )

    def best(self, *, without: Collection[str] = ()) -> Candidate | None:
        """Return the best pair of instances that are not named in `without`; None when none is left."""
        pairs = []
        for sides in self._sides:
            first = [next((one for one in side if one.instance.name not in without), None) for side in sides]
            sender, receiver = first
            if sender is not None and receiver is not None:
                pairs.append((sender, receiver))
        if not pairs:
            return None
        sender, receiver = min(pairs, key=_pair_order)
        return Candidate(
            prefill=sender.instance,
            decode=receiver.instance,
            demands={sender.instance.name: sender.needed, receiver.instance.name: receiver.needed},
            looks_full=min(sender.share, receiver.share) < 0,
        )


def _pair_order(pair: tuple[_Option, _Option]) -> tuple[bool, float, int, str, str]:
    sender, receiver = pair
    return (
        min(sender.share, receiver.share) < 0,
        -(sender.share + receiver.share),
        sender.instance.rooms + receiver.instance.rooms,
        sender.instance.name,
        receiver.instance.name,
    )


def _option(instance: Instance, request: PairRequest, known: dict[tuple[object, ...], Pages]) -> _Option | None:
    """Return an instance's option; None when its pools could never hold the request. `known`: demands of nodes that are alike."""
    needed: Pages = {}
    share = 1.0
    for record in instance.nodes:
        registration, total = record.registration, record.beat.load.total_pages
        alike = (registration.fingerprint, registration.role, registration.host)
        needed = known[alike] if alike in known else known.setdefault(alike, demand(registration, request))
        if any(0 < total.get(space, 0) < count for space, count in needed.items()):
            return None
        share = min(share, free_share(record.beat.load, needed, record.charged_pages))
    return _Option(instance, needed, share)


def demand(registration: NodeRegistration, request: PairRequest) -> Pages:
    """Return the pages that the request needs on a node, by index space."""
    decode = registration.role is Role.DECODE
    pages = pages_needed(
        registration.geometry,
        tokens=request.prompt_tokens + (request.max_new_tokens if decode else 0),
        prompt_tokens=request.prompt_tokens,
        host=frozenset(registration.host),
    )
    return {space.value: count for space, count in pages.items()}


def free_share(load: Load, needed: Pages, charged: Mapping[str, int]) -> float:
    """Return the share of the scarcest pool that the request would leave, after what was `charged`; negative: it looks full.

    Pools that a node does not report, or reports as empty of pages altogether, set no limit here.
    """
    shares = [
        (load.free_pages.get(space, 0) - charged.get(space, 0) - count) / load.total_pages[space]
        for space, count in needed.items()
        if load.total_pages.get(space, 0)
    ]
    return min(shares, default=1.0)


def _ready(instances: tuple[Instance, ...], role: Role, request: PairRequest) -> list[Instance]:
    of_role = [
        instance
        for instance in instances
        if instance.role is role and request.fingerprint in {"", instance.fingerprint}
    ]
    ready = [instance for instance in of_role if instance.ready]
    if ready:
        return ready
    model = f" with fingerprint {request.fingerprint}" if request.fingerprint else ""
    reasons = "; ".join(f"'{instance.name}': {', '.join(instance.reasons())}" for instance in of_role)
    raise NotReadyError(f"no {role} instance{model} is ready: {reasons or 'none is registered'}")


def _mismatch(sender: Instance, receiver: Instance) -> FingerprintMismatchError:
    difference = first_difference(sender.first.geometry, receiver.first.geometry)
    return FingerprintMismatchError(
        f"no prefill instance holds the same model as a decode instance; between '{sender.name}' (here) and "
        f"'{receiver.name}' (peer) the first difference is: {difference}; give both the same model and encoding"
    )


def _ways(instances: Iterable[Instance]) -> set[_Way]:
    return {(instance.fingerprint, mode) for instance in instances for mode in instance.first.meets_by}


def _no_common_mode(instances: list[Instance]) -> NotReadyError:
    how = ", ".join(f"{one.role} '{one.name}' by {modes_text(one)}" for one in instances[:SHOWN])
    return NotReadyError(f"no prefill instance can meet a decode instance of the same model: {how}; {MODES_REMEDY}")


def _names(instances: list[Instance]) -> str:
    shown = ", ".join(f"'{instance.name}'" for instance in instances[:SHOWN])
    return shown if len(instances) <= SHOWN else f"{shown} and {len(instances) - SHOWN} more"

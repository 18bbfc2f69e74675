"""Which pair of instances suits a request: a pure choice.

An instance is *free* by the share of its scarcest pool that would be left after the request; a negative share says that it looks
full. Cached pages that nobody reads count as left. One that is likely to hold the beginning of the prompt (`prefixes.py`) gets half
of the share that it holds on top: to hold all of it is worth half a pool that is free, and never one that looks full. The best pair
has the largest sum of both; equal ones go by fewer rooms, then by name. Each of these is a sum, or an order, of one part for each
side: the best pair is the best prefill with the best decode instance, and nobody has to look at all pairs.

What the directory knows is as old as a heartbeat, and what was charged since is a guess. So a pair that looks full is offered too,
after all others: the daemons decide.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kvbridge.api.directory import Load, NodeRegistration, PairRequest
from kvbridge.bootstrap.nodes import Instance, Way, mismatch
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import Role

Pages = dict[str, int]
"""Pages by index space."""

HELD_WEIGHT = 0.5
"""What it is worth to hold a whole prompt, in shares of a pool that is free."""
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


class _Option(NamedTuple):
    """One instance for one request. The smaller of two is better: fields come in the order of preference, and names differ."""

    looks_full: bool
    cost: float
    """The share that would be free, and what the instance is likely to hold, negated."""
    rooms: int
    name: str
    instance: Instance
    needed: Pages


class Ranking:
    """The instances that could serve one request."""

    def __init__(
        self, instances: Iterable[Instance], request: PairRequest, held: Mapping[str, float] | None = None
    ) -> None:
        """Find out how well each instance suits the request. `held`: which share of its prompt an instance is likely to hold.

        Raises NotReadyError when a role has no ready instance, FingerprintMismatchError when no two ready instances
        hold the same model, InvalidInputError when the request is larger than every pool.
        """
        instances = tuple(instances)
        prefill = _ready(instances, Role.PREFILL, request)
        decode = _ready(instances, Role.DECODE, request)
        known: dict[tuple[str, ...], Pages] = {}
        sides: dict[Way, tuple[list[_Option], list[_Option]]] = {}
        for side, of_role in enumerate((prefill, decode)):
            for instance in of_role:
                if (option := _option(instance, request, known, (held or {}).get(instance.name, 0.0))) is not None:
                    for way in instance.ways:
                        sides.setdefault(way, ([], []))[side].append(option)
        self._sides = [(senders, receivers) for senders, receivers in sides.values() if senders and receivers]
        """Prefill and decode of each way to be a pair."""
        if not self._sides:
            raise _no_pair(prefill, decode, request)

    @property
    def looks_full(self) -> bool:
        """Whether every pair does."""
        return all(_looks_full((min(senders), min(receivers))) for senders, receivers in self._sides)

    def best(self, *, without: Collection[str] = ()) -> Candidate | None:
        """Return the best pair of instances that are not named in `without`; None when none is left."""
        best: tuple[_Option, _Option] | None = None
        for senders, receivers in self._sides:
            sender = min((one for one in senders if one.name not in without), default=None)
            receiver = min((one for one in receivers if one.name not in without), default=None)
            if sender is not None and receiver is not None:
                best = min(best or (sender, receiver), (sender, receiver), key=_pair_order)
        if best is None:
            return None
        sender, receiver = best
        return Candidate(
            prefill=sender.instance,
            decode=receiver.instance,
            demands={sender.name: sender.needed, receiver.name: receiver.needed},
            looks_full=_looks_full(best),
        )


def _looks_full(pair: tuple[_Option, _Option]) -> bool:
    return any(option.looks_full for option in pair)


def _pair_order(pair: tuple[_Option, _Option]) -> tuple[bool, float, int, str, str]:
    sender, receiver = pair
    return (
        _looks_full(pair),
        sender.cost + receiver.cost,
        sender.rooms + receiver.rooms,
        sender.name,
        receiver.name,
    )


def _option(
    instance: Instance, request: PairRequest, known: dict[tuple[str, ...], Pages], held: float
) -> _Option | None:
    """Return an instance's option; None when its pools could never hold the request. `known`: demands of nodes that are alike."""
    needed: Pages = {}
    share = 1.0
    for record in instance.nodes:
        entry, load = record.entry, record.beat.load
        if (found := known.get(entry.kind)) is None:
            found = known[entry.kind] = demand(entry.registration, request)
        needed = found
        share = min(share, free_share(load, needed, record.charged_pages))
        if share < 0 and any(0 < load.total_pages.get(space, 0) < count for space, count in needed.items()):
            return None  # it does not only look full
    return _Option(share < 0, -share - HELD_WEIGHT * held, instance.rooms, instance.name, instance, needed)


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
    least = math.inf
    totals, available = load.total_pages, load.available_pages
    for space, count in needed.items():
        if total := totals.get(space, 0):
            share = (available.get(space, 0) - charged.get(space, 0) - count) / total
            least = min(least, share)
    return 1.0 if least == math.inf else least


def _ready(instances: tuple[Instance, ...], role: Role, request: PairRequest) -> list[Instance]:
    of_role = [instance for instance in instances if instance.first.role is role]
    if request.fingerprint:
        of_role = [instance for instance in of_role if instance.fingerprint == request.fingerprint]
    ready = [instance for instance in of_role if instance.ready]
    if ready:
        return ready
    model = f" with fingerprint {request.fingerprint}" if request.fingerprint else ""
    reasons = "; ".join(f"'{instance.name}': {', '.join(instance.reasons())}" for instance in of_role[:SHOWN])
    if len(of_role) > SHOWN:
        reasons += f"; and {len(of_role) - SHOWN} more"
    raise NotReadyError(f"no {role} instance{model} is ready: {reasons or 'none is registered'}")


def _no_pair(prefill: list[Instance], decode: list[Instance], request: PairRequest) -> BridgeError:
    """Return why no two instances that are ready are a pair for a request."""
    if ways := _ways(prefill) & _ways(decode):
        matching = [instance for instance in (*prefill, *decode) if not ways.isdisjoint(instance.ways)]
        return InvalidInputError(
            f"a request of {request.prompt_tokens} prompt and {request.max_new_tokens} new tokens is larger than "
            f"the pools of every pair of instances ({_names(matching)}): enlarge pools.* or shorten the request"
        )
    errors = [mismatch(instance, decode) for instance in prefill[:SHOWN]]
    # Whoever only cannot meet is nearer to a pair than who holds something else.
    return next((error for error in errors if isinstance(error, NotReadyError)), errors[0])


def _ways(instances: Iterable[Instance]) -> set[Way]:
    return {way for instance in instances for way in instance.ways}


def _names(instances: list[Instance]) -> str:
    shown = ", ".join(f"'{instance.name}'" for instance in instances[:SHOWN])
    return shown if len(instances) <= SHOWN else f"{shown} and {len(instances) - SHOWN} more"

"""The pair of instances that suits a request.

An instance is *free* by the share of its scarcest pool that would be left after the request; a negative share says that it looks
full. Cached pages that nobody reads count as left. An instance that is likely to hold the beginning of the prompt (`prefixes.py`)
gets half of the share that it holds on top: to hold all of it is worth half a free pool, and never a pool that looks full. The best
pair has the largest sum of both; equal pairs go by fewer rooms, then by name. Each of these is a sum, or an order, of one part for
each side: the best pair is the best prefill with the best decode instance, and nobody has to look at all pairs.

A few instances of each role are drawn at random, and the best pair of those is as good as the best of all, or better. What is known
is as old as a heartbeat, so taking the best of all would send everybody to the same instances, and a fleet that is filled quite
evenly has place for a very long prompt nowhere (`docs/performance.md` has the figures). When no drawn pair has place, more are
drawn, together with the instances that had the most free pages lately. A pair that looks full is offered too, after all others: the
daemons decide.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvbridge.api.directory import NodeRegistration, PairRequest, Ticket
from kvbridge.bootstrap.directory import Directory
from kvbridge.bootstrap.nodes import Instance, NodeRecord, Way, mismatch
from kvbridge.bootstrap.prefixes import guess_held_pages, holders, judge, keeps_prefixes, noted_keys
from kvbridge.bootstrap.stores.base import Store
from kvbridge.core.addresses import PeerAddress
from kvbridge.core.errors import BridgeError, FingerprintMismatchError, InvalidInputError, NotReadyError
from kvbridge.core.geometry.pages import pages_needed
from kvbridge.core.ids import Role
from kvbridge.telemetry.facts import PrefixGuessed
from kvbridge.tier.keys import Keys

Pages = dict[str, int]
"""Pages by index space."""

HELD_WEIGHT = 0.5
"""The worth of holding a whole prompt, in shares of a free pool."""
SHOWN = 8
"""Instances that are named in a refusal."""
DRAWN: Final = (5, 64)
"""Instances of each role that are drawn for a request: at first, and with the freest ones when no pair of those has place."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Two instances that could serve one request."""

    prefill: Instance
    decode: Instance
    demands: dict[str, Pages]
    """Pages that the request needs on each node, by the name of its instance."""
    looks_full: bool
    """Whether one of them has no room for it by the directory's knowledge."""

    @property
    def controls(self) -> tuple[PeerAddress, ...]:
        """Where the decode side meets the prefill nodes."""
        found = (record.registration.control for record in self.prefill.nodes)
        return tuple(control for control in found if control is not None)


class _Option(NamedTuple):
    """One instance for one request. The smaller of two is better: fields stand in the order of preference, and names differ."""

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
        """Rate each instance for the request. `held`: the share of its prompt that an instance is likely to hold.

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
        entry = record.entry
        if (found := known.get(entry.kind)) is None:
            found = known[entry.kind] = demand(entry.registration, request)
        needed = found
        share = min(share, _share_left(record, needed))
        if share < 0 and any(0 < record.beat.load.total_pages.get(space, 0) < count for space, count in needed.items()):
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


def _share_left(record: NodeRecord, needed: Pages) -> float:
    """Return the share of the scarcest pool that the request would leave; negative: the node looks full.

    Pools that a node does not report, or reports as empty of pages altogether, set no limit here.
    """
    totals = record.beat.load.total_pages
    shares = (
        (record.free_pages(space) - count) / totals[space] for space, count in needed.items() if totals.get(space)
    )
    return min(shares, default=1.0)


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
    # An instance that only cannot meet is nearer to a pair than one that holds another model.
    return next((error for error in errors if isinstance(error, NotReadyError)), errors[0])


def _ways(instances: Iterable[Instance]) -> set[Way]:
    return {way for instance in instances for way in instance.ways}


def _names(instances: list[Instance]) -> str:
    shown = ", ".join(f"'{instance.name}'" for instance in instances[:SHOWN])
    return shown if len(instances) <= SHOWN else f"{shown} and {len(instances) - SHOWN} more"


@dataclass(frozen=True, slots=True)
class Look:
    """The instances that were looked at for one request."""

    instances: tuple[Instance, ...]
    guessed: dict[str, int]
    """Pages of the prompt that they are likely to hold, by name."""
    ranking: Ranking

    def judged(self, ticket: Ticket) -> Iterator[PrefixGuessed]:
        """Return what became of the guesses, as both ends say."""
        ends = (
            (Role.PREFILL, ticket.prefill, ticket.computed_tokens),
            (Role.DECODE, ticket.decode, ticket.prefix_tokens),
        )
        for role, end, held_tokens in ends:
            of_role = (instance.name for instance in self.instances if instance.role is role)
            yield PrefixGuessed(role=role.value, guess=judge(end.instance, held_tokens, self.guessed, of_role).value)


class Looks:
    """Draws candidates for requests."""

    def __init__(self, directory: Directory, rooms: Store) -> None:
        self._directory = directory
        self._rooms = rooms
        self._whole = asyncio.Lock()
        """Held while all instances are looked at: a large fleet takes so long that heartbeats have to come in between."""

    async def look(self, request: PairRequest, keys: Keys) -> Look:
        """Return instances of which two are a pair for the request. Raises as `Ranking` when no two of all are."""
        found: Look | None = None
        for count, names in zip(DRAWN, ((), self._directory.freest(request.fingerprint)), strict=True):
            drawn = await self._directory.draw(count, request.fingerprint, names)
            instances, guessed = await self._guess(request, keys, drawn)
            with contextlib.suppress(NotReadyError, FingerprintMismatchError, InvalidInputError):
                found = _ranked(request, keys, instances, guessed)
                if not found.ranking.looks_full:
                    break
        if found is not None:
            return found
        async with self._whole:
            return _ranked(request, keys, *await self._guess(request, keys, await self._directory.instances()))

    async def _guess(
        self, request: PairRequest, keys: Keys, instances: tuple[Instance, ...]
    ) -> tuple[tuple[Instance, ...], dict[str, int]]:
        """Return `instances` with those that may hold the prompt, and the pages of it that each is likely to hold, by name."""
        if not (keys and any(map(keeps_prefixes, instances))):
            return instances, {}
        notes = await self._rooms.noted(noted_keys(keys, request.namespace))
        known = {instance.name for instance in instances}
        if others := [name for name in holders(notes) if name not in known]:
            instances = (*instances, *await self._directory.draw(0, names=others))
        return instances, guess_held_pages(instances, notes, len(keys))


def _ranked(request: PairRequest, keys: Keys, instances: tuple[Instance, ...], guessed: dict[str, int]) -> Look:
    shares = {name: pages / len(keys) for name, pages in guessed.items()}
    return Look(instances, guessed, Ranking(instances, request, shares))
